"""What must be the same on several ranks, the inputs of a model, and what must not, parts of one weight.

All ranks of ``tp`` compute one forward together.

Ranks that are fed different batches would train all the same, each on a mixture of activations that no model computes.
So inputs are compared over ``tp`` when they come in shapes that were not seen before: one checksum per tensor. A later
forward with known shapes costs a look at the arguments and sends nothing.

    integers (token ids, positions, masks)   compared, unless parameters of the model's own modules are marked
                                             ``sequence_parallel``: then each rank may have its part of the sequence
    floating                                 compared, unless any module is sequence-parallel, or all begin with a part
                                             of the features: only row-parallel layers, or core attention
    DTensors, other wrappers, meta, sparse   left alone: they say themselves what they hold
    random numbers of dropout                compared as floating inputs are, in training: masks that differ over tp are
                                             inputs that differ

Parts of a weight must be drawn from different random numbers. With equal seeds on all ranks, modules that are built
on the device get the same numbers on every rank of ``tp`` (and the same experts on every rank of ``ep``). Training
keeps them equal: the model has as many different rows as one rank holds. Constant parts (zeros, ones) are what any
initialisation gives, and not looked at.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from te_fsdp import _te, _torch
from te_fsdp.agree import gather
from te_fsdp.all_ranks import collective_call, is_simulated
from te_fsdp.errors import InitError, InputError, message
from te_fsdp.parameters import binding_of

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from te_fsdp.modules.plan import ModulePlan

#: Attribute that a user sets on a parameter whose parts are meant to be equal.
MEANT = "equal_shards"
# Odd multiplier of a linear congruential generator (Knuth): makes the checksum depend on positions.
_MULTIPLIER = 6364136223846793005
# Words at a time: each takes 8 bytes while its checksum is computed, and embeddings have a thousand million.
_PIECE = 1 << 24


def on_device(planned: Iterable[ModulePlan]) -> bool:
    """Whether modules that are not bound yet have parameters on the device. Local operation."""
    return any(
        parameter is not None and not parameter.is_meta
        for item in planned
        if binding_of(item.module) is None
        for parameter in item.module._parameters.values()
    )


def find_equal_shards(
    planned: Iterable[ModulePlan], tp_mesh: DeviceMesh | None, ep_mesh: DeviceMesh | None
) -> list[str]:
    """Parameters of which two ranks hold equal parts that should differ. Changes nothing.

    Collective over ``tp_mesh`` and ``ep_mesh`` where they have several ranks: one object gather of a checksum per
    parameter over each. Parameters on meta, and those of modules that are bound already, are left out.

    Args:
        planned: The modules to be bound.
        tp_mesh: Its ranks must differ in parameters that tp cuts.
        ep_mesh: Its ranks must differ in the parameters of experts.

    Returns:
        One entry per parameter, with the ranks that are equal; the same on all ranks of a tp group, or of an ep group.
    """
    fresh = [item for item in planned if binding_of(item.module) is None]
    found = []
    if dist.is_initialized() and is_simulated():
        return []
    if tp_mesh is not None and tp_mesh.size() > 1:
        found += _equal_over(tp_mesh, "tp", _drawn(_cut_by_tp(fresh)))
    if ep_mesh is not None and ep_mesh.size() > 1:
        found += _equal_over(ep_mesh, "ep", _drawn(_experts(fresh), copies=True))
    return found


def refuse_equal_shards(found: list[str]) -> None:
    """Raise if anything was found.

    Raises:
        InitError: Names the parameters, and the ways out.
    """
    if not found:
        return
    more = f" and {len(found) - 3} more" if len(found) > 3 else ""
    raise InitError(
        f"{'; '.join(found[:3])}{more}: equal values where each rank holds another part",
        expected="different values on ranks that hold different rows, columns or experts",
        got="those of one random state, as equal seeds draw them",
        why="Training would keep them equal, so that the model learns what one rank's part can",
        fix='build the model with device="meta" and call te_fsdp.materialize, which draws the weights of one '
        "process; or build TE modules with TransformerEngine's RNG tracker (get_rng_state_tracker=), or with "
        "another seed on each of these ranks, and equal seeds for what they replicate; or load values before. "
        f"Where equal parts are meant, set parameter.{MEANT} = True",
    )


def _cut_by_tp(planned: Iterable[ModulePlan]) -> Iterator[tuple[str, torch.Tensor, str]]:
    """Label, local tensor and kind of every parameter on the device that tp cuts."""
    for item in planned:
        for name, parameter in item.module._parameters.items():
            rule = item.rules.get(name)
            if parameter is not None and rule is not None and rule.shard_dim is not None:
                yield from _values(item, name, parameter)


def _experts(planned: Iterable[ModulePlan]) -> Iterator[tuple[str, torch.Tensor, str]]:
    """Label by local index, local tensor and kind of every expert's parameters on the device."""
    for item in planned:
        for name, parameter in item.module._parameters.items() if item.experts is not None else ():
            if parameter is not None:
                yield from _values(item, name, parameter)


def _values(item: ModulePlan, name: str, parameter: torch.Tensor) -> Iterator[tuple[str, torch.Tensor, str]]:
    local = _torch.local_of(parameter)
    if local.is_meta or getattr(parameter, MEANT, False):
        return
    label = f"{item.name}.{name}" if item.name else name
    yield label, local, label.rstrip("0123456789")


def _drawn(held: Iterable[tuple[str, torch.Tensor, str]], *, copies: bool = False) -> dict[str, int]:
    """Label -> checksum of those whose values are not all the same.

    Args:
        held: Label, local tensor and kind.
        copies: Leave out kinds of which this rank has several, all equal: experts that begin as copies of one layer.
    """
    entries = [(label, kind, checksum(tensor), _constant(tensor)) for label, tensor, kind in held]
    if not entries:
        return {}
    sums = torch.stack([entry[2] for entry in entries]).tolist()  # fetched at once
    constant = torch.stack([entry[3] for entry in entries]).tolist()
    kinds: dict[str, list[int]] = {}
    for (_, kind, _, _), value in zip(entries, sums, strict=True):
        kinds.setdefault(kind, []).append(value)
    meant = {kind for kind, values in kinds.items() if copies and len(values) > 1 and len(set(values)) == 1}
    return {
        label: value
        for (label, kind, _, _), value, same in zip(entries, sums, constant, strict=True)
        if not same and kind not in meant
    }


def _equal_over(mesh: DeviceMesh, axis: str, mine: dict[str, int]) -> list[str]:
    """Which of them two ranks of a 1-D mesh have alike."""
    everyone = gather(mine, mesh)
    found: dict[str, str] = {}
    for (one, first), (other, second) in combinations(enumerate(everyone), 2):
        for label, value in first.items():
            if second.get(label) == value:
                found.setdefault(label, f"{label} ({axis} ranks {one} and {other})")
    return list(found.values())


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Position-dependent checksum of a tensor's bytes, int64 on its device, wrapping on overflow.

    Halved, so that its negative exists too.
    """
    words = _words(tensor)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, words.numel(), _PIECE):
        piece = words[start : start + _PIECE]
        places = torch.arange(start + 1, start + 1 + piece.numel(), dtype=torch.int64, device=tensor.device)
        total += places.mul_(_MULTIPLIER).mul_(piece).sum()
    return total // 2


def _constant(tensor: torch.Tensor) -> torch.Tensor:
    """Whether all values of a tensor are the same: a bool on its device."""
    words = _words(tensor)
    return (words == words[:1]).all()


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's bits as a flat tensor of integers of the same size."""
    # Of quantized tensors the values: padding of their scale buffers is left as the kernel finds it.
    tensor = tensor.dequantize() if _te.is_quantized(tensor) else tensor
    data = tensor.detach().contiguous().view(-1)
    return data.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[data.element_size()])


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
class _Check:
    """A root's check.

    Attributes:
        tp_mesh: Over whose ranks inputs are compared.
        seen: What was found equal: method, mode, and path, shape and dtype of each tensor.
        compared: Whether integers, and whether floating inputs, are compared; ``None`` before the first forward.
        drops: Whether the model draws dropout masks that must be equal.
    """

    tp_mesh: DeviceMesh
    seen: set[Any] = field(default_factory=set)
    compared: tuple[bool, bool] | None = None
    drops: bool = False

    def __deepcopy__(self, memo: dict[int, Any]) -> _Check:
        """Meshes are shared by the copy: process groups cannot be copied."""
        return _Check(self.tp_mesh)


def watch_inputs(model: nn.Module, tp_mesh: DeviceMesh | None) -> None:
    """Compare what enters ``model`` over ``tp_mesh`` from now on, and no longer what enters modules in it.

    Local operation. A forward with inputs of new shapes becomes collective over ``tp_mesh``, which it is anyway.

    Args:
        model: The root, whose parameters are bound.
        tp_mesh: 1-D; ``None`` to compare nothing.
    """
    for module in model.modules():
        if module.__dict__.get(KEY) is not None:
            module.__dict__[KEY] = None
    if tp_mesh is None or tp_mesh.size() == 1 or is_simulated():
        return
    if KEY not in model.__dict__:
        model.register_forward_pre_hook(_torch.untraced(check_inputs), with_kwargs=True, prepend=True)
    model.__dict__[KEY] = _Check(tp_mesh)


def check_inputs(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], method: str = "forward"
) -> None:
    """Compare a root's inputs over ``tp``, if they have shapes that were not seen before.

    Collective over ``tp`` in that case: one object gather of a checksum per tensor; where floating values differ, a
    broadcast of the first rank's. Nothing in backward, where forwards are computed again, and in the capture of a CUDA
    graph.

    Args:
        module: A module that may be watched (:func:`watch_inputs`).
        args: Positional inputs.
        kwargs: Those by name.
        method: Which method they go to.

    Raises:
        InputError: They differ; on all ranks of ``tp``. Nothing has been gathered or computed yet.
        CollectiveError: Some ranks did not come with new shapes.
    """
    check = module.__dict__.get(KEY)
    if check is None:
        return
    if check.compared is None:
        check.compared = _compared(module)
        check.drops = check.compared[1] and any(map(_drops, module.modules()))
    found = [(path, t) for path, t in _tensors((args, kwargs), ()) if check.compared[_is_floating(t)]]
    key = method, module.training, tuple((path, t.shape, t.dtype) for path, t in found)
    if not found or key in check.seen or len(check.seen) >= _MOST:
        return
    if _torch.in_backward() or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        return
    tensors = dict(
        zip(_names(module, method, [path for path, _ in found]), dict(found).values(), strict=True)
    )
    # The ranks that have seen these shapes do not come: an error, where collectives would meet others.
    with collective_call("forward with inputs of new shapes", check.tp_mesh), _torch.without_modes():
        different = _differences(tensors, module.training, check.drops, check.tp_mesh)
    if different:
        raise InputError(_text(f"{type(module).__name__}.{method}", different))
    check.seen.add(key)


def _compared(model: nn.Module) -> tuple[bool, bool]:
    """Whether integers, and whether floating inputs, must be equal over tp. Local operation."""
    floating, takes_whole, takes_part = True, False, False
    for module in model.modules():
        kind = _te.kind_of(module)
        if kind is None:
            if any(getattr(p, "sequence_parallel", False) for p in module._parameters.values()):
                return False, False
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


def _names(module: nn.Module, method: str, paths: list[Path]) -> list[str]:
    """Names of inputs for messages: ``tokens``, ``batch['mask']``. Unlike paths, unlike names."""
    known, names = _positional(getattr(module, method)), []
    for by_name, first, *inner in paths:
        name = first if by_name else known[first] if first < len(known) else f"argument {first}"
        names.append(f"{name}{''.join(f'[{part!r}]' for part in inner)}")
    return names


def _positional(call: Any) -> list[str]:
    """Names of the positional arguments of a call, as far as Python knows them."""
    inner = inspect.unwrap(call)
    try:
        # Of a method that was wrapped as such ``inspect`` would leave out more than ``self``.
        parameters = inspect.signature(inner if inspect.ismethod(inner) else call).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def _drops(module: nn.Module) -> bool:
    """Whether a module zeroes values that every tp rank holds. Attention's own masks are of each rank's heads."""
    kinds = (
        torch.nn.Dropout,
        torch.nn.Dropout1d,
        torch.nn.Dropout2d,
        torch.nn.Dropout3d,
        torch.nn.AlphaDropout,
    )
    return (isinstance(module, kinds) and module.p > 0) or (
        _te.kind_of(module) == "TransformerLayer" and getattr(module, "hidden_dropout", 0) > 0
    )


def _differences(
    tensors: dict[str, torch.Tensor], training: bool, drops: bool, mesh: DeviceMesh
) -> list[str]:
    """One entry per input that differs, the same on all ranks. Collective over ``mesh``."""
    mine: Seen = {"training": (str(training), 0)}
    if training and drops:
        state = torch.get_rng_state() if mesh.device_type == "cpu" else torch.cuda.get_rng_state()
        mine["the random state that dropout draws from"] = mesh.device_type, int(checksum(state))
    for name, tensor in tensors.items():
        mine[name] = (f"{str(tensor.dtype)[6:]} {tuple(tensor.shape)}", int(checksum(_plain(tensor))))
    everyone = gather(mine, mesh)
    found, values = [], []
    for name in dict.fromkeys(name for seen in everyone for name in seen):
        looks = [seen.get(name, ("none", 0))[0] for seen in everyone]
        others = [rank for rank, seen in enumerate(everyone) if seen.get(name) != everyone[0].get(name)]
        if len(set(looks)) > 1:
            found.append(f"{name} ({', '.join(f'{look} on tp rank {n}' for n, look in enumerate(looks))})")
        elif others:
            values.append((name, f"{name} ({looks[0]}; tp ranks 0 and {others[0]})"))
    exact = [text for name, text in values if name not in tensors or not _is_floating(tensors[name])]
    if found or exact:
        return found + [text for _, text in values]
    return _beyond_rounding([(tensors[name], text) for name, text in values], mesh)


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


def _text(where: str, different: list[str]) -> str:
    more = f" and {len(different) - 3} more" if len(different) > 3 else ""
    return message(
        f"{where}: inputs that differ over tp",
        expected="the same on all ranks of a tp group",
        got=f"{'; '.join(different[:3])}{more}",
        why="These ranks compute one forward together: each would add its part of another batch",
        fix="deal the data out by meshes.data_rank of meshes.data_size, with seeds that follow from these numbers, not "
        "from the global rank (docs/data.md). Where tp ranks get parts of the sequence, build TE modules with "
        "sequence_parallel=True and mark the parameters of your own modules sequence_parallel = True. Where inputs "
        "shall differ, pass check_inputs=False to fully_shard or set_device_mesh",
    )
