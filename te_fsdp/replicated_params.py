"""``fsdp_no_shard``: replication of parameters over data parallel inside a sharded model.

    sharded       sharded over data parallel by FSDP2, all-gathered for use, gradients reduce-scattered
    replicated    stored unsharded, ignored by FSDP2, gradients all-reduced by te_fsdp

Strategy ``no_shard`` replicates all parameters of a unit. Gradients are all-reduced in buckets (:class:`Bucket`);
:mod:`te_fsdp.features.replicated_gradients` decides when, and over which ranks.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate

from te_fsdp.collectives.async_work import Pending, current_stream
from te_fsdp.collectives.groups import separate_group
from te_fsdp.collectives.redistribute import GradComm, PackedLayout, redistribute
from te_fsdp.collectives.watching import run_while_all_live
from te_fsdp.errors import OrderError, message, shorten
from te_fsdp.process_modules import registered_at
from te_fsdp.records import ParameterPlan, binding_of, get_or_create_record, module_record
from te_fsdp.upstream import fsdp2_units, torch_dtensor as _torch
from te_fsdp.upstream.fsdp2_hooks import profiler_range


def fsdp_no_shard(what: nn.Module | nn.Parameter | Iterable[nn.Module | nn.Parameter]) -> None:
    """Replicate parameters over data parallel when the model is sharded.

    They are never all-gathered. FSDP2 ignores them, and adds no hooks to modules without other parameters.
    Tensor parallelism still shards them. Their gradients are all-reduced over data parallel at the end of each
    backward, with one all-reduce per dtype. Parameters without ``requires_grad`` cause no communication. Ranks must
    have equal values, which :func:`te_fsdp.fully_shard` checks.

    Call it before :func:`te_fsdp.fully_shard`, with the same arguments on all ranks. Local operation. The mark is
    stored in the modules that own the parameters, and survives deep copies, initialization from meta and loading. The
    mark of a parameter without an owner is stored in the parameter.

    Args:
        what: A module (all parameters of it and its submodules), a parameter, or several of these.

    Raises:
        TypeError: An argument is neither a module nor a parameter.
        OrderError: The module or parameter is already sharded.
    """
    targets = [what] if isinstance(what, (nn.Module, nn.Parameter)) else what
    is_one = not isinstance(targets, Iterable) or isinstance(targets, (str, torch.Tensor))
    items = [targets] if is_one else list(targets)
    for item in items:
        if not isinstance(item, (nn.Module, nn.Parameter)):
            expected, fix = (
                "a module, a parameter or several",
                "pass modules and parameters of the model, not names",
            )
            error_text = message("fsdp_no_shard: what", expected=expected, got=type(item).__name__, fix=fix)
            raise TypeError(error_text)
    modules = [item for item in items if isinstance(item, nn.Module)]
    parameters = [item for item in items if not isinstance(item, nn.Module)]
    owned = list(registered_at({id(parameter) for parameter in parameters})) if parameters else []
    for module in [*(sub for top in modules for sub in top.modules()), *(owner for owner, _ in owned)]:
        binding = binding_of(module)
        if fsdp2_units.is_fsdp_module(module) or (binding is not None and binding.fsdp.is_managed):
            label = (binding.name if binding is not None else "") or type(module).__name__
            raise OrderError(
                f"{label}: fsdp_no_shard on a module that is already sharded",
                why="FSDP2 already shards its parameters, or reduces their gradients",
                fix="call te_fsdp.fsdp_no_shard before te_fsdp.fully_shard",
            )
    # The mark is stored in the owner module, because parameters are replaced often (meta init, ``to_empty``,
    # ``deepcopy``, ``load_state_dict(assign=True)``, TE's ``reset_parameters``) and lose their attributes.
    for module in modules:
        for sub in module.modules():
            module_record(sub).no_shard = True
    for parameter in parameters:
        get_or_create_record(parameter).no_shard = True
    for module, name in owned:
        record = module_record(module)
        if isinstance(record.no_shard, frozenset):
            record.no_shard |= {name}


@dataclass(frozen=True)
class ReplicatedParameter:
    """A parameter that is replicated over data parallel, by its owner, as initialization replaces the parameter."""

    plan: ParameterPlan  #: Decisions about it; for a tied parameter, those of its first owner
    module: nn.Module  #: The owner

    @property
    def parameter(self) -> nn.Parameter:
        """Return the parameter that is registered at present; raise OrderError if it was removed."""
        # After the first forward the components need it before the check of removed parameters.
        parameter = self.module._parameters.get(self.plan.name)
        if parameter is None:
            raise removal_error([self.plan.label])
        return parameter


def removal_error(names: list[str]) -> OrderError:
    """Return the error for parameters that are not registered any more."""
    return OrderError(
        f"{shorten(names, 3)}: removed after fully_shard",
        expected="the parameters that te_fsdp.fully_shard sharded",
        got="a deleted weight, or one that is computed by a parametrization, weight_norm or pruning",
        why="The unsharded weight would have no owner, and the parameters behind the computed one no gradients",
        fix="parametrize or prune the module, or undo it, before te_fsdp.fully_shard",
    )


#: Elements of one all-reduce; larger tensors are reduced separately. A copy of all gradients could be as large as the
#: model.
CAPACITY = 1 << 25
# Gradients are views of a bucket. Each begins at an address that allows vectorized access.
_ALIGNED = 64


@dataclass(frozen=True)
class ReductionGroup:
    """Process group of a gradient all-reduce (``None`` for one rank), with the divisor of the sum (1 for sums)."""

    group: dist.ProcessGroup | None
    divisor: int

    @classmethod
    def of(cls, mesh: DeviceMesh | None, name: str, root: DeviceMesh | None, divisor: int) -> ReductionGroup:
        """Return the reduction group of a mesh. Collective over the world if a process group is created.

        For several axes, the group is separate for these reductions, with the given ``name``. For a single axis this
        is so only with ``root``, the mesh of the job. Models on the same ranks share the group ([Note: shared
        groups]).
        """
        axes = () if mesh is None else [axis for axis in mesh.mesh_dim_names or () if mesh[axis].size() > 1]
        if mesh is None or not axes:
            return cls(None, divisor)
        if len(axes) > 1:
            return cls(run_while_all_live(lambda: _torch.flatten_mesh(mesh, name)).get_group(), divisor)
        return cls(
            mesh[axes[0]].get_group() if root is None else separate_group(root, axes[0], name), divisor
        )


@dataclass(eq=False)
class GradientSlot:
    """One replicated parameter and the state of its gradient."""

    replicated: ReplicatedParameter
    ranks: ReductionGroup  #: Ranks over which its gradient is summed
    partial: bool  #: Whether each tp rank computes one term of its gradient
    #: Unit whose gradients are reduced with it; ``None``: the end of backward, with all others of its kind
    unit: str | None
    grads_dtype: torch.dtype | None  #: Accumulation dtype of its gradient; ``None``: the parameter's own
    hooked: weakref.ref[torch.Tensor] | None = None  #: The parameter with the gradient hooks
    handles: list[Any] = field(default_factory=list)  #: Handles of these hooks
    reduced: torch.Tensor | None = None  #: ``.grad`` of earlier backwards, while a backward runs
    unreduced: torch.Tensor | None = None  #: Gradient that is not reduced yet
    specs: tuple[Any, Any] = (None, None)  #: Spec of the parameter, and that of its reduced gradient

    @property
    def parameter(self) -> nn.Parameter:
        """Return the parameter that is registered at present."""
        return self.replicated.parameter


#: Removes a slot's gradient and returns it; ``None`` if this rank has no gradient.
Take = Callable[[GradientSlot], "torch.Tensor | None"]
#: Result of a bucket's reduction: each parameter with a gradient on any rank, with its reduced local gradient.
Reduced = list[tuple[GradientSlot, torch.Tensor]]


def pack(slots: Iterable[GradientSlot], tp: DeviceMesh | None) -> list[Bucket]:
    """Return buckets of at most :data:`CAPACITY` elements (or one tensor), in the order of the slots. Local."""
    # The slots have the same order on all ranks.
    by_key: dict[tuple[ReductionGroup, torch.dtype, torch.device], list[tuple[GradientSlot, torch.Size]]] = {}
    for slot in slots:
        local = _torch.local_of(slot.parameter)
        key = slot.ranks, slot.grads_dtype or slot.parameter.dtype, local.device
        by_key.setdefault(key, []).append((slot, local.shape))
    buckets = []
    for key, members in by_key.items():
        # Gradients that are summed over tp are first, as one contiguous piece of the bucket.
        filling: list[tuple[GradientSlot, torch.Size]] = []
        filled = 0
        for slot, shape in sorted(members, key=lambda member: not member[0].partial):
            padded = -(-shape.numel() // _ALIGNED) * _ALIGNED
            if filling and filled + padded > CAPACITY:
                buckets.append(Bucket(tuple(filling), *key, tp))
                filling, filled = [], 0
            filling.append((slot, shape))
            filled += padded
        buckets.append(Bucket(tuple(filling), *key, tp))
    return buckets


@dataclass(frozen=True, eq=False)
class Bucket:
    """Gradients of one kind that are reduced together."""

    #: Each parameter with its local shape; those that are summed over tp first, then the others.
    members: tuple[tuple[GradientSlot, torch.Size], ...]
    ranks: ReductionGroup  #: Ranks over which they are summed
    dtype: torch.dtype  #: Accumulation dtype
    device: torch.device
    tp: DeviceMesh | None

    @functools.cached_property
    def buffer(self) -> PackedLayout:
        """Return the layout of the gradients, followed by one flag per gradient."""
        sizes = tuple(shape.numel() for _, shape in self.members)
        return PackedLayout(sizes, _ALIGNED, trailing=len(sizes))

    @torch.no_grad()
    def start(self, comm: GradComm | None, take: Take | None) -> Pending[Reduced]:
        """Start to all-reduce the bucket. Flags mark the gradients that a rank has, because ranks can differ in that.

        Collective over data parallel (once), and over tp if it has partial gradients (once, and the current stream
        waits for it). Gradients from ``take`` are freed after they are copied to the bucket, unless the caller keeps
        them; without ``take``, all are NaN. Waiting for the result is collective (an all-gather over data parallel)
        only for fp32 sums with a different communication dtype.
        """
        if take is None:
            has_own = [True] * len(self.members)
            flat = torch.full((self.buffer.numel,), math.nan, dtype=self.dtype, device=self.device)
        else:
            gradients = [take(slot) for slot, _ in self.members]
            has_own = [gradient is not None for gradient in gradients]
            flags = torch.ones(len(has_own), dtype=self.dtype, device=self.device)
            if not all(has_own):
                flags = flags.new_tensor([float(flag) for flag in has_own])
            flat = self.buffer.pack(gradients, self.dtype, self.device, flags)
            del gradients  # free their memory for the communication buffers
        sizes = zip(self.members, self.buffer.padded_sizes, strict=True)
        partial = sum(size for (slot, _), size in sizes if slot.partial)
        if partial and self.tp is not None:
            dist.all_reduce(flat[:partial], group=self.tp.get_group())
        unpack = functools.partial(self._unpack, has_own)
        if self.ranks.group is None:
            return Pending(lambda: flat, None, current_stream(flat.device)).then(unpack)
        source = Partial("sum" if self.ranks.divisor == 1 else "avg")
        return redistribute(flat, source, Replicate(), self.ranks.group, comm).then(unpack)

    def _unpack(self, has_own: list[bool], flat: torch.Tensor) -> Reduced:
        """Return the gradients that any rank had; ``has_own``: whether this rank had one, by member."""
        ranks = self.ranks
        averaged = ranks.group.size() if ranks.group is not None and ranks.divisor != 1 else 1
        # Reading the flags of other ranks synchronizes the device. So read them only if this rank has no gradient for
        # some member. NaN counts as set.
        has_gradients = has_own if all(has_own) else [flag != 0 for flag in flat[-len(has_own) :].tolist()]
        if averaged != ranks.divisor:
            flat.mul_(averaged / ranks.divisor)
        reduced = zip(self.members, self.buffer.views(flat), has_gradients, strict=True)
        return [(slot, piece.view(shape)) for (slot, shape), piece, has_gradient in reduced if has_gradient]


@dataclass(eq=False)
class Reduction:
    """One reduction of all gradients of replicated parameters."""

    early: Sequence[tuple[str, Bucket]]  #: Buckets that may start during backward, each with its unit
    rest: Sequence[Bucket]  #: Buckets that are reduced at the end, in order
    comm: GradComm | None  #: How gradients are communicated
    take: Take | None  #: Removes and returns them
    _pending: deque[Pending[Reduced]] = field(default_factory=deque)

    def start(self, is_complete: Callable[[str], bool]) -> None:
        """Start the early buckets in order, up to the first one with an incomplete unit. Collective; does not wait."""
        for unit, bucket in self.early[len(self._pending) :]:
            if not is_complete(unit):
                return
            with profiler_range(f"te_fsdp::reduce_no_shard {unit}"):
                self._pending.append(bucket.start(self.comm, self.take))

    def finish(self) -> Iterator[tuple[GradientSlot, torch.Tensor]]:
        """Start the rest and wait; yield each gradient that any rank has. Collective over data parallel and tp."""
        self.start(lambda unit: True)
        while self._pending:
            yield from self._pending.popleft().wait()
        for bucket in self.rest:
            with profiler_range("te_fsdp::reduce_no_shard"):
                yield from bucket.start(self.comm, self.take).wait()

    def abandon(self) -> None:
        """Complete the reduction after an exception in backward, and discard the results. Collective: data parallel."""
        # Ranks may have started different buckets. So all ranks complete all buckets, with NaN, so that a rank without
        # an exception does not use the results as gradients.
        self.take = None
        self.comm = None if self.comm is None else replace(self.comm, observer=None)
        deque(self.finish(), maxlen=0)
