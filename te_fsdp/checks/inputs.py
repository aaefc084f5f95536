"""Checks of a model's inputs: equal on the ranks of ``tp``, parts of the same sequences on those of ``cp``."""

# [Note: compared inputs] All ranks of ``tp`` compute one forward together. Ranks with different batches would
# train without an error, each on a mixture of activations that no model computes. So inputs in new shapes are
# compared over ``tp``: one checksum per tensor. A later forward with known shapes only reads its arguments.
# At level "full" every forward compares.
#
#   integers (token ids, positions, masks)   compared, unless parameters of the model's own modules are marked
#                                            ``sequence_parallel``: then each rank may have its part of the sequence
#   floating                                 compared, unless any module is sequence-parallel, or all start with a part
#                                            of the features: only row-parallel layers, or core attention
#   inputs of sequence-parallel modules      must differ: each rank has its part of the tokens. Compared at the first
#                                            call of each with tokens that differ from each other
#   DTensors, other wrappers, meta, sparse   not compared
#   random numbers of dropout                compared like floating inputs, in training: dropout masks that
#                                            differ over tp are inputs that differ
#
# Ranks of ``cp`` compute parts of the same sequences: their inputs must have the same shapes and different
# values.

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from itertools import combinations
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from te_fsdp.collectives.agreement import are_equal, digest, gather, rank
from te_fsdp.collectives.rendezvous import collective_call, is_capturing, is_simulated
from te_fsdp.errors import InputError, shorten
from te_fsdp.mesh import Meshes
from te_fsdp.records import MODULE, ModuleRecord, binding_of, module_record
from te_fsdp.sharded_model import ShardedModel
from te_fsdp.tensor_checksums import checksum, is_constant
from te_fsdp.upstream import te as _te, torch_dtensor as _torch

_log = logging.getLogger("te_fsdp")

# Cap on the combinations of shapes that are compared, for data with a new length in each batch.
_MOST = 256
# Rounding: kernels that sum in a different order give values that differ by a few units in the last place of the
# largest. Different data differ by as much as the values themselves.
_ROUNDING = 8
_WHOLE = ("LayerNormMLP", "MultiheadAttention", "TransformerLayer")

Path = tuple[Any, ...]
#: Name of each input -> its dtype and shape, and the checksum of its values.
InputDescriptions = dict[str, tuple[str, int]]


@dataclass
class _InputCheck:
    tp_mesh: DeviceMesh | None  #: Inputs are compared over its ranks
    cp_mesh: DeviceMesh | None = None  #: Inputs must be parts of the same sequences on its ranks
    every: bool = False  #: Whether every forward compares, not only new shapes
    #: Calls that were compared: method, modes, and path, shape and dtype of each tensor.
    seen: set[Any] = field(default_factory=set)
    #: Whether integers, and whether floating inputs, are compared over tp; ``None`` before a forward.
    compared: tuple[bool, bool] | None = None
    #: Modules that may draw dropout masks which must be equal over tp, each with its rate's name.
    rates: list[tuple[nn.Module, str]] = field(default_factory=list)

    def __deepcopy__(self, memo: dict[int, Any]) -> _InputCheck:
        """Share the meshes with the copy, because process groups cannot be copied."""
        return _InputCheck(self.tp_mesh, self.cp_mesh, self.every)


@dataclass
class _TokenShardCheck:
    """The check of a sequence-parallel module's inputs."""

    hook: Any  #: Removed after the last check, so that later forwards cost nothing
    left: int = 4  #: Number of further checks, if each sees tokens that are all equal


def watch_model_inputs(state: ShardedModel) -> None:
    """Compare the inputs of a sharded model from now on. Local operation."""
    watch_inputs(state.model, state.meshes.tp_or_none, state.meshes.cp, every=state.checks.level == "full")


def watch_inputs(
    model: nn.Module, tp_mesh: DeviceMesh | None, cp_mesh: DeviceMesh | None = None, *, every: bool = False
) -> None:
    """Compare the inputs of ``model`` over these 1-D meshes from now on, and no longer those of modules in it.

    ``None``: nothing is compared over that axis. ``every``: compare in each forward, otherwise only inputs of new
    shapes. Local operation. These forwards become collective over the meshes, as the forward itself is.
    """
    for module in model.modules():
        inner: ModuleRecord | None = module.__dict__.get(MODULE)
        if inner is not None:
            inner.checks.pop(_InputCheck, None)
            if (check := inner.checks.pop(_TokenShardCheck, None)) is not None:
                check.hook.remove()
    # After the removal above: a call without meshes ends the checks of an earlier call.
    tp_mesh = None if tp_mesh is None or tp_mesh.size() == 1 else tp_mesh
    if (tp_mesh is None and cp_mesh is None) or is_simulated():
        return
    record = module_record(model)
    if check_inputs not in record.hooks:
        record.hooks.add(check_inputs)
        model.register_forward_pre_hook(_torch.disable_compile(check_inputs), with_kwargs=True, prepend=True)
    record.checks[_InputCheck] = _InputCheck(tp_mesh, cp_mesh, every)
    for module in _sequence_parallel_entries(model) if tp_mesh is not None else ():
        hook = module.register_forward_pre_hook(_torch.disable_compile(_check_token_shards), with_kwargs=True)
        module_record(module).checks[_TokenShardCheck] = _TokenShardCheck(hook)


def watch_bound_inputs(model: nn.Module, tp_mesh: DeviceMesh | None) -> None:
    """Compare the inputs of a bound model, or without ``tp_mesh`` no longer, unless it is a TE module. Local."""
    if _te.kind_of(model) is None:
        watch_inputs(model, tp_mesh)


def watch_for_copies(state: ShardedModel) -> None:
    """Log a warning if the first training batch is the same on all ranks of ``dp_shard``: data are not sharded.

    Local operation. The first forward in training becomes collective over ``dp_shard``, as it is anyway: one
    max all-reduce of two integers.
    """
    # Not an error, because one batch for all is a common way to try a model.
    meshes, model = state.meshes, state.model
    shards = meshes.device_mesh["dp_shard"]
    if (
        not state.modules
        or shards.size() == 1
        or meshes.cp is not None
        or meshes.pp is not None
        or is_simulated()
    ):
        return

    def compare_first_batch(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not (module.training and torch.is_grad_enabled()) or _torch.in_backward() or is_capturing():
            return
        # Removed first, so that a rank that raises below does not compare again in its next forward.
        hook.remove()
        with _torch.without_modes():
            inputs = {str(path): tensor for path, tensor in _tensors((args, kwargs), ())}
            same = bool(are_equal([digest(repr(_describe_tensors(inputs)))], shards))
            # All ranks may rightly have a batch of zeros or ones, for example in a warmup.
            varies = not all(bool(is_constant(_plain(tensor))) for tensor in inputs.values())
            if same and varies and rank() == 0:
                _log.warning(
                    "%s.forward: the first batch is the same on all %d ranks of dp_shard, each of which computes the "
                    "same gradient. Shard the data with rank=meshes.data_rank, num_replicas=meshes.data_size "
                    "(docs/data.md). If this is intended, pass checks='setup' to fully_shard",
                    type(module).__name__,
                    shards.size(),
                )

    hook = model.register_forward_pre_hook(_torch.disable_compile(compare_first_batch), with_kwargs=True)


def check_inputs(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], method: str = "forward"
) -> None:
    """Compare a root's inputs over ``tp`` and ``cp``, if they have new shapes.

    Collective over both in that case: one object gather of a checksum per tensor. If floating values differ over
    ``tp``, also a broadcast of the first rank's. Skipped in backward, where forwards are recomputed, and in the capture
    of a CUDA graph. It raises before any all-gather or computation.

    Raises:
        InputError: They differ over ``tp``, or are the same over ``cp``; on all ranks of that axis.
        CollectiveError: Only some ranks have new shapes.
    """
    record: ModuleRecord | None = module.__dict__.get(MODULE)
    check: _InputCheck | None = None if record is None else record.checks.get(_InputCheck)
    if check is None:
        return
    if check.compared is None:
        check.compared = _kinds_to_compare(module)
        check.rates = list(_dropout_rates(module)) if check.compared[1] else []
    inputs = list(_tensors((args, kwargs), ()))
    over_tp = [(p, t) for p, t in inputs if check.tp_mesh is not None and check.compared[_is_floating(t)]]
    inputs = inputs if check.cp_mesh is not None else over_tp
    # A rate may be raised at any time.
    drops = module.training and any(getattr(owner, rate) > 0 for owner, rate in check.rates)
    recipe = _te.format_recipe(_te.active_recipe())
    modes = module.training, torch.is_grad_enabled(), drops, recipe
    key = method, modes, tuple((path, t.shape, t.dtype, t.requires_grad) for path, t in inputs)
    if not inputs or ((key in check.seen or len(check.seen) >= _MOST) and not check.every):
        return
    if _torch.in_backward() or is_capturing():
        return
    where = f"{type(module).__name__}.{method}"
    for mesh, tensors, axis in ((check.cp_mesh, inputs, "cp"), (check.tp_mesh, over_tp, "tp")):
        if mesh is None or not tensors:
            continue
        names = _names(getattr(module, method), [path for path, _ in tensors])
        named = dict(zip(names, dict(tensors).values(), strict=True))
        # Ranks that have compared these shapes do not arrive. This raises before collectives could mismatch.
        rendezvous = collective_call("forward with inputs of new shapes", mesh)
        with _te.skip_amax_reduction_after_errors(), rendezvous, _torch.without_modes():
            if axis == "cp":
                _check_parts(where, named, module.training, mesh)
            else:
                _check_equal(where, named, module.training, recipe, drops, mesh)
    check.seen.add(key)


def check_same_batch(batch: Any, meshes: Meshes) -> None:
    """Raise ``InputError`` on all ranks of ``cp`` for batches that differ, before each takes its part.

    Collective over ``meshes.cp`` for shapes not seen before: one object gather of a checksum per tensor.
    """
    assert meshes.cp is not None
    named = {"batch" + "".join(f"[{part!r}]" for part in path): t for path, t in _tensors(batch, ())}
    key = str([(name, tuple(t.shape), t.dtype) for name, t in named.items()])
    if not named or key in meshes.seen_batches or len(meshes.seen_batches) >= _MOST or is_simulated():
        return
    with collective_call("context_parallel_shard of new shapes", meshes.cp):
        shapes, values = _differing(gather(_describe_tensors(named), meshes.cp), "cp")
    if shapes or values:
        raise InputError(
            "context_parallel_shard: batches that differ over cp",
            expected="the same unsharded sequences on all ranks of a cp group",
            got="; ".join((shapes + [text for _, text in values])[:3]),
            why="Each takes a different part of them",
            fix="shard the data with rank=meshes.data_rank, num_replicas=meshes.data_size, with seeds that depend on "
            "these numbers, not on the global rank (docs/data.md)",
        )
    meshes.seen_batches.add(key)


def _check_parts(where: str, tensors: dict[str, torch.Tensor], training: bool, mesh: DeviceMesh) -> None:
    """Raise for inputs of different shapes on ranks of cp, and for equal ones. Collective over ``mesh``."""
    mine = {"training": (str(training), 0)} | _describe_tensors(tensors)
    # A constant tensor, such as a mask of ones, may be equal in all parts.
    varying = [name for name, tensor in tensors.items() if not bool(is_constant(_plain(tensor)))]
    by_rank = gather((mine, varying), mesh)
    shapes_differ, _ = _differing([inputs for inputs, _ in by_rank], "cp")
    same = [
        f"{', '.join(names)} the same on cp ranks {first} and {second}"
        for (first, (mine_of_first, names)), (second, (other, _)) in combinations(enumerate(by_rank), 2)
        if names and all(mine_of_first[name] == other.get(name) for name in names)
    ]
    if shapes_differ or same:
        raise InputError(
            f"{where}: inputs over cp",
            expected="a different part of the same sequences on each rank of a cp group, with equally many tokens",
            got="; ".join((shapes_differ or same)[:3]),
            why="Attention assembles the sequences from these parts",
            fix="pass te_fsdp.context_parallel_shard(batch, meshes) of the batch that all these ranks have "
            "(docs/context_parallel.md). If inputs must not be sharded, pass checks='setup' (formerly "
            "check_inputs=False) to fully_shard",
        )


def _sequence_parallel_entries(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost TE modules that all-gather tokens over tp before they compute. Local operation."""
    kind, mode = _te.kind_of(module), getattr(module, "parallel_mode", None)
    if getattr(module, "sequence_parallel", False) and (kind in _WHOLE or (kind and mode == "column")):
        yield module
        return
    for child in module.children():
        yield from _sequence_parallel_entries(child)


def _check_token_shards(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise if two ranks of tp have the same input of a sequence-parallel module. Collective over tp at first."""
    # The module all-gathers over tp anyway, so all its ranks arrive.
    check, binding = module_record(module).checks.get(_TokenShardCheck), binding_of(module)
    tensor = next((t for _, t in _tensors((args, kwargs), ()) if _is_floating(t) and t.ndim > 1), None)
    if check is None or binding is None or binding.tp_mesh is None or tensor is None:
        return
    if _torch.in_backward() or is_capturing():
        return
    tokens = _plain(tensor).flatten(0, -2)
    with _torch.without_modes():
        # Tokens that all equal each other, such as padding, may be equal on all ranks.
        varies = len(tokens) > 1 and not bool((tokens == tokens[:1]).all())
        text, value = _describe_tensors({"": tensor})[""]
        # Ranks with and without a gradient reduce different parameters together.
        text += " that requires gradients" if tensor.requires_grad and torch.is_grad_enabled() else ""
        by_rank = gather(((text, value), varies), binding.tp_mesh)
    label = binding.name or type(module).__name__
    if len({shown[0] for shown, _ in by_rank}) > 1:
        raise InputError(
            f"{label}: inputs of a sequence-parallel module",
            expected="the same shape and dtype, with or without gradients, on each rank of a tp group",
            got=", ".join(f"{shown[0]} on tp rank {rank}" for rank, (shown, _) in enumerate(by_rank)),
            why="The collectives of the ranks would not match",
            fix="pad the sequence to a multiple of the tp size before it is sharded, and set requires_grad of inputs "
            "on all ranks or on none",
        )
    # Counted before the error, and given back with it, so that a caller that catches it is checked again.
    check.left -= 1
    if all(varies for _, varies in by_rank):
        for (first, (first_sums, _)), (second, (second_sums, _)) in combinations(enumerate(by_rank), 2):
            if first_sums == second_sums:
                check.left += 1
                raise InputError(
                    f"{label}: inputs of a sequence-parallel module",
                    expected="a different part of the tokens on each rank of a tp group",
                    got=f"{first_sums[0]}, the same on tp ranks {first} and {second}",
                    why="The module concatenates the parts of all ranks: each token would occur several times",
                    fix="shard the sequence along its first dim: "
                    "x.chunk(meshes.tp.size())[meshes.tp.get_local_rank()]; or build TE modules without "
                    "sequence_parallel. If parts must be the same, pass checks='setup' (formerly "
                    "check_inputs=False) to fully_shard, or check_inputs=False to set_device_mesh",
                )
    elif check.left:
        return
    check.hook.remove()
    del module_record(module).checks[_TokenShardCheck]


def _kinds_to_compare(model: nn.Module) -> tuple[bool, bool]:
    """Return whether integers, and whether floating inputs, must be equal over tp. Local operation."""
    floating, takes_whole, takes_part = True, False, False
    for module in model.modules():
        kind = _te.kind_of(module)
        # A mark on a linear layer of TE that tp does not shard is the user's.
        unsplit = kind in ("Linear", "LayerNormLinear") and module.parallel_mode is None
        params = module._parameters.values() if kind is None or unsplit else ()
        if any(getattr(p, "sequence_parallel", False) for p in params):
            return False, False
        if kind is None:
            continue
        mode = getattr(module, "parallel_mode", None)
        floating = floating and not getattr(module, "sequence_parallel", False)
        takes_whole = takes_whole or kind in _WHOLE or mode == "column"
        takes_part = takes_part or kind == "DotProductAttention" or mode == "row"
    return True, floating and (takes_whole or not takes_part)


def _is_floating(tensor: torch.Tensor) -> bool:
    return tensor.dtype.is_floating_point or tensor.dtype.is_complex


def _tensors(value: Any, path: Path) -> Iterator[tuple[Path, torch.Tensor]]:
    """Yield the plain tensors in nested inputs, each with its path."""
    if isinstance(value, torch.Tensor):
        # Wrappers (DTensor, FakeTensor, quantized ones) have a dispatch of their own.
        dispatches = type(value).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
        if not (dispatches or value.is_meta or value.is_nested) and value.layout is torch.strided:
            yield path, value
        return
    items: Iterable[tuple[Any, Any]]
    if isinstance(value, (tuple, list)):
        items = enumerate(value)
    elif isinstance(value, Mapping):
        items = value.items()
    elif is_dataclass(value) and not isinstance(value, type):
        items = ((f.name, getattr(value, f.name, None)) for f in fields(value))
    else:
        return
    for name, inner in items:
        yield from _tensors(inner, (*path, name))


def _names(call: Any, paths: list[Path]) -> list[str]:
    """Return names of a call's inputs for messages, from its signature: ``tokens``, ``batch['mask']``."""
    # Different paths have different names.
    inner, positional, names = inspect.unwrap(call), [], []
    # For a wrapped method ``inspect`` would omit more than ``self``.
    with contextlib.suppress(TypeError, ValueError):
        parameters = inspect.signature(inner if inspect.ismethod(inner) else call).parameters.values()
        positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    for by_name, first, *inside in paths:
        name = first if by_name else positional[first] if first < len(positional) else f"argument {first}"
        names.append(f"{name}{''.join(f'[{part!r}]' for part in inside)}")
    return names


def _dropout_rates(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Yield the modules whose dropout affects values that tp replicates, each with the name of its rate."""
    # Attention's own masks belong to each rank's heads.
    kinds = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
    for module in model.modules():
        if isinstance(module, kinds):
            yield module, "p"
        elif _te.kind_of(module) == "TransformerLayer":
            yield module, "hidden_dropout"


def _describe_tensors(tensors: dict[str, torch.Tensor]) -> InputDescriptions:
    """Return dtype and shape of each tensor as text, and its checksum."""
    return {
        name: (f"{str(tensor.dtype)[6:]} {tuple(tensor.shape)}", int(checksum(_plain(tensor))))
        for name, tensor in tensors.items()
    }


def _differing(by_rank: list[InputDescriptions], axis: str) -> tuple[list[str], list[tuple[str, str]]]:
    """Return inputs whose dtype or shape differs as texts, and inputs whose values differ by name and as texts."""
    different_shapes, values = [], []
    for name in dict.fromkeys(name for inputs in by_rank for name in inputs):
        descriptions = [inputs.get(name, ("none", 0))[0] for inputs in by_rank]
        others = [rank for rank, inputs in enumerate(by_rank) if inputs.get(name) != by_rank[0].get(name)]
        if len(set(descriptions)) > 1:
            shown = ", ".join(f"{shape} on {axis} rank {n}" for n, shape in enumerate(descriptions))
            different_shapes.append(f"{name} ({shown})")
        elif others:
            values.append((name, f"{name} ({descriptions[0]}; {axis} ranks 0 and {others[0]})"))
    return different_shapes, values


def _check_equal(
    where: str, tensors: dict[str, torch.Tensor], training: bool, recipe: str, drops: bool, mesh: DeviceMesh
) -> None:
    """Raise for inputs, modes and random states that differ over tp. Collective over ``mesh``."""
    trained = [name for name, tensor in tensors.items() if tensor.requires_grad and torch.is_grad_enabled()]
    mine: InputDescriptions = {"training": (str(training), 0), "the recipe": (recipe, 0)}
    # Ranks that differ here would run different collectives in backward.
    mine["gradients"] = f"of {', '.join(trained) or 'no input'}", 0
    if drops:
        state = torch.get_rng_state() if mesh.device_type == "cpu" else torch.cuda.get_rng_state()
        mine["the random state of dropout"] = mesh.device_type, int(checksum(state))
    differences, differing = _differing(gather(mine | _describe_tensors(tensors), mesh), "tp")
    exact = [text for name, text in differing if name not in tensors or not _is_floating(tensors[name])]
    if differences or exact:
        differences += [text for _, text in differing]
    elif differing:
        # Inputs that each rank computes, for example with an encoder before the model, may differ in the last
        # bits.
        beyond = []
        for tensor, text in [(tensors[name], text) for name, text in differing]:
            plain = _plain(tensor).to(mesh.device_type).double().contiguous()
            first = plain.clone()
            dist.broadcast(first, group=mesh.get_group(), group_src=0)
            # NaN and infinities must have the same positions.
            finite = plain.isfinite()
            same = bool((finite == first.isfinite()).all())
            plain, first = torch.where(finite, plain, 0), torch.where(finite, first, 0)
            limit = _ROUNDING * torch.finfo(tensor.dtype).eps * first.abs().max()
            if not same or bool((plain - first).abs().max() > limit):
                beyond.append(text)
        differences = list(dict.fromkeys(text for texts in gather(beyond, mesh) for text in texts))
    if differences:
        raise InputError(
            f"{where}: inputs that differ over tp",
            expected="the same on all ranks of a tp group",
            got=shorten(differences, 3, "; "),
            why="These ranks compute one forward together: each would contribute its part of a different batch",
            fix="shard the data with rank=meshes.data_rank, num_replicas=meshes.data_size, with seeds that depend on "
            "these numbers, not on the global rank (docs/data.md). If tp ranks get parts of the sequence, build TE "
            "modules with sequence_parallel=True and mark the parameters of your own modules "
            "sequence_parallel = True. If inputs must differ, pass checks='setup' (formerly check_inputs=False) to "
            "fully_shard, or check_inputs=False to set_device_mesh",
        )


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose bits can be compared."""
    tensor = tensor.detach()
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor.resolve_neg()
