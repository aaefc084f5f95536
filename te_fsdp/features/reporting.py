"""``report``: a table of the parameters of a rank, one row per parameter."""

from __future__ import annotations

import io
import re
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from te_fsdp.check_points import DEFAULT
from te_fsdp.features.transports import transports_of
from te_fsdp.layout import chunk_range, expert_index
from te_fsdp.precision import gradient_dtype
from te_fsdp.quantized.components import empty_on_meta, keep_rowwise_only
from te_fsdp.records import binding_of, first_owners, is_replicated, plan_of, require_model
from te_fsdp.shard_info import shard_info
from te_fsdp.sharded_model import get_sharded_model
from te_fsdp.upstream import te as _te, torch_dtensor as _torch
from te_fsdp.upstream.te_formats import Format


@dataclass(frozen=True)
class Row:
    """One parameter on this rank, or the weights (or biases) of all experts of one ``GroupedLinear``."""

    name: str  #: FQN; for experts ``<module>.weight``, for any number of parameters
    #: Original shape, unsharded and without tp; for experts (experts, ...), with the experts of other ranks.
    shape: tuple[int, ...]
    layout: str  #: ``plain``, ``stacked(...)`` or ``grouped``
    #: Axis name -> placement, for example ``dp_shard:_S(0, 2) tp:S(0)``; ``-`` for a plain tensor.
    placements: str
    local_shape: tuple[int, ...]  #: Shape of this rank's shard
    dtype: str  #: Format of a quantized weight with its nominal dtype, or the dtype
    bytes: int  #: Bytes of this rank's shard, with scales and transposes of quantized weights; 0 on meta
    #: Whether it is replicated over data parallel; the sharded dim of a quantized weight if it is not FSDP2's default;
    #: the experts of this rank; otherwise empty.
    note: str = ""


@dataclass(frozen=True)
class Report:
    """Table of a model's parameters; iterate over :attr:`rows`, or print it."""

    rows: tuple[Row, ...]  #: One per parameter, or per module's experts
    #: Further memory on this rank due to the model's precision policy: its use, and bytes.
    costs: tuple[tuple[str, int], ...] = ()
    #: How units are all-gathered (``"copy_engine"``, or a different transport with the reason), and their names.
    transports: tuple[tuple[str, tuple[str, ...]], ...] = ()
    #: Bytes of this rank's memory that other ranks read in copy-engine all-gathers: shards that are stored there, and
    #: buffers for shards that are copied there first. On a GPU it is not counted by torch's allocator.
    shared_bytes: int = 0
    #: With ``zero_copy_gradients``: the reason why gradients are copied before their reduction (empty if they are
    #: not), and the names of the large parameters.
    gradients: tuple[tuple[str, tuple[str, ...]], ...] = ()
    checks: str = ""  #: Level of checks of a sharded model (docs/checks.md)
    #: Lines of features about the training so far, for example that the host sets the pace (docs/fast.md).
    remarks: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def total_bytes(self) -> int:
        """Return the bytes of all parameters on this rank."""
        return sum(row.bytes for row in self.rows)

    def __str__(self) -> str:
        """Return the table, as wide as the terminal; without a terminal, as wide as the longest names need."""
        from rich.console import Console
        from rich.table import Table

        table = Table(title="parameters on this rank", title_justify="left")
        for header in ("name", "shape", "sharding", "local shape", "format"):
            table.add_column(header, overflow="fold")
        table.add_column("bytes", justify="right", no_wrap=True)
        noted = any(row.note for row in self.rows)
        if noted:
            table.add_column("note", overflow="fold")
        for row in self.rows:
            cells = (_dims(row.shape), _sharding(row), _dims(row.local_shape), row.dtype, f"{row.bytes:,}")
            table.add_row(row.name, *cells, *([row.note] if noted else []))
        table.add_section()
        sums = [(f"{len(self.rows)} parameters", self.total_bytes), *self.costs]
        sums += [("memory that other ranks read", self.shared_bytes)] if self.shared_bytes else []
        for words, size in sums:
            table.add_row(words, *[""] * 4, f"{size:,}")
        out = io.StringIO()
        width = shutil.get_terminal_size((120, 24)).columns if sys.stdout.isatty() else 1000
        # Names may contain brackets or colons, which rich would read as markup and emoji. In a notebook rich would
        # display the table instead of writing it to the file.
        console = Console(
            file=out, width=max(width, 80), color_system=None, markup=False, emoji=False, force_jupyter=False
        )
        console.print(table)
        lines = [line.rstrip() for line in out.getvalue().splitlines()]
        lines += [text for mark, text in _LEGEND.items() if any(mark in _sharding(row) for row in self.rows)]
        lines += [_describe_several("gathers", "units", units, words) for words, units in self.transports]
        for why, names in self.gradients:
            words = f"copied: {why}" if why else "reduced without a copy"
            lines.append(_describe_several("gradients", "large parameters", names, words))
        if self.checks not in ("", DEFAULT):
            lines.append(f"checks: {self.checks}")
        lines += self.remarks
        return "\n".join(lines)


#: Mark in the column "sharding" -> its explanation below the table.
_LEGEND = {
    ":S(": "S(n): sharded along dim n, over tp before dp_shard. R: replicated.",
    "*": "*: stacked blocks (gate and up; query, key and value), each of which tp shards.",
}


def _sharding(row: Row) -> str:
    """Return the placements of a row as text: without split factors, stacked layouts marked."""
    text = re.sub(r"_S\((\d+), \d+\)", r"S(\1)", row.placements)
    return f"{text} *" if row.layout.startswith("stacked") and "tp:S" in text else text


def report(model: nn.Module) -> Report:
    """Return a table of every parameter of a model as this rank stores it, at any stage.

    Local operation; reads no values.
    """
    require_model(model, "report(model)")
    return describe(model)


def describe(model: nn.Module, *, settled: bool = False) -> Report:
    """Return :func:`report`'s table; with ``settled``, meta parameters are described as they will be during training.

    Meta parameters are then quantized, with the bytes that remain after the first all-gather. Local operation; reads
    no values.
    """
    rows, seen = [], set()
    for prefix, module in model.named_modules():
        experts: dict[str, list[Row]] = {}
        for name, parameter in module._parameters.items():
            # A tied parameter is reported once, because it has memory once.
            if parameter is None or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            row = _row(f"{prefix}.{name}" if prefix else name, module, name, parameter, settled)
            if _te.kind_of(module) == "GroupedLinear" and expert_index(name) is not None:
                experts.setdefault(row.name.rstrip("0123456789"), []).append(row)
            else:
                rows.append(row)
        rows += [_as_grouped_tensor(label, module, parts) for label, parts in experts.items()]
    state = get_sharded_model(model)
    if state is None:
        return Report(tuple(rows))
    transports = transports_of(state)
    gathers = {name: str(transport) for name, transport in transports.by_unit.items()}
    costs = _costs_of(model) if state.precision is not None else ()
    copied, level = _group_by_value(transports.copied), state.checks.level
    remarks = tuple(filter(None, (line() for line in state.components.report_line)))
    return Report(
        tuple(rows), costs, _group_by_value(gathers), transports.shared_bytes, copied, level, remarks
    )


def _row(label: str, module: nn.Module, name: str, parameter: torch.Tensor, settled: bool) -> Row:
    """Return the row of a module's direct parameter, as :func:`describe` reports it. Local operation."""
    local, binding = _torch.local_of(parameter), binding_of(module)
    rule = None if binding is None else binding.rules.get(name)
    # Planning reports the memory of training, in which the parameter is no longer on meta.
    if settled and local.is_meta:
        local = shard_in_training(module, name, parameter)
    dtype = str(parameter.dtype).removeprefix("torch.")
    fmt = _te.format_of(local)
    if fmt is not None:
        dtype = f"{fmt} ({dtype})"
    elif (quantizer := _te.weight_quantizer(module, name)) is not None:
        fmt = _te.format_of_quantizer(quantizer)
        dtype = f"{dtype}, will be {fmt}"
    is_empty = local.is_meta and not settled
    return Row(
        label,
        tuple(parameter.shape),
        "plain" if rule is None else str(rule.layout),
        _placements(parameter),
        tuple(_torch.local_of(parameter).shape),
        f"{dtype}, on meta" if is_empty else dtype,
        0 if is_empty else bytes_of(local),
        _note(module, name, parameter, fmt),
    )


def _group_by_value(texts: dict[str, str]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Return (value, names with that value) pairs."""
    names: dict[str, list[str]] = {}
    for name, text in texts.items():
        names.setdefault(text, []).append(name)
    return tuple((text, tuple(of)) for text, of in names.items())


def _describe_several(subject: str, kind: str, names: tuple[str, ...], words: str) -> str:
    first = names[0] or "the root"
    return f"{subject} of {first if len(names) == 1 else f'{len(names)} {kind} ({first}, ...)'}: {words}"


def _as_grouped_tensor(label: str, module: nn.Module, parts: list[Row]) -> Row:
    """Merge the rows of a layer's experts into one row, with a leading dim of experts, as in a checkpoint."""
    binding = binding_of(module)
    experts = binding.experts if binding is not None else None
    first = parts[0]
    parameter = module._parameters[first.name.rpartition(".")[2]]
    assert parameter is not None
    notes = [f"experts {experts.first} to {experts.first + experts.count - 1}"] if experts is not None else []
    return Row(
        label,
        (experts.total if experts is not None else len(parts), *first.shape),
        "grouped",
        _placements(parameter, ep=experts is not None, shift=1),
        (len(parts), *first.local_shape),
        ", ".join(dict.fromkeys(part.dtype for part in parts)),
        sum(part.bytes for part in parts),
        ", ".join([*notes, *dict.fromkeys(part.note for part in parts if part.note)]),
    )


def shard_in_training(module: nn.Module, name: str, parameter: torch.Tensor) -> torch.Tensor:
    """Return the local tensor of a meta parameter as it is in training, without unused columnwise data. Local."""
    local, quantizer = _torch.local_of(parameter), _te.weight_quantizer(module, name)
    if quantizer is None:
        return local
    shard, plan = empty_on_meta(quantizer, local.shape, parameter.dtype), plan_of(parameter)
    if plan is not None and not plan.storage.is_replicated and local.ndim == 2:
        keep_rowwise_only(shard)
    return shard


def _note(module: nn.Module, name: str, parameter: torch.Tensor, fmt: Format | None) -> str:
    """Return a note about unusual sharding: none, columns instead of rows, or shards of different sizes."""
    if is_replicated(module, name):
        return "no_shard: replicated on all data-parallel ranks"
    binding = binding_of(module)
    rule = binding.rules.get(name) if binding is not None else None
    grouped = rule is not None and rule.layout.is_grouped
    if (fmt is None and not grouped) or not isinstance(parameter, DTensor):
        return ""
    info = shard_info(module, name, parameter)
    dim, ranks = info.coordinates.fsdp_dim, info.coordinates.fsdp_size
    length = info.original_shape[dim] // (info.coordinates.tp_size if info.rule.shard_dim == dim else 1)
    if grouped:
        low, high = chunk_range(info.original_shape[0], info.coordinates.ep_size, info.coordinates.ep_rank)
        length = high - low if dim == 0 else length
        if ranks > 1 and dim != 0:
            return f"sharded along dim {dim}: {high - low} experts do not divide among {ranks} ranks"
    if ranks > 1 and dim != 0:
        return f"sharded along dim {dim}: dim 0 does not divide into {fmt} blocks for {ranks} ranks"
    if length % ranks == 0:
        return ""
    sizes = [high - low for low, high in (chunk_range(length, ranks, rank) for rank in range(ranks))]
    counts = ", ".join(f"{sizes.count(size)} ranks of {size}" for size in dict.fromkeys(sizes))
    return f"uneven {'experts' if grouped else 'rows'}: {counts}"


def _placements(parameter: torch.Tensor, *, ep: bool = False, shift: int = 0) -> str:
    """Return the placement on each axis; ``shift`` dims are added in front, the first of which ``ep`` shards."""
    by_axis: list[tuple[str, str]] = []
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        names = mesh.mesh_dim_names or tuple(str(i) for i in range(mesh.ndim))
        placements = [str(_torch.shifted(p, shift)) for p in parameter.placements]
        by_axis = list(zip(names, placements, strict=True))
    if ep:
        by_axis.insert(len(by_axis) - any(axis == "tp" for axis, _ in by_axis), ("ep", str(Shard(0))))
    return " ".join(f"{axis}:{placement}" for axis, placement in by_axis) or "-"


def bytes_of(local: torch.Tensor) -> int:
    """Return the bytes of a local tensor, with all buffers of a quantized tensor. Local operation."""
    if _te.is_quantized(local):
        return sum(b.numel() * b.element_size() for b in _te.buffers_of(local))
    return local.numel() * local.element_size()


def _dims(shape: tuple[int, ...]) -> str:
    return " x ".join(str(s) for s in shape) or "scalar"


# ------------------------------------------------------------------------------------------------------------ costs


@dataclass(frozen=True)
class Cost:
    """Bytes on this rank that training a parameter needs in addition to its own; 0 without ``requires_grad``."""

    #: Bytes of its reduced gradient, between the last backward of a step and ``zero_grad``.
    gradient: int = 0
    #: Bytes of its gradient during accumulation without reduction: unsharded over data parallel.
    unreduced: int = 0
    main: int = 0  #: Bytes of its main weight in the optimizer's state, if it is quantized
    dtype: torch.dtype | None = None  #: Dtype of the gradient; ``None`` without ``requires_grad``


def _costs_of(model: nn.Module) -> tuple[tuple[str, int], ...]:
    """Return the further memory due to a model's policy on this rank: (use, bytes) pairs. Local operation."""
    costs: Counter[str] = Counter()
    for owner in first_owners(model).values():
        cost = cost_of(owner.parameter, _te.weight_quantizer(owner.module, owner.name) is not None)
        dtype = str(cost.dtype).removeprefix("torch.")
        costs[f"gradients, {dtype}"] += cost.gradient
        costs[f"unreduced gradients during accumulation, {dtype}"] += cost.unreduced
        costs["main weights in the optimizer, float32"] += cost.main
    return tuple((words, size) for words, size in sorted(costs.items()) if size)


def cost_of(parameter: torch.Tensor, quantized: bool) -> Cost:
    """Return the memory to train one parameter of a model with a precision policy, on meta or not. Local operation.

    ``quantized``: whether the parameter is, or will be, quantized.
    """
    if not (parameter.requires_grad and parameter.is_floating_point()):
        return Cost()
    dtype, elements = gradient_dtype(parameter), _torch.local_of(parameter).numel()
    unsharded = elements
    if isinstance(parameter, DTensor):
        unsharded, mesh = parameter.numel(), parameter.device_mesh
        names = mesh.mesh_dim_names or ("",) * mesh.ndim
        for axis, placement in enumerate(parameter.placements):
            # FSDP2 shards parameters over dp_shard, and reduced gradients, too.
            if _torch.shard_dim_of(placement) is not None and names[axis] != "dp_shard":
                unsharded //= mesh.size(axis)
    main = elements * 4 if quantized or _te.is_quantized(_torch.local_of(parameter)) else 0
    return Cost(elements * dtype.itemsize, unsharded * dtype.itemsize, main, dtype)
