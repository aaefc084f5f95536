"""Checks of gradients: complete before a step, correct over tp in the first steps."""

# [Note: gradients over tp] Parameters that every tensor-parallel rank replicates have one gradient. With
# ``sequence_parallel = True`` each rank computes a part of it, and the parts are summed. A layer that sees a
# part of the tokens without the mark would learn from the tokens of the first rank only. A marked layer that
# sees all tokens would learn from ``tp`` times its gradient. So gradients are compared over ``tp``:
# replicated ones before a parameter's first two steps, partial ones in a first backward. Two, because layers
# that start at zero have some zero gradients at first. At level "full" every step compares.

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from te_fsdp.collectives.agreement import are_equal, digest, gather_by_rank, raised_on_all_ranks
from te_fsdp.collectives.rendezvous import format_ranks, is_capturing, is_simulated
from te_fsdp.errors import GradientError, MeshError, PlacementError, shorten
from te_fsdp.gradient_sync import require_reduced
from te_fsdp.lifecycle import Step, gradient_of
from te_fsdp.process_modules import registered_at
from te_fsdp.records import (
    MODULE,
    ModuleBinding,
    ModuleRecord,
    binding_of,
    get_or_create_record,
    get_record,
    module_record,
)
from te_fsdp.sharded_model import ShardedModel
from te_fsdp.tp_gradients import place_gradients
from te_fsdp.upstream import te as _te, torch_dtensor as _torch
from te_fsdp.upstream.torch_mixed_lists import clipping_arguments, mixed_lists

# Steps in which the gradients of a parameter are compared.
_STEPS = 2
# Largest difference of a parameter's gradients over tp, relative to their norm. Kernels that sum in a different order
# change bf16 values by a unit in the last place, 1/256; sums in bf16 over hundreds of ranks by 1/40. Different tokens
# give gradients that differ more, except for very large batches: the norm of the noise relative to that of the mean.
_APART = 1 / 16
# Four bits, with stochastic rounding per rank: 1/5.
_APART_IN_4_BITS = 1 / 2
# Partial gradients that differ less than this, relative to their norm, are one gradient with different rounding.
_SAME = 1 / 128
# Unsharded gradients that an all-reduce has made equal on all ranks: rounding of whatever the user did with them since.
_EQUAL = 1 / 1024


def require_complete_gradients(step: Step) -> None:
    """Raise if a gradient was not reduced, or if a backward or a step has failed since. Local operation."""
    for state, parameters in step.models:
        require_reduced(state, step.where, parameters)


def watch_mixed_lists(state: ShardedModel) -> None:
    """Let torch's clipping take gradients on several meshes, but refuse experts, from now on. Local operation."""
    mixed_lists().watch(state, _check_list)


def _check_list(state: ShardedModel, operator: str, tensors: Sequence[torch.Tensor], is_mixed: bool) -> bool:
    """Return whether tensors of an operator are on meshes of the model; raise if the result would be wrong."""
    scalars = operator == "stack" and all(tensor.ndim == 0 for tensor in tensors)
    if not is_mixed and operator != "_foreach_norm" and not scalars:
        return False
    parameters = state.parameters()
    meshes = {tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor)}
    if meshes.isdisjoint(p.device_mesh for p in parameters.values() if isinstance(p, DTensor)):
        return False  # DTensors of other code get torch's own error
    experts = {name: p for name, p in parameters.items() if _is_local_expert(p)}
    ids, normed = set(map(id, tensors)), list[str]()
    if operator == "_foreach_norm":
        normed = [name for name, p in experts.items() if id(p.grad) in ids]
    elif scalars:
        # Norms of plain tensors are those of this rank, too.
        partial = {
            getattr(tensor, "device_mesh", None)
            for tensor in tensors
            if not isinstance(tensor, DTensor) or any(p.is_partial() for p in tensor.placements)
        }
        normed = [name for name, p in experts.items() if getattr(p, "device_mesh", None) in partial]
    if normed:
        raise PlacementError(
            f"{shorten(normed, 3)}: torch's norm of experts' gradients",
            expected="a norm over all ranks of ep",
            got="the experts of this rank",
            why="Each rank of ep would clip all other gradients by a different factor",
            fix="te_fsdp.clip_grad_norm_(model, max_norm)",
        )
    if operator == "cat" or (operator == "stack" and any(tensor.requires_grad for tensor in tensors)):
        ids |= {id(base) for tensor in tensors if (base := _torch.base_of(tensor)) is not None}
        names = [name for name, p in parameters.items() if not ids.isdisjoint((id(p), id(p.grad)))]
        plain = sum(not isinstance(tensor, DTensor) for tensor in tensors)
        raise PlacementError(
            f"{shorten(names, 3) or 'tensors of a sharded model'}: in one torch.{operator} with tensors "
            "on different meshes",
            expected="tensors on one mesh",
            got=f"{len(tensors) - plain} sharded and {plain} plain tensors",
            why="torch cannot join them, as in torch.nn.utils.parameters_to_vector",
            fix="torch.cat([p.full_tensor().flatten() if isinstance(p, DTensor) else p.flatten() "
            "for p in model.parameters()])",
        )
    arguments = clipping_arguments() if operator == "clamp" else None
    if arguments is not None:
        for record_arguments in state.checks.clipping:
            record_arguments(state, *arguments)
    return operator != "stack" or scalars


def _is_local_expert(parameter: torch.Tensor) -> bool:
    """Return whether other ranks of ``ep`` have different experts that are not on the parameter's own mesh."""
    record = get_record(parameter)
    ep_mesh = None if record is None else record.ep_mesh
    if ep_mesh is None or ep_mesh.size() == 1:
        return False
    on = set(parameter.device_mesh.mesh.flatten().tolist()) if isinstance(parameter, DTensor) else set()
    return not on.issuperset(dist.get_process_group_ranks(ep_mesh.get_group()))


def compare_gradients(state: ShardedModel) -> None:
    """Schedule comparisons of a sharded model's gradients over tp, and over ep if no parameter is a DTensor. Local.

    Without DTensors torch's ``clip_grad_norm_`` cannot be intercepted. Its norm would cover this rank's experts only,
    and each rank of ep would clip by a different factor.
    """
    schedule_gradient_checks(state.model, state.meshes.tp, every=state.checks.level == "full")
    parameters = list(state.parameters().values())
    if any(isinstance(p, DTensor) for p in parameters) or not any(map(_is_local_expert, parameters)):
        return
    for parameter in parameters:
        if not _is_local_expert(parameter):
            get_or_create_record(parameter).grad_checks_left = _STEPS


def schedule_gradient_checks(model: nn.Module, tp_mesh: DeviceMesh | None, *, every: bool = False) -> None:
    """Compare gradients over tp in the first steps, or in ``every`` step. ``None`` ends the comparisons. Local."""
    for binding in filter(None, map(binding_of, model.modules())):
        # A second call replaces the schedule of the first, for example in set_device_mesh of a bound model.
        binding.grad_checks.clear()
        if tp_mesh is not None and binding.tp_mesh is not None and binding.tp_mesh.size() > 1:
            for name, rule in binding.rules.items():
                # The gradient of a bias under a loss that is a plain sum is the number of tokens, equal on all ranks.
                if rule.partial_grad and "bias" not in name:
                    binding.grad_checks[name] = _PartialGradientCheck(binding, name, every)
    for parameter in model.parameters():
        record = get_record(parameter)
        if record is not None and record.tp_replica:
            record.grad_checks_left = 0 if tp_mesh is None else -1 if every else _STEPS


def compare_gradients_over_ep(step: Step) -> None:
    """Compare unsharded gradients over ep in each parameter's first steps. Collective over ep then, as over tp.

    Raises GradientError if they differ by more than rounding.
    """
    for state, parameters in step.models:
        scheduled = [
            p
            for p in parameters
            if not isinstance(p, DTensor) and (rec := get_record(p)) is not None and rec.grad_checks_left
        ]
        # Parameters of the model are scheduled in the first steps only.
        if not scheduled or is_simulated() or is_capturing():
            continue
        experts = [get_record(p) for p in state.parameters().values() if _is_local_expert(p)]
        if not experts or (ep_mesh := experts[0].ep_mesh) is None:  # type: ignore[union-attr]
            continue
        # A parameter without a gradient is skipped. All ranks of ep run the same dense layers, so all skip
        # it.
        pairs = [(p, gradient) for p in scheduled if (gradient := gradient_of(p)) is not None]
        unequal = [(p, ratio) for p, ratio in _deviation(ep_mesh, pairs) if ratio > _EQUAL] if pairs else []
        if unequal:
            names = state.names()
            raise GradientError(
                f"{step.where}: gradients that differ over ep",
                expected="equal gradients on all ranks of ep, for parameters that each rank has in full",
                got=shorten([f"{names[id(p)]} by {ratio:.0%} of its norm" for p, ratio in unequal], 3, ", "),
                why="torch.nn.utils.clip_grad_norm_ clips by the norm of this rank's experts",
                fix="te_fsdp.clip_grad_norm_(model, max_norm)",
            )
        for parameter in scheduled:
            get_or_create_record(parameter).grad_checks_left -= 1


class _PartialGradientCheck:
    """Compares this rank's part of a gradient over tp, in the first backward in which it is not zero."""

    def __init__(self, binding: ModuleBinding, name: str, every: bool) -> None:
        self._binding, self._name, self._left = binding, name, -1 if every else _STEPS

    @torch.no_grad()
    def __call__(self, gradient: torch.Tensor) -> None:
        """Raise ``GradientError`` if all ranks of tp have computed the same. Collective over tp."""
        if is_simulated() or is_capturing():
            return
        binding, name = self._binding, self._name
        assert binding.tp_mesh is not None
        ((_, ratio),) = _deviation(binding.tp_mesh, [(gradient, gradient)])
        if ratio < _SAME:
            raise GradientError(
                f"{binding.label(name)}: gradients that are the same over tp",
                expected="a different partial gradient on each rank, because the parameter is marked sequence_parallel",
                got="the same gradient on every rank of the tp group",
                why="te_fsdp sums them over tp, so the parameter would learn from a multiple of its gradient",
                fix="pass sequence_parallel=False to layers that see all tokens on each rank, or shard the sequence "
                "before them. If equal gradients are intended, pass checks='setup' to fully_shard, or "
                "check_inputs=False to set_device_mesh",
            )
        self._left -= 1
        # A negative number repeats the check in every step. A NaN proves nothing, so that it is repeated, too.
        if self._left == 0 or (self._left > 0 and ratio >= _SAME):
            binding.grad_checks.pop(name, None)


def compare_replicated_gradients(step: Step) -> None:
    """Compare the gradients of parameters that every tp rank replicates, in each parameter's first steps.

    Collective then: a broadcast of each such gradient over tp, and two numbers for each over its mesh. If they differ
    by more than rounding, all ranks of the model raise GradientError, and nothing has changed.
    """
    scheduled = [
        (parameter, record)
        for parameter, record in step.recorded_params
        if record.grad_checks_left and parameter.requires_grad
    ]
    if not scheduled or is_simulated() or is_capturing():
        return
    by_mesh: dict[DeviceMesh, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    place_gradients([parameter for parameter, _ in scheduled])
    for parameter, _ in scheduled:
        gradient = gradient_of(parameter)
        # Meshes are visited in the order of the parameters, which all ranks share: each is a broadcast.
        if gradient is not None and isinstance(parameter, DTensor):
            by_mesh.setdefault(parameter.device_mesh, []).append((parameter, _torch.local_of(gradient)))
    recipes = [recipe for state, _ in step.models for recipe in _te.recipes_in_use(state.model)]
    in_4_bits = any("NVFP4" in recipe or "Custom" in recipe for recipe in recipes)
    # Ranks of one tp group see a deviation. All ranks of the model must raise, or the others would wait in the
    # step.
    with raised_on_all_ranks(step.models[0][0].meshes.device_mesh if step.models else None, step.where):
        limit = _APART_IN_4_BITS if in_4_bits else _APART
        pairs_of_all = [entry for mesh, pairs in by_mesh.items() for entry in _deviation(mesh, pairs)]
        different = [(parameter, ratio) for parameter, ratio in pairs_of_all if ratio > limit]
        if different:
            names = step.names
            for owner, name in registered_at({id(parameter) for parameter, _ in different} - names.keys()):
                binding = binding_of(owner)
                # A bound model without fully_shard has no names.
                names[id(owner._parameters[name])] = name if binding is None else binding.label(name)
            shown = [
                f"{names.get(id(parameter), 'a parameter')} by {ratio:.0%} of its norm"
                for parameter, ratio in different
            ]
            raise GradientError(
                f"{step.where}: gradients that differ over tp",
                expected="equal gradients on all ranks of a tp group, for parameters that each rank has in full",
                got=shorten(shown, 3, ", "),
                why="Each rank has computed them from different tokens or features, as under sequence parallelism, "
                "and they are not summed: those of the first rank would be used",
                fix="set parameter.sequence_parallel = True on the parameters of layers that see a part of the "
                "tokens, before te_fsdp.fully_shard or set_device_mesh; or pass all tokens to these layers. If "
                "gradients must differ, pass checks='setup' (formerly check_inputs=False) to fully_shard, or "
                "check_inputs=False to set_device_mesh",
            )
    for _, record in scheduled:
        record.grad_checks_left -= record.grad_checks_left > 0


@torch.no_grad()
def _deviation(
    mesh: DeviceMesh, pairs: list[tuple[torch.Tensor, torch.Tensor]]
) -> list[tuple[torch.Tensor, float]]:
    """Return the distance of each gradient from that of the first rank of the last axis, relative to their norm.

    Collective over ``mesh``, whose last axis is tp or ep. ``pairs``: parameters with local tensors of their gradients.
    All ranks get the same numbers. A number is NaN if all gradients are zero, or if one contains NaN.
    """
    group = mesh.get_group(mesh.ndim - 1)
    if group.size() == 1:
        return []
    sums = torch.zeros((len(pairs), 2), dtype=torch.float64, device=pairs[0][1].device)
    for row, (_, gradient) in zip(sums, pairs, strict=True):
        # A copy, because a broadcast writes to its tensor on all ranks except the first.
        first = gradient.clone(memory_format=torch.contiguous_format)
        dist.broadcast(first, group=group, group_src=0)
        # In fp64, so that squares of small values do not underflow and sums over many ranks do not round.
        row[0] = torch.linalg.vector_norm(gradient - first, dtype=torch.float64).square()
        row[1] = torch.linalg.vector_norm(first, dtype=torch.float64).square()
    for axis in range(mesh.ndim):
        dist.all_reduce(sums, group=mesh.get_group(axis))
    # All ranks except the first contribute a difference. All contribute its norm.
    ratios = (sums[:, 0] / (group.size() - 1) / (sums[:, 1] / group.size())).sqrt().tolist()
    return [(parameter, ratio) for (parameter, _), ratio in zip(pairs, ratios, strict=True)]


def compare_gradient_shapes(step: Step) -> None:
    """Raise unless all ranks of a model have gradients of the same parameters, shapes and dtypes. Collective over it.

    One max all-reduce of two integers per axis; a gather of names for the error.
    """
    for state, parameters in step.models:
        mesh = state.meshes.device_mesh
        if mesh.size() == 1 or is_simulated() or is_capturing():
            continue
        names, mine = state.names(), {}
        for parameter in parameters:
            gradient, name = gradient_of(parameter), names[id(parameter)]
            # Each rank of ep has different experts, perhaps more of them.
            if gradient is not None and not state.is_expert(name):
                mine[name] = f"{tuple(gradient.shape)} {str(gradient.dtype)[6:]}"
        if bool(are_equal([digest(repr(sorted(mine.items())))], mesh).all()):
            continue
        by_rank = gather_by_rank(mine, mesh)
        lines = []
        for name in sorted({name for of_rank in by_rank.values() for name in of_rank}):
            ranks: dict[str, list[int]] = {}
            for rank, of_rank in sorted(by_rank.items()):
                ranks.setdefault(of_rank.get(name, "none"), []).append(rank)
            if len(ranks) > 1:
                shown = [f"{shape} on {format_ranks(of_rank)}" for shape, of_rank in ranks.items()]
                lines.append(f"{name}: {', '.join(shown)}")
        raise MeshError(
            f"{step.where}: gradients that differ between ranks",
            expected="gradients of the same parameters, shapes and dtypes on all ranks of the model",
            got=shorten(lines, 3, "; "),
            why="The ranks update the shards of each weight together",
            fix="run the same layers on all ranks, and do not assign .grad on some ranks only",
        )


# --- losses over a column-parallel head


# [Note: losses of a part of the logits] Each rank of tp has the logits of its part of the classes. A plain
# ``cross_entropy`` of them is a softmax over these classes only: a different loss, without an error while all
# labels are small.
#
# [Note: gradients of a softmax] The gradient of a softmax sums to zero over the classes that it normalizes.
# So a plain loss gives every token, on every rank, a gradient of the rank's logits that sums to zero. A
# vocabulary-parallel loss gives that on no rank without the token's label: there all elements have one sign.
# The ratio of the sum to the sum of magnitudes separates the two cases, 0 from 1.

# Backwards with a gradient that are checked.
_BACKWARDS = 2
# Rows of a gradient that are checked. One row with a gradient decides.
_ROWS = 64
# Largest sum of a row relative to its magnitudes that counts as zero. Rounding to bf16 causes at most 1/256.
_ZERO = 1 / 128


def watch_head_gradients(state: ShardedModel) -> None:
    """Check the gradients of column-parallel outputs that no other TE module reads, in the first backwards. Local.

    Such a backward becomes collective over tp: one max all-reduce of two numbers.
    """
    _watch(state.model, state.meshes.tp, every=state.checks.level == "full")


def watch_head_gradients_of_bound(model: nn.Module, tp_mesh: DeviceMesh | None) -> None:
    """Check them in a bound model, or without ``tp_mesh`` no longer, unless it is a TE module. Local operation."""
    for module in model.modules():
        record: ModuleRecord | None = module.__dict__.get(MODULE)
        if record is not None and (check := record.checks.pop(_HeadGradientCheck, None)) is not None:
            check.stop()
    if tp_mesh is not None and tp_mesh.size() > 1 and _te.kind_of(model) is None:
        module_record(model).checks[_HeadGradientCheck] = _watch(model, tp_mesh)


def _watch(model: nn.Module, tp: DeviceMesh, *, every: bool = False) -> _HeadGradientCheck:
    """Register the hooks of a check on a model's outermost TE modules, if a head is among them."""
    check, outermost = _HeadGradientCheck(tp, every), dict(_outermost_te_modules(model))
    heads = {
        name
        for name, module in outermost.items()
        if binding_of(module) is not None
        and _te.kind_of(module) in ("Linear", "LayerNormLinear")
        and getattr(module, "parallel_mode", None) == "column"
    }
    # Each tp rank computes a part of the output only if the last layer is column-parallel.
    if heads and not is_simulated():
        for name, module in outermost.items():
            after = _torch.disable_compile(functools.partial(check.after_forward, name, name in heads))
            check.handles.append(module.register_forward_hook(after))
    return check


def _outermost_te_modules(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the TE modules below a module that are not part of another TE module, with their names."""
    if _te.kind_of(module) is not None:
        yield name, module
        return
    for child, inner in module.named_children():
        yield from _outermost_te_modules(inner, f"{name}.{child}".lstrip("."))


class _HeadGradientCheck:
    """State of the check of one model."""

    def __init__(self, tp: DeviceMesh, every: bool) -> None:
        self.tp, self._left = tp, -1 if every else _BACKWARDS
        self.handles: list[Any] = []
        #: Number of executed TE modules that are not heads. An output that one of them may read is not a model's.
        self._others = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> _HeadGradientCheck:
        """Share the mesh with the copy, because process groups cannot be copied."""
        return _HeadGradientCheck(self.tp, self._left < 0)

    def stop(self) -> None:
        """Remove all hooks. Local operation."""
        self._left = 0
        while self.handles:
            self.handles.pop().remove()

    def after_forward(self, name: str, is_head: bool, module: nn.Module, args: Any, output: Any) -> None:
        """Count a module, or register the check on a head's output."""
        if not is_head:
            self._others += 1
            return
        # TE returns (output, bias) with return_bias.
        logits = output[0] if isinstance(output, tuple) else output
        if isinstance(logits, torch.Tensor) and logits.requires_grad and not is_capturing():
            logits.register_hook(functools.partial(self._check, name, self._others))

    @torch.no_grad()
    def _check(self, name: str, others: int, gradient: torch.Tensor) -> None:
        """Raise ``GradientError`` if the gradient is that of a softmax over one rank's outputs. Collective over tp."""
        if self._left == 0 or others != self._others or gradient.numel() == 0 or is_capturing():
            return
        rows = gradient.flatten(0, -2)
        # Evenly spread rows: the labels of the first ones may all be ignored.
        rows = rows[:: max(len(rows) // _ROWS, 1)].float()
        magnitudes = rows.abs().sum(-1)
        has_gradient = magnitudes > 0
        ratios = torch.where(has_gradient, rows.sum(-1).abs() / magnitudes, 0).nan_to_num(nan=1.0)
        # A rank whose classes have no probability at all does not decide: its gradient is zero.
        results = torch.stack([ratios.amax(), 1 - has_gradient.any().float()])
        dist.all_reduce(results, dist.ReduceOp.MAX, group=self.tp.get_group())
        ratio, is_undecided = results.tolist()
        if is_undecided:
            return
        if ratio < _ZERO:
            raise GradientError(
                f"{name or 'the model'}: a loss over one rank's part of the outputs",
                expected=f"a loss over the outputs of all {self.tp.size()} ranks of tp: the module is column-parallel",
                got="gradients that sum to zero over each rank's outputs, as the gradients of a softmax do",
                why="Each rank normalizes over its own classes, which results in a different loss",
                fix="compute the loss of DTensors inside torch.distributed.tensor.parallel.loss_parallel "
                "(docs/train.md), or with transformer_engine.pytorch.parallel_cross_entropy; or gather the outputs "
                "over tp before the loss. If this is intended, pass checks='setup' to fully_shard, or "
                "check_inputs=False to set_device_mesh",
            )
        self._left -= self._left > 0
        if self._left == 0:
            self.stop()
