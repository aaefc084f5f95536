"""State dicts of optimizers whose parameters have stand-ins.

``state_dict`` shows states and main weights as the DTensors that they are, and ``load_state_dict`` takes them back. One
exception: DTensor has no words for rows that are cut unevenly several times, and DCP, which goes by its arithmetic,
would put them in wrong places without an error (torch 2.11 to 2.15). Such states are padded to the same number of rows
on all ranks, and get a leading dim for each axis that cuts them: right on the same mesh, and of another shape, hence
refused, on any other. te_fsdp.checkpoint knows the rows and has no such limit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor, Shard

from te_fsdp import _te, _torch
from te_fsdp._te_patches import install_on
from te_fsdp.errors import CheckpointError
from te_fsdp.sharding.outer_chunks import Chunk
from te_fsdp.sharding.outer_state import MAIN, StandIns

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement
    from torch.optim import Optimizer

__all__ = ["make_stand_ins"]


def make_stand_ins(optimizer: Optimizer, *, cuts: bool) -> StandIns:
    """The stand-ins of an optimizer, taking part in its steps and its state dicts. Local operation."""
    stand_ins = StandIns(optimizer, cuts=cuts)
    dicts = _StateDicts(stand_ins)
    optimizer.register_state_dict_pre_hook(dicts.before_save)
    optimizer.register_state_dict_post_hook(dicts.after_save)
    optimizer.register_load_state_dict_pre_hook(dicts.before_load)
    optimizer.register_load_state_dict_post_hook(dicts.after_load)
    if _te.is_fused_adam(optimizer):
        install_on(optimizer, "save", dicts.saving(optimizer, optimizer.state_dict))
        install_on(optimizer, "load", dicts.loading(optimizer, optimizer.load_state_dict))
    return stand_ins


class _StateDicts:
    """What happens around an optimizer's state dicts.

    Attributes:
        stand_ins: Its stand-ins.
        inside: Whether a method of FusedAdam's is running, which goes on after torch's and looks at the groups again.
    """

    def __init__(self, stand_ins: StandIns) -> None:
        self.stand_ins = stand_ins
        self.inside = False

    def saving(
        self, optimizer: Optimizer, stock: Callable[[], dict[str, Any]]
    ) -> Callable[[], dict[str, Any]]:
        """FusedAdam's ``state_dict``, with stand-ins in place to its end."""

        def state_dict() -> dict[str, Any]:
            self.before_save(optimizer)
            self.inside = True
            try:
                result = stock()
            finally:
                self.inside = False
                self.stand_ins.put_back(optimizer)
            self.after_save(optimizer, result)
            return result

        return state_dict

    def loading(
        self, optimizer: Optimizer, stock: Callable[[dict[str, Any]], None]
    ) -> Callable[[dict[str, Any]], None]:
        """FusedAdam's ``load_state_dict``, with stand-ins in place to its end."""

        def load_state_dict(state_dict: dict[str, Any]) -> None:
            fitted = self.before_load(optimizer, state_dict)
            self.inside = True
            try:
                stock(fitted)
            finally:
                self.inside = False
                self.after_load(optimizer)

        return load_state_dict

    def before_save(self, optimizer: Optimizer) -> None:
        if self.inside:
            return
        if self.stand_ins.cuts:
            self.stand_ins.stand_in(optimizer, keep_main=True)
        else:
            self.stand_ins.put_back(optimizer)

    def after_save(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        if self.inside:
            return
        self.stand_ins.put_back(optimizer)
        for key, chunk in self._chunks(optimizer, state_dict):
            state = state_dict["state"].get(key)
            if state and not _is_exact(chunk):
                state_dict["state"][key] = {name: _padded(chunk, value) for name, value in state.items()}

    def before_load(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Loaded state is cast to the dtype of the parameters in the groups: these must be the fp32 ones."""
        if self.inside:
            return state_dict
        alone = [key for key, state in state_dict["state"].items() if set(state) == {MAIN}]
        if alone:
            raise CheckpointError(
                f"{type(optimizer).__name__}.load_state_dict: {len(alone)} parameter(s) with main weights alone",
                expected="the whole state",
                got="that of an optimizer that has not stepped",
                why="DCP fills the state dict of an optimizer as it is: what is missing there is not loaded",
                fix="use te_fsdp.checkpoint.load, which makes the missing state",
            )
        fitted = {**state_dict, "state": self._fitted(optimizer, state_dict)}
        self.stand_ins.stand_in(optimizer)
        return fitted

    @torch.no_grad()
    def after_load(self, optimizer: Optimizer) -> None:
        """Copy loaded main weights into those that are there, and end standing in."""
        if self.inside:
            return
        for pair in self.stand_ins.pairs:
            loaded = optimizer.state.get(pair.main, {}).pop(MAIN, None)
            if loaded is not None and pair.low:
                _torch.local_of(pair.main).copy_(_torch.local_of(loaded))
        self.stand_ins.put_back(optimizer)

    def _chunks(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> Iterator[tuple[Any, Chunk]]:
        """Key in the state dict and rows of each cut parameter."""
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        held = [p for group in optimizer.param_groups for p in group["params"]]
        for key, parameter in zip(keys, held, strict=False):  # torch compares the groups, with a message
            chunk = self.stand_ins.chunk(parameter)
            if chunk is not None:
                yield key, chunk

    def _fitted(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[Any, Any]:
        """The states of a state dict, those of cut parameters as this rank's rows."""
        states = dict(state_dict["state"])
        self.stand_ins.put_back(optimizer)
        for key, chunk in self._chunks(optimizer, state_dict):
            if key in states:
                states[key] = {name: _own_rows(chunk, name, value) for name, value in states[key].items()}
        return states


def _cutting(chunk: Chunk) -> list[int]:
    """The axes of ``copies.mesh`` that cut dim 0, in their order there; the last one cuts first."""
    return [axis for axis, p in enumerate(chunk.placements) if _torch.shard_dim_of(p) == 0]


def _is_exact(chunk: Chunk) -> bool:
    """Whether DTensor's arithmetic is right: one axis cuts the rows, or each does so evenly."""
    if chunk.dim:
        return True  # chosen because it is even
    sizes = [chunk.copies.mesh.size(axis) for axis in reversed(_cutting(chunk))]
    return sum(size > 1 for size in sizes) <= 1 or chunk.parameter.shape[0] % math.prod(sizes) == 0


def _padded(chunk: Chunk, value: Any) -> Any:
    """A state of unevenly cut rows with one leading dim for each axis that cuts them, and padded rows after these."""
    if not isinstance(value, DTensor) or value.shape != chunk.parameter.shape:
        return value
    mesh, axes, rows = chunk.copies.mesh, _cutting(chunk), value.shape[0]
    for axis in reversed(axes):
        rows = -(-rows // mesh.size(axis))
    local = _torch.local_of(value)
    padded = local.new_zeros((*(1 for _ in axes), rows, *local.shape[1:]))
    padded.view(rows, *local.shape[1:])[: len(local)].copy_(local)
    shape = torch.Size((*(mesh.size(axis) for axis in axes), rows, *value.shape[1:]))
    placements = [
        Shard(axes.index(axis)) if axis in axes else _shifted(placement, len(axes))
        for axis, placement in enumerate(chunk.placements)
    ]
    return _torch.placed(padded, mesh, placements, torch.empty(shape, device="meta"))


def _shifted(placement: Placement, dims: int) -> Placement:
    """A placement of another dim than the first, behind new leading dims."""
    dim = _torch.shard_dim_of(placement)
    if dim is None:
        return placement
    factor = getattr(placement, "split_factor", 1)
    return Shard(dim + dims) if factor == 1 else _torch.strided_shard(dim + dims, factor)


def _own_rows(chunk: Chunk, name: str, value: Any) -> Any:
    """A loaded state as this rank's rows: cut and maybe padded, or of the whole shard."""
    if not isinstance(value, torch.Tensor) or value.ndim == 0:
        return value
    local, leading = _torch.local_of(value), len(_cutting(chunk))
    if value.ndim == chunk.parameter.ndim + leading:
        local = local.reshape(local.shape[leading:])[: chunk.high - chunk.low]
    elif tuple(local.shape) != chunk.shape and local.shape == _torch.local_of(chunk.parameter).shape:
        local = chunk.of(local).contiguous()
    if tuple(local.shape) != chunk.shape:
        raise CheckpointError(
            f"load_state_dict: {name} of a parameter of shape {tuple(chunk.parameter.shape)}",
            expected=f"this rank's rows, {chunk.shape}, or those of its shard",
            got=f"{tuple(local.shape)} of {tuple(value.shape)}",
            fix="load it on the mesh that it was saved on, or through te_fsdp.checkpoint",
        )
    return chunk.distributed(local)
