"""FSDP2's reduction of gradients from where they lie, instead of from a buffer that they are copied into.

Of whole shards nothing is reduced, and their gradients are passed on (:func:`pass_whole_gradients`). Over several ranks
(``zero_copy_gradients``):

FSDP2 copies all gradients of a unit into the input of one reduce-scatter, cut into what each rank shall get. A gradient
that is cut along its first dim into equal parts can be sent as it is. So here each large gradient is a part of its own,
small ones are copied together, and the parts are reduced by reduce-scatters that NCCL runs as one operation. The output
is the same:

    FSDP2   a0 b0 c0 a1 b1 c1    one reduce-scatter        rank r: ar br cr
    here    a0 a1 | b0 c0 b1 c1  one for "a", for "b c"    rank r: ar br cr

Which parts there are depends on shapes alone, so that all ranks agree: a gradient that has another dtype than is sent,
or holes, is copied by itself. FSDP2 keeps what it takes for the input until the reduction has ended, and so the parts.

FSDP2 asks a reduce-scatter of one's own for the input's memory, but fills it itself (``chunk_cat``, from torch 2.15 on
``chunk_cat_mixed_dtype``), and divides it where the dtype has little range. It gets a tensor that answers these two
operations in its own way, and no other (``__torch_function__``).

Private names of FSDP2, checked on torch 2.11 to 2.15.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from te_fsdp._fsdp2_patches import listen
from te_fsdp._torch import fsdp_parameter_groups, local_of

#: Elements of a gradient that is sent by itself: copying smaller ones together costs less than sending them apart.
LARGE = 1 << 16


class Part(NamedTuple):
    """What a reduce-scatter sends: elements of all ranks, of so many gradients."""

    numel: int
    count: int
    is_large: bool


class Parts(NamedTuple):
    """How the gradients of a parameter group are sent.

    Attributes:
        ranks: Over which they are cut.
        parts: In the order of the gradients.
    """

    ranks: int
    parts: tuple[Part, ...]

    @property
    def numel(self) -> int:
        """Elements of all parts, with what pads the last ranks' rows."""
        return sum(part.numel for part in self.parts)


class Input(torch.Tensor):
    """What FSDP2 takes for the input of a reduce-scatter; it has no elements of its own.

    Attributes:
        sent: 1-D tensors, one for each part.
        kept: What must not be freed before the reduction has ended, since another stream reads it.
        how: What they are made of.
    """

    sent: list[torch.Tensor]
    kept: list[torch.Tensor]
    how: Parts

    @classmethod
    def make(cls, how: Parts, dtype: torch.dtype, device: torch.device) -> Input:
        """One that is to be filled, to be sent in ``dtype``."""
        made = torch.empty(0, dtype=dtype, device=device).as_subclass(cls)
        made.sent, made.kept, made.how = [], [], how
        return made

    def view(self, *shape: Any) -> Input:  # type: ignore[override]
        """Itself: FSDP2 wants rows of ranks only to have them filled."""
        return self

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """What FSDP2 does with the input of a reduce-scatter."""
        into = (kwargs or {}).get("out")
        with torch._C.DisableTorchFunctionSubclass():
            if isinstance(into, cls):
                return into._fill(args[0], func)
            if func is torch.Tensor.div_:
                made, divisor = args
                # Not in place: others may look at a gradient.
                made.kept = made.sent
                made.sent = [part / divisor for part in made.kept]
                return made
        raise AssertionError(f"FSDP2 has done something new with the input of a reduce-scatter: {func}")

    def _fill(self, gradients: Sequence[torch.Tensor], chunk_cat: Any) -> None:
        """Take gradients in FSDP2's order."""
        left = [gradient for gradient in gradients if gradient.numel()]
        # Those of all trained parameters, see reduce_unused.
        assert len(left) == sum(part.count for part in self.how.parts)
        for part in self.how.parts:
            mine, left = left[: part.count], left[part.count :]
            if part.is_large:
                self.sent.append(mine[0].to(self.dtype).contiguous().view(-1))
                continue
            memory = torch.empty(part.numel, dtype=self.dtype, device=self.device)
            chunk_cat(mine, dim=0, num_chunks=self.how.ranks, out=memory.view(self.how.ranks, -1))
            self.sent.append(memory)


#: Attribute of a parameter group: whether its gradients are reduced from where they lie.
_KEY = "_te_fsdp_zero_copy"
#: Attribute of a parameter group: its trained records at the last look, and their parts.
_PARTS = "_te_fsdp_gradient_parts"


def reduce_from_where_they_lie(group: Any) -> None:
    """Let a parameter group's gradients be sent so by a reduce-scatter of te_fsdp's. Local operation."""
    group.__dict__[_KEY] = True


def input_of(group: Any, numel: int, dtype: torch.dtype) -> Input | None:
    """What FSDP2 is to be given for the input of a reduction, if it is not memory. Local operation.

    Args:
        group: The parameter group that reduces.
        numel: Elements that FSDP2 asks for.
        dtype: That is sent.

    Returns:
        ``None`` where nothing can be sent as it lies, or FSDP2 reduces other gradients than those of all trained
        parameters: on all ranks then.
    """
    if not group.__dict__.get(_KEY, False):
        return None
    how = _parts_of(group)
    if how.numel != numel or not any(part.is_large for part in how.parts):
        return None
    return Input.make(how, dtype, group.device)


def _parts_of(group: Any) -> Parts:
    """How the gradients of a parameter group's trained parameters are sent: the same on all ranks."""
    trained = [managed for managed in _in_order(group) if managed.sharded_param.requires_grad]
    known = group.__dict__.get(_PARTS)
    if known is None or known[0] != trained:
        known = group.__dict__[_PARTS] = trained, _find_parts(trained, group.mesh_info.shard_mesh_size)
    return known[1]


def _find_parts(trained: list[Any], ranks: int) -> Parts:
    """The parts of the gradients of some of FSDP2's records, whose shapes do not change."""
    parts = list[Part]()
    for managed in trained:
        numel = managed.padded_sharded_param_size.numel() * ranks
        if numel == 0:
            continue
        if numel >= LARGE and not _why_copied(managed, ranks):
            parts.append(Part(numel, 1, is_large=True))
        elif parts and not parts[-1].is_large:
            parts[-1] = Part(parts[-1].numel + numel, parts[-1].count + 1, is_large=False)
        else:
            parts.append(Part(numel, 1, is_large=False))
    return Parts(ranks, tuple(parts))


def _in_order(group: Any) -> list[Any]:
    """FSDP2's records in the order in which gradients are reduced: torch 2.15 sorts them by dtype."""
    order = getattr(group, "_reduce_scatter_param_indices", None)
    return [group.fsdp_params[at] for at in order] if order else group.fsdp_params


def _why_copied(managed: Any, ranks: int) -> str:
    """Why a gradient cannot be sent as it lies. One cut along another dim FSDP2 has copied already, in order."""
    rows = managed._orig_size[0]
    if managed.fsdp_placement.dim == 0 and rows % ranks:
        return f"{rows} rows are not cut evenly over {ranks} ranks"
    return ""


def large_gradients(group: Any) -> list[tuple[Any, str]]:
    """FSDP2's records of large parameters, each with why its gradient cannot be sent as it lies, or nothing."""
    ranks = group.mesh_info.shard_mesh_size
    large = (m for m in group.fsdp_params if m.padded_sharded_param_size.numel() * ranks >= LARGE)
    return [(managed, _why_copied(managed, ranks)) for managed in large]


# --- shards that are whole

#: Attribute of a parameter group: whether it passes its gradients on.
_PASSES = "_te_fsdp_passes"


def pass_whole_gradients(unit: torch.nn.Module) -> None:
    """Make gradients of whole shards those of the sharded parameters as they are. Local operation.

    Over a shard axis of size 1 FSDP2 has nothing to reduce, yet it copies gradients into the input of a reduction, and
    from there into its output (``foreach_reduce``). Here they are passed on before it reduces, and it finds none; only
    what it would cast, divide or add is written. FSDP2 does as ever where it all-reduces over ``dp_replicate`` (HSDP),
    where the user has set a hook for that, and for parameters that lie on the host.

    Call it before anything else listens to the unit's reductions: it has to be the last before FSDP2.

    Args:
        unit: A module that FSDP2 manages.
    """
    for group in fsdp_parameter_groups(unit):
        info = group.mesh_info
        if getattr(info, "shard_mesh_size", 0) == 1 and not hasattr(info, "replicate_mesh_size"):
            group.__dict__[_PASSES] = True
            listen(group, before=_pass_on)


def passes_on(group: Any) -> bool:
    """Whether a parameter group passes its gradients on (:func:`pass_whole_gradients`)."""
    return group.__dict__.get(_PASSES, False)


def whole_shards(unit: torch.nn.Module) -> dict[int, bool]:
    """Parameters of an FSDP module that one rank alone holds, by ``id``: whether their gradients are passed on."""
    groups = [g for g in fsdp_parameter_groups(unit) if getattr(g.mesh_info, "shard_mesh_size", 1) == 1]
    return {id(managed.sharded_param): passes_on(group) for group in groups for managed in group.fsdp_params}


@torch.no_grad()
def _pass_on(group: Any) -> None:
    """What ``foreach_reduce`` comes to where nobody else has a part of the gradients."""
    if group._all_reduce_hook is not None or group.fsdp_params[0].offload_to_cpu:
        return
    show, factor = getattr(group._reduce_scatter_comm, "show", None), group.gradient_divide_factor
    seen = set[int]()
    for managed in group.fsdp_params:
        parameter, whole = managed.sharded_param, getattr(managed, "_unsharded_param", None)
        # Before torch 2.15 what several backwards have added up lies apart.
        if vars(managed).get("unsharded_accumulated_grad") is not None:
            managed.accumulate_unsharded_grad_if_needed()
            gradient, managed.unsharded_accumulated_grad = managed.unsharded_accumulated_grad_data, None
        elif whole is not None and whole.grad is not None:
            gradient, whole.grad = managed.unsharded_grad_data, None
        else:
            continue
        gradient = gradient.to(
            group._reduce_dtype or getattr(managed, "unsharded_grad_dtype", None) or gradient.dtype
        )
        if factor not in (None, 1):
            # Not in place: others may look at it. Of fp16 as FSDP2 does over one rank, twice (torch 2.11 to 2.13).
            gradient = gradient / (factor * factor if gradient.dtype == torch.float16 else factor)
        if show is not None:
            show(gradient)
        kept = managed.sharded_grad_dtype if hasattr(managed, "sharded_grad_dtype") else group._orig_dtype
        gradient = gradient if kept is None else gradient.to(kept)
        if parameter.grad is not None:
            local_of(parameter.grad).add_(gradient)
        else:
            # Autograd gives views as gradients, too: what is added to one must not change another.
            memory = gradient.untyped_storage()
            if memory.nbytes() != gradient.nbytes or memory.data_ptr() in seen:
                gradient = gradient.clone(memory_format=torch.contiguous_format)
            seen.add(memory.data_ptr())
            parameter.grad = managed.to_sharded_dtensor(gradient.contiguous())
        for hook in (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values():
            hook(parameter)
