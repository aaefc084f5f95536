"""What enters a model: equal on the ranks of ``tp``, parts of the same sequences on those of ``cp``.

All ranks of ``tp`` compute one forward together.

Ranks that are fed different batches would train all the same, each on a mixture of activations that no model computes.
So inputs are compared over ``tp`` when they come in shapes that were not seen before: one checksum per tensor. A later
forward with known shapes costs a look at the arguments and sends nothing.

    integers (token ids, positions, masks)   compared, unless parameters of the model's own modules are marked
                                             ``sequence_parallel``: then each rank may have its part of the sequence
    floating                                 compared, unless any module is sequence-parallel, or all begin with a part
                                             of the features: only row-parallel layers, or core attention
    what enters sequence-parallel modules    must differ: each rank has its part of the tokens. Compared at the first
                                             call of each that has tokens which differ among themselves
    DTensors, other wrappers, meta, sparse   left alone: they say themselves what they hold
    random numbers of dropout                compared as floating inputs are, in training: masks that differ over tp are
                                             inputs that differ

Ranks of ``cp`` compute parts of the same sequences: their inputs must have the same shapes, and other values.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from te_fsdp.collectives.agreement import are_equal, digest, gather, rank
from te_fsdp.collectives.rendezvous import collective_call, is_capturing, is_simulated
from te_fsdp.errors import InputError, shorten
from te_fsdp.initialize import checksum, is_constant
from te_fsdp.records import binding_of
from te_fsdp.upstream import te as _te, torch_dtensor as _torch

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from te_fsdp.mesh import Meshes

_log = logging.getLogger("te_fsdp")

#: Key in the root's ``__dict__``: its check, ``None`` where one was taken away.
KEY = "_te_fsdp_inputs"
# Combinations of shapes that are compared. Data of ever new lengths would else be compared, and waited for, for ever.
_MOST = 256
# Rounding: kernels that add in another order give values that differ by a few units in the last place of the largest.
# Other data differ by as much as the values themselves.
_ROUNDING = 8
_WHOLE = ("LayerNormMLP", "MultiheadAttention", "TransformerLayer")

Path = tuple[Any, ...]
#: Of each input by its name: how it looks, and the checksum of its values.
Seen = dict[str, tuple[str, int]]


@dataclass
class _InputCheck:
    """A root's check."""

    tp_mesh: DeviceMesh | None  #: Over whose ranks inputs are compared
    cp_mesh: DeviceMesh | None = None  #: Over whose ranks they must be parts of the same
    #: What was found right: method, modes, and path, shape and dtype of each tensor.
    seen: set[Any] = field(default_factory=set)
    #: Whether integers, and whether floating inputs, are compared over tp; ``None`` before a forward.
    compared: tuple[bool, bool] | None = None
    #: Modules that may draw dropout masks which must be equal over tp, each with its rate's name.
    rates: list[tuple[nn.Module, str]] = field(default_factory=list)

    def __deepcopy__(self, memo: dict[int, Any]) -> _InputCheck:
        """Meshes are shared by the copy: process groups cannot be copied."""
        return _InputCheck(self.tp_mesh, self.cp_mesh)


#: Key in a sequence-parallel module's ``__dict__``, as long as what enters it is looked at.
_LOOKS = "_te_fsdp_parts"


@dataclass
class _TokenShardCheck:
    """Looks at what enters a sequence-parallel module, and the hook that makes them."""

    hook: Any  #: Removed after the last one: later forwards cost nothing
    left: int = 4  #: How many there are to come, if each sees tokens that say nothing


def watch_inputs(model: nn.Module, tp_mesh: DeviceMesh | None, cp_mesh: DeviceMesh | None = None) -> None:
    """Compare what enters ``model`` over these 1-D meshes from now on, and no longer what enters modules in it.

    ``None``: nothing over tp; each rank has sequences of its own, without ``cp_mesh``. Local operation. A forward with
    inputs of new shapes becomes collective over the meshes, which it is anyway.
    """
    for module in model.modules():
        if module.__dict__.get(KEY) is not None:
            module.__dict__[KEY] = None
        if (looks := module.__dict__.pop(_LOOKS, None)) is not None:
            looks.hook.remove()
    tp_mesh = None if tp_mesh is None or tp_mesh.size() == 1 else tp_mesh
    if (tp_mesh is None and cp_mesh is None) or is_simulated():
        return
    if KEY not in model.__dict__:
        model.register_forward_pre_hook(_torch.disable_compile(check_inputs), with_kwargs=True, prepend=True)
    model.__dict__[KEY] = _InputCheck(tp_mesh, cp_mesh)
    for module in _sequence_parallel_entries(model) if tp_mesh is not None else ():
        hook = module.register_forward_pre_hook(_torch.disable_compile(_check_token_shards), with_kwargs=True)
        module.__dict__[_LOOKS] = _TokenShardCheck(hook)


def watch_for_copies(model: nn.Module, meshes: Meshes) -> None:
    """Warn once if the first batch of training is the same on all ranks of ``dp_shard``: nobody deals the data out.

    No error: one batch for all is how many try a model out. Local operation; the first forward in training becomes
    collective over ``dp_shard``, which it is anyway: one max all-reduce of two integers.
    """
    shards = meshes.device_mesh["dp_shard"]
    if shards.size() == 1 or meshes.cp is not None or meshes.pp is not None or is_simulated():
        return

    def look(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not (module.training and torch.is_grad_enabled()) or _torch.in_backward() or is_capturing():
            return
        hook.remove()
        with _torch.without_modes():
            given = {str(path): tensor for path, tensor in _tensors((args, kwargs), ())}
            same = bool(are_equal([digest(repr(_seen(given)))], shards))
            telling = not all(bool(is_constant(_plain(tensor))) for tensor in given.values())
            if same and telling and rank() == 0:
                _log.warning(
                    "%s.forward: the first batch is the same on all %d ranks of dp_shard, each of which computes the "
                    "same gradient. Deal the data out by meshes.data_rank of meshes.data_size (docs/data.md); where it "
                    "shall be so, pass check_inputs=False to fully_shard",
                    type(module).__name__,
                    shards.size(),
                )

    hook = model.register_forward_pre_hook(_torch.disable_compile(look), with_kwargs=True)


def check_inputs(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], method: str = "forward"
) -> None:
    """Compare a root's inputs over ``tp`` and ``cp``, if it is watched and they have shapes that were not seen before.

    Collective over both in that case: one object gather of a checksum per tensor; where floating values differ over
    ``tp``, a broadcast of the first rank's. Nothing in backward, where forwards are computed again, and in the capture
    of a CUDA graph. Nothing has been gathered or computed when it raises.

    Raises:
        InputError: They differ over ``tp``, or are the same over ``cp``; on all ranks of that axis.
        CollectiveError: Some ranks did not come with new shapes.
    """
    check = module.__dict__.get(KEY)
    if check is None:
        return
    if check.compared is None:
        check.compared = _compared(module)
        check.rates = list(_dropout_rates(module)) if check.compared[1] else []
    found = list(_tensors((args, kwargs), ()))
    over_tp = [
        (path, t) for path, t in found if check.tp_mesh is not None and check.compared[_is_floating(t)]
    ]
    found = found if check.cp_mesh is not None else over_tp
    # A rate may be raised at any time.
    drops = module.training and any(getattr(owner, rate) > 0 for owner, rate in check.rates)
    recipe = _te.format_recipe(_te.active_recipe())
    modes = module.training, torch.is_grad_enabled(), drops, recipe
    key = method, modes, tuple((path, t.shape, t.dtype) for path, t in found)
    if not found or key in check.seen or len(check.seen) >= _MOST:
        return
    if _torch.in_backward() or is_capturing():
        return
    where = f"{type(module).__name__}.{method}"
    for mesh, tensors, axis in ((check.cp_mesh, found, "cp"), (check.tp_mesh, over_tp, "tp")):
        if mesh is None or not tensors:
            continue
        names = _names(getattr(module, method), [path for path, _ in tensors])
        named = dict(zip(names, dict(tensors).values(), strict=True))
        # The ranks that have seen these shapes do not come: an error, where collectives would meet others.
        meeting = collective_call("forward with inputs of new shapes", mesh)
        with _te.skip_amax_reduction_after_errors(), meeting, _torch.without_modes():
            if axis == "cp":
                _check_parts(where, named, module.training, mesh)
            else:
                _check_equal(where, named, module.training, recipe, drops, mesh)
    check.seen.add(key)


def check_same_batch(batch: Any, meshes: Meshes) -> None:
    """Raise ``InputError`` on all ranks of ``cp`` for batches that differ, before each takes its part of them.

    Collective over ``meshes.cp`` for shapes not seen before: one object gather of a checksum per tensor.
    """
    assert meshes.cp is not None
    named = {"batch" + "".join(f"[{part!r}]" for part in path): t for path, t in _tensors(batch, ())}
    key = str([(name, tuple(t.shape), t.dtype) for name, t in named.items()])
    if not named or key in meshes.seen_batches or len(meshes.seen_batches) >= _MOST or is_simulated():
        return
    with collective_call("context_parallel_shard of new shapes", meshes.cp):
        looks, values = _differing(gather(_seen(named), meshes.cp), "cp")
    if looks or values:
        raise InputError(
            "context_parallel_shard: batches that differ over cp",
            expected="the same whole sequences on all ranks of a cp group",
            got="; ".join((looks + [text for _, text in values])[:3]),
            why="Each takes another part of them",
            fix="deal the data out by meshes.data_rank of meshes.data_size, with seeds that follow from these numbers, "
            "not from the global rank (docs/data.md)",
        )
    meshes.seen_batches.add(key)


def _check_parts(where: str, tensors: dict[str, torch.Tensor], training: bool, mesh: DeviceMesh) -> None:
    """Refuse inputs of other shapes on ranks of cp, and whole sequences. Collective over ``mesh``."""
    mine = {"training": (str(training), 0)} | _seen(tensors)
    # What is one number all through (a mask of ones) may be equal in all parts.
    telling = [name for name, tensor in tensors.items() if not bool(is_constant(_plain(tensor)))]
    everyone = gather((mine, telling), mesh)
    looks, _ = _differing([seen for seen, _ in everyone], "cp")
    same = [
        f"{', '.join(names)} the same on cp ranks {first} and {second}"
        for (first, (one, names)), (second, (other, _)) in combinations(enumerate(everyone), 2)
        if names and all(one[name] == other.get(name) for name in names)
    ]
    if looks or same:
        raise InputError(
            f"{where}: inputs over cp",
            expected="another part of the same sequences on each rank of a cp group, as many tokens on all",
            got="; ".join((looks or same)[:3]),
            why="Attention puts the sequences together out of these parts",
            fix="te_fsdp.context_parallel_shard(batch, meshes) of the batch that all these ranks have "
            "(docs/context_parallel.md). Where inputs shall not be cut, pass check_inputs=False to fully_shard",
        )


def _sequence_parallel_entries(module: nn.Module) -> Iterator[nn.Module]:
    """The outermost TE modules that gather tokens over tp before they compute. Local operation."""
    kind, mode = _te.kind_of(module), getattr(module, "parallel_mode", None)
    if getattr(module, "sequence_parallel", False) and (kind in _WHOLE or (kind and mode == "column")):
        yield module
        return
    for child in module.children():
        yield from _sequence_parallel_entries(child)


def _check_token_shards(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse what enters a sequence-parallel module if two ranks of tp bring the same. Collective over tp at first.

    The module would gather over tp anyway, so that all its ranks are here.
    """
    looks, binding = module.__dict__.get(_LOOKS), binding_of(module)
    given = next((t for _, t in _tensors((args, kwargs), ()) if _is_floating(t) and t.ndim > 1), None)
    if looks is None or binding is None or binding.tp_mesh is None or given is None:
        return
    if _torch.in_backward() or is_capturing():
        return
    tokens = _plain(given).flatten(0, -2)
    with _torch.without_modes():
        # Tokens that are all alike, of zeros or padding, may be so on all ranks.
        telling = len(tokens) > 1 and not bool((tokens == tokens[:1]).all())
        everyone = gather((_seen({"": given})[""], telling), binding.tp_mesh)
    looks.left -= 1
    if all(telling for _, telling in everyone):
        for (first, (one, _)), (second, (other, _)) in combinations(enumerate(everyone), 2):
            if one == other:
                looks.left += 1
                raise InputError(
                    f"{binding.name or type(module).__name__}: inputs of a sequence-parallel module",
                    expected="another part of the tokens on each rank of a tp group",
                    got=f"{one[0]}, the same on tp ranks {first} and {second}",
                    why="The module puts the parts of all ranks together: each token would be there several times",
                    fix="cut the sequence along its first dim: x.chunk(meshes.tp.size())[meshes.tp.get_local_rank()]; "
                    "or build TE modules without sequence_parallel. Where parts shall be the same, pass "
                    "check_inputs=False to fully_shard or set_device_mesh",
                )
    elif looks.left:
        return
    looks.hook.remove()
    del module.__dict__[_LOOKS]


def _compared(model: nn.Module) -> tuple[bool, bool]:
    """Whether integers, and whether floating inputs, must be equal over tp. Local operation."""
    floating, takes_whole, takes_part = True, False, False
    for module in model.modules():
        kind = _te.kind_of(module)
        # A mark on a linear layer of TE that is not cut over tp is the user's.
        unsplit = kind in ("Linear", "LayerNormLinear") and module.parallel_mode is None
        own = module._parameters.values() if kind is None or unsplit else ()
        if any(getattr(p, "sequence_parallel", False) for p in own):
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
    """The tensors in nested inputs that hold their values themselves, each with its path."""
    if isinstance(value, torch.Tensor):
        # Wrappers (DTensor, FakeTensor, quantized ones) have a dispatch of their own.
        own = type(value).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
        if not (own or value.is_meta or value.is_nested) and value.layout is torch.strided:
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
    """Names of a call's inputs for messages, as far as Python knows them: ``tokens``, ``batch['mask']``.

    Unlike paths, unlike names.
    """
    inner, known, names = inspect.unwrap(call), [], []
    # Of a method that was wrapped as such ``inspect`` would leave out more than ``self``.
    with contextlib.suppress(TypeError, ValueError):
        parameters = inspect.signature(inner if inspect.ismethod(inner) else call).parameters.values()
        known = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    for by_name, first, *inside in paths:
        name = first if by_name else known[first] if first < len(known) else f"argument {first}"
        names.append(f"{name}{''.join(f'[{part!r}]' for part in inside)}")
    return names


def _dropout_rates(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """The modules that can zero values which every tp rank holds, and the name of each one's rate.

    Attention's own masks are of each rank's heads.
    """
    kinds = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
    for module in model.modules():
        if isinstance(module, kinds):
            yield module, "p"
        elif _te.kind_of(module) == "TransformerLayer":
            yield module, "hidden_dropout"


def _seen(tensors: dict[str, torch.Tensor]) -> Seen:
    """How each tensor looks, and its checksum."""
    return {
        name: (f"{str(tensor.dtype)[6:]} {tuple(tensor.shape)}", int(checksum(_plain(tensor))))
        for name, tensor in tensors.items()
    }


def _differing(everyone: list[Seen], axis: str) -> tuple[list[str], list[tuple[str, str]]]:
    """Inputs that look otherwise on some rank, in words; and those of other values, by name and in words."""
    looks_differ, values = [], []
    for name in dict.fromkeys(name for seen in everyone for name in seen):
        looks = [seen.get(name, ("none", 0))[0] for seen in everyone]
        others = [rank for rank, seen in enumerate(everyone) if seen.get(name) != everyone[0].get(name)]
        if len(set(looks)) > 1:
            told = ", ".join(f"{look} on {axis} rank {n}" for n, look in enumerate(looks))
            looks_differ.append(f"{name} ({told})")
        elif others:
            values.append((name, f"{name} ({looks[0]}; {axis} ranks 0 and {others[0]})"))
    return looks_differ, values


def _check_equal(
    where: str, tensors: dict[str, torch.Tensor], training: bool, recipe: str, drops: bool, mesh: DeviceMesh
) -> None:
    """Refuse inputs, modes and random numbers that differ over tp. Collective over ``mesh``."""
    mine: Seen = {"training": (str(training), 0), "the recipe": (recipe, 0)}
    if drops:
        state = torch.get_rng_state() if mesh.device_type == "cpu" else torch.cuda.get_rng_state()
        mine["the random state that dropout draws from"] = mesh.device_type, int(checksum(state))
    found, values = _differing(gather(mine | _seen(tensors), mesh), "tp")
    exact = [text for name, text in values if name not in tensors or not _is_floating(tensors[name])]
    if found or exact:
        found += [text for _, text in values]
    else:
        found = _beyond_rounding([(tensors[name], text) for name, text in values], mesh)
    if found:
        raise InputError(
            f"{where}: inputs that differ over tp",
            expected="the same on all ranks of a tp group",
            got=shorten(found, 3, "; "),
            why="These ranks compute one forward together: each would add its part of another batch",
            fix="deal the data out by meshes.data_rank of meshes.data_size, with seeds that follow from these "
            "numbers, not from the global rank (docs/data.md). Where tp ranks get parts of the sequence, build TE "
            "modules with sequence_parallel=True and mark the parameters of your own modules "
            "sequence_parallel = True. Where inputs shall differ, pass check_inputs=False to fully_shard or "
            "set_device_mesh",
        )


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as its bits are to be compared."""
    tensor = tensor.detach()
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor.resolve_neg()


def _beyond_rounding(tensors: list[tuple[torch.Tensor, str]], mesh: DeviceMesh) -> list[str]:
    """Texts of those that differ from the first rank's by more than rounding, on any rank.

    What was computed on each rank, by an encoder before the model, say, may differ in last bits. Collective over
    ``mesh``: a broadcast of each tensor, and a gather.
    """
    if not tensors:
        return []
    mine = []
    for tensor, text in tensors:
        values = _plain(tensor).to(mesh.device_type).double().contiguous()
        first = values.clone()
        dist.broadcast(first, group=mesh.get_group(), group_src=0)
        # NaN and infinities only by where they are.
        finite = values.isfinite()
        same = bool((finite == first.isfinite()).all())
        values, first = torch.where(finite, values, 0), torch.where(finite, first, 0)
        limit = _ROUNDING * torch.finfo(tensor.dtype).eps * first.abs().max()
        if not same or bool((values - first).abs().max() > limit):
            mine.append(text)
    return list(dict.fromkeys(text for texts in gather(mine, mesh) for text in texts))
