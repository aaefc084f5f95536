"""Hugging Face models of Llama's and GPT-2's style as models of TransformerEngine's modules, and back.

torch's ``HuggingFaceStorageReader`` (2.11 to 2.15) fills tensors with the names and shapes of the files, without an
index or a check. Here query, key and value become one tensor, norms are shifted, and everything is checked first.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from te_fsdp.checkpoint.compare import Differences, check_whole_job, compare_model
from te_fsdp.checkpoint.directory import new_directory
from te_fsdp.checkpoint.lazy_tensors import (
    Lazy,
    assign_files,
    open_safetensors,
    total_bytes,
    write_file,
    write_folder,
    write_index,
)
from te_fsdp.checkpoint.load_source import Source
from te_fsdp.checkpoint.loading import Filling
from te_fsdp.checkpoint.manifest import Tick
from te_fsdp.checkpoint.model_state import model_state, owned_parameters, tied_names
from te_fsdp.checkpoint.named import parts_of
from te_fsdp.checkpoint.portable.huggingface_config import Architecture, read_config, write_config
from te_fsdp.checkpoint.portable.huggingface_map import Tensors, WeightMap
from te_fsdp.checkpoint.portable.huggingface_model import (
    Description,
    ModelDescription,
    Share,
    TeBlocks,
    TeNames,
    Transfer,
    arrivals,
    describe_model,
    describe_shares,
    plan_exchange,
    shares_of,
)
from te_fsdp.checkpoint.reader import Contents, describe, empty_manifest, split_experts, stack_experts
from te_fsdp.checkpoint.shard_files import no_progress, sync
from te_fsdp.checkpoint.storage import absolute
from te_fsdp.collectives.agreement import all_agree, from_rank_0, rank, rank_messenger, world_size
from te_fsdp.collectives.rendezvous import collective_call
from te_fsdp.errors import CheckpointError, shorten
from te_fsdp.features.main_weights import check_optimizer
from te_fsdp.modules.rotary import frequencies_of
from te_fsdp.modules.semantics import from_json

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

__all__ = [
    "Architecture",
    "TeBlocks",
    "TeNames",
    "WeightMap",
    "export_huggingface",
    "import_huggingface",
    "load_huggingface",
    "read_config",
    "save_huggingface",
    "values_for_huggingface",
    "write_huggingface",
]

_log = logging.getLogger("te_fsdp")
#: Least bytes of a file that is started only to let more ranks write at once.
_SMALLEST_FILE = 256 << 20


def import_huggingface(
    source: str | os.PathLike[str] | Tensors,
    *,
    config: Any = None,
    blocks: TeBlocks | None = None,
    names: TeNames | None = None,
    dtype: torch.dtype | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield names and plain CPU tensors of the unsharded TransformerEngine model for a Hugging Face model, in order.

    Local operation.

    Args:
        source: A folder with ``config.json`` and safetensors files, read group by group; or the tensors.
        config: The model's description, as for :func:`read_config`; ``None``: that of the folder.
        blocks: Options of the target's layers; default: TransformerEngine's defaults.
        names: Names of the model's parts.
        dtype: Dtype of the results; ``None`` keeps each tensor's.

    Raises:
        CheckpointError: An unsupported model; missing, unexpected or wrongly shaped tensors.
    """
    tensors, described, _ = _opened(source, config)
    weights = WeightMap.build(described, blocks, names)
    converted = weights.lazily(tensors, to_te=True, dtype=dtype)
    return ((name, tensor.whole()) for name, tensor in converted.items())


def export_huggingface(
    source: Tensors,
    target: str | os.PathLike[str] | None = None,
    *,
    config: Any = None,
    blocks: TeBlocks | None = None,
    names: TeNames | None = None,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = 5 * 10**9,
) -> None:
    """Write a Hugging Face model's folder from an unsharded TransformerEngine model's tensors. Local operation.

    :func:`save_huggingface` writes an existing model without options. ``source`` is the model's state dict, or lazy
    tensors: plain tensors of the unsharded model. One group is in memory in addition. ``blocks`` are the options of the
    layers, ``TeBlocks.of(model)``, which a state dict does not record. Other arguments are those of
    :func:`save_huggingface`. Raise CheckpointError if ``target`` exists, options are unknown, or tensors do not fit.
    """
    held, described, _ = _opened(source, config)
    weights = WeightMap.build(described, blocks, names, ModelDescription(held.keys(), {}, {}))
    tensors, place = weights.lazily(held, to_te=False, dtype=dtype), absolute(target)  # type: ignore[arg-type]
    write_huggingface(place, tensors, described, no_progress, shard_bytes=max_file_bytes)


def write_huggingface(
    target: Path, tensors: Mapping[str, Lazy], config: Any, tick: Tick, *, shard_bytes: int
) -> list[str]:
    """Write a Hugging Face model's folder, atomically. Return its files. Local operation.

    ``config`` is the model's description, or a folder with it and with a tokenizer, which is copied.
    """
    with new_directory(target, needed=total_bytes(tensors)) as temporary:
        names = write_folder(temporary, tensors, {}, tick, shard_bytes)
        return names + write_config(temporary, config, tensors)


def load_huggingface(
    source: str | os.PathLike[str] | Tensors,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    config: Any = None,
    names: TeNames | None = None,
    blocks: TeBlocks | None = None,
) -> None:
    """Load a Hugging Face model's weights into a model of TransformerEngine's modules, on any mesh, in place.

    The layers' options are read from the model. Each rank reads the data of its pieces into the CPU's memory. When all
    ranks have theirs, they are converted to the parameter's dtype, or quantized once, with the scale of the unsharded
    weight. Buffers are unchanged, main weights of optimizers follow, biases that the files lack become zero and are
    frozen. Collective over the world: call on all ranks.

    Args:
        source: As for :func:`import_huggingface`, like ``config`` and ``names``.
        model: On its device, sharded or not, quantized or not.
        optimizer: If it has main weights, those of quantized weights are made from the values that were read, also
            before its first step.
        config: The model's description; ``None``: that of the folder.
        names: Names of the model's parts.
        blocks: Options of the layers that the model does not show, because its norms are of a custom class.

    Raises:
        CheckpointError: The errors of :func:`import_huggingface`, parameters that the Hugging Face model does not have,
            layers with another function, values that cannot be read or contradict each other. The same on all ranks,
            with nothing changed.
        OrderError: An optimizer of other parameters.
    """
    with collective_call("checkpoint.load_huggingface"):
        filling, lacked = all_agree(lambda: _filling(source, model, optimizer, config, names, blocks))
        filling.run()
        for owned in owned_parameters(model):
            owned.parameter.requires_grad_(owned.parameter.requires_grad and owned.fqn not in lacked)
    for note in filling.notes if rank() == 0 else ():
        _log.warning("%s: %s", filling.source.path, note)


def _filling(
    source: str | os.PathLike[str] | Tensors,
    model: nn.Module,
    optimizer: Optimizer | None,
    config: Any,
    names: TeNames | None,
    blocks: TeBlocks | None,
) -> tuple[Filling, set[str]]:
    """Return the load of a Hugging Face model's tensors into a model that fits, and the biases that it lacks. Local."""
    if optimizer is not None:
        check_optimizer(model, optimizer)
    check_whole_job(model, None)
    (tensors, described, folder), state = _opened(source, config), model_state(model, may_cut_blocks=True)
    weights = WeightMap.build(described, blocks, names, describe_model(model))
    converted, layouts, manifest = weights.lazily(tensors, to_te=True), weights.layouts(), empty_manifest()
    manifest.parameters = {name: {**describe(t), "layout": layouts[name]} for name, t in converted.items()}
    keys = {f"model.{name}": tensor for name, tensor in converted.items()}
    contents = Contents(folder, "Hugging Face model", manifest, keys)
    stack_experts(contents)
    for name in (
        tied_names(model) if weights.architecture.tied else ()
    ):  # a checkpoint has the first name only
        manifest.parameters.pop(name, None)
    found = compare_model(manifest, state).without([*state.buffers], strict=True)
    _check_fits("load_huggingface", model, weights, found.texts())
    quantized = {name: "quantized" for name, about in state.described.items() if about["format"] is not None}
    lacked = {name for group in weights.groups for name in group.zeros}
    note = f"biases that it lacks are zero, and stay so (frozen): {shorten(sorted(lacked), 3)}"
    opened = Source(folder, manifest, contents.tensors, [note] if lacked else [])
    return Filling(opened, model, parts_of(optimizer), state, Differences(converted=quantized)), lacked


def _check_fits(call: str, model: nn.Module, weights: WeightMap, problems: list[str]) -> None:
    """Raise CheckpointError for problems of a model and its map. Local operation.

    Adds weights where tensor parallelism shards two blocks as one to ``problems``: each rank then has rows of gate and
    up that differ from the unsharded model's.
    """
    forms = [g.te for g in weights.groups if len(g.te.names) < len(g.parts) and not g.te.layout.is_stacked]
    gated = {name for form in forms if form.groups == 1 for name in form.names}
    cut = [
        owned.fqn
        for owned in owned_parameters(model)
        if (owned.fqn in gated or f"{owned.fqn}0" in gated)
        and owned.info.rule.shard_dim == int(owned.is_grouped)
        and owned.info.at.tp_size > 1
    ]
    if weights.differences:
        problems.append(f"layers that would compute something else: {shorten([*weights.differences], 20)}")
    if cut:
        what = "gate above up, cut by tensor parallelism as one block (use expert parallelism)"
        problems.append(f"{what}: {shorten(cut, 20)}")
    if problems:
        raise CheckpointError(
            f"{call}: {type(model).__name__} does not fit: {'; '.join(problems)}",
            why="Nothing was changed",
            fix="name the model's parts by TeNames, build the layers with read_config(...).te_kwargs()",
        )


@torch.no_grad()
def save_huggingface(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    config: Any,
    names: TeNames | None = None,
    blocks: TeBlocks | None = None,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = 5 * 10**9,
) -> None:
    """Write a model as a folder that ``transformers.AutoModelForCausalLM.from_pretrained`` reads, from any mesh.

    Norms, heads, activation and layouts are read from the model. Each tensor is assembled on the rank that writes its
    file, one group of tensors at a time (query, key and value of a layer; gate and up; one expert). In addition to the
    model, a rank needs at most five times the bytes of the largest group in the CPU's memory, and on its device the
    pieces of one parameter. The folder appears when it is complete and on disk. Collective over the world: call on all
    ranks, between steps; all ranks must reach the folder. Weights and small messages use te_fsdp's own Gloo process
    group.

    Args:
        path: The folder to make. It must not exist, or be an empty directory.
        model: Sharded or not, quantized or not.
        optimizer: If it has main weights, these are written, rounded once.
        config: A Hugging Face folder of the same model, whose tokenizer and similar files are copied; or a
            ``transformers`` configuration, or the contents of a ``config.json``.
        names: Names of the model's parts.
        blocks: Options of the layers that the model does not show, because its norms are of a custom class.
        dtype: Dtype of the files; ``None``: that of each parameter.
        max_file_bytes: Size after which another file is started.

    Raises:
        CheckpointError: ``path`` exists; an unsupported model, or another one than ``config`` describes; ranks that do
            not have every element; files that cannot be written. The same on all ranks, and no folder appears.
        OrderError: An optimizer of other parameters.
    """
    with collective_call("checkpoint.save_huggingface"):
        shares, weights = all_agree(lambda: shares_to_write(model, optimizer, config, names, blocks))
        saving = _Saving(shares, weights, dtype, max_file_bytes)
        described, plan = rank_messenger().round(lambda: {n: s.about for n, s in shares.items()}, saving.plan)
        with ExitStack() as stack:
            folder = from_rank_0(lambda: stack.enter_context(new_directory(absolute(path))))
            tensors, files = all_agree(lambda: saving.write(folder, described, plan))

            def finish() -> None:
                write_index(folder, tensors, files)
                write_config(folder, config, tensors)
                stack.close()

            from_rank_0(finish)


def shares_to_write(
    model: nn.Module, optimizer: Optimizer | None, config: Any, names: TeNames | None, blocks: TeBlocks | None
) -> tuple[dict[str, Share], WeightMap]:
    """Return this rank's shares of a model's parameters, and the map to Hugging Face's tensors. Local operation.

    Raises:
        CheckpointError: A model that is not supported, or that differs from ``config``.
        OrderError: ``optimizer`` holds parameters of another model.
    """
    check_whole_job(model, None)
    if optimizer is not None:
        check_optimizer(model, optimizer)
    weights = WeightMap.build(config, blocks, names, describe_model(model))
    _check_fits("save_huggingface", model, weights, [])
    shares, known = shares_of(model, optimizer), weights.shapes(te=True)
    for name, first in tied_names(model).items():  # under the name that the map has
        if first in shares and first not in known and name in known:
            shares[name] = shares.pop(first)
    return shares, weights


class _Saving(NamedTuple):
    """One rank's part of :func:`save_huggingface`."""

    shares: dict[str, Share]
    weights: WeightMap
    dtype: torch.dtype | None
    max_file_bytes: int

    def plan(self, seen: list[dict[str, Description]]) -> list[tuple[dict[str, Description], list[Transfer]]]:
        """Return the description of all tensors and the transfers, for each rank. Rank 0 alone calls this."""
        described = describe_shares(seen)
        files = self.files(self.tensors(described, iter(())))
        writers = {name: writer for writer, names in files.values() for name in names}
        queues: list[list[list[str]]] = [[] for _ in seen]
        for group in self.weights.groups:
            queue = queues[writers[group.huggingface.names[0]]]
            queue.append([name for name in group.names(te=True, tied=True) if name in described])
        return [(described, plan) for plan in plan_exchange(seen, queues)]

    def tensors(
        self, described: dict[str, Description], arriving: Iterator[tuple[str, torch.Tensor]]
    ) -> dict[str, Lazy]:
        """Return the tensors to write, from unsharded tensors that arrive in the order of reading."""

        def read(name: str, first: int, last: int) -> torch.Tensor:
            found, tensor = next(arriving)
            assert found == name
            return tensor

        source = {n: Lazy(one.shape, one.dtype, partial(read, n)) for n, one in described.items()}
        return self.weights.lazily(source, to_te=False, dtype=self.dtype)

    def files(self, tensors: Mapping[str, Lazy]) -> dict[str, tuple[int, list[str]]]:
        """Return writers and tensors by file; a group is in one file."""
        ranks = world_size()
        most = min(self.max_file_bytes, max(_SMALLEST_FILE, -(-total_bytes(tensors) // ranks)))
        files = assign_files(
            tensors, (group.names(te=False, tied=False) for group in self.weights.groups), most
        )
        count = len(files)  # spread over the world: adjacent ranks share a host
        writers = [n * ranks // count if count <= ranks else n % ranks for n in range(count)]
        return {file: (writer, names) for writer, (file, names) in zip(writers, files.items(), strict=True)}

    def write(
        self, folder: Path, described: dict[str, Description], plan: list[Transfer]
    ) -> tuple[dict[str, Lazy], dict[str, list[str]]]:
        """Write this rank's files; return all tensors, and their names by file.

        Collective over the world, also after an error.
        """
        arriving = arrivals(rank_messenger(), self.shares, described, plan)
        tensors = self.tensors(described, arriving)
        files = self.files(tensors)
        try:
            for file, (writer, names) in files.items():
                if writer == rank():
                    write_file(folder / file, {name: tensors[name] for name in names}, {}, no_progress)
                    sync(folder / file)
        finally:
            for _ in arriving:  # other ranks wait for the remaining transfers
                pass
        return tensors, {file: names for file, (_, names) in files.items()}


def values_for_huggingface(
    contents: Contents, like: Path, blocks: TeBlocks, names: TeNames
) -> dict[str, Lazy]:
    """Return a checkpoint's weights as tensors of the Hugging Face model in a folder, converted on demand. Local.

    The settings of its modules are in its manifest; ``blocks`` are options of layers that it lacks. Raise
    CheckpointError for tensors that do not fit, or layers with another function.
    """
    notes, contents = contents.notes, split_experts(contents)
    saved = {name: described.get("layout") for name, described in contents.manifest.parameters.items()}
    recorded = from_json(contents.manifest.semantics) if contents.manifest.semantics else {}
    frequencies = frequencies_of(contents.names, lambda name: contents.value(name).whole())
    weights = WeightMap.build(like, blocks, names, ModelDescription(saved, recorded, frequencies))
    if not recorded:
        notes.append("its semantics (eps, activation, window, ...) are not recorded: taken from config.json")
    wrong = [*weights.differences] + [
        f"{name} is {saved[name]}, not {layout}"
        for name, layout in weights.layouts().items()
        if saved.get(name) not in (None, layout)
    ]
    if wrong:
        raise CheckpointError(
            f"{contents.source}: another model than {like} describes: {', '.join(wrong)}",
            why="Nothing was written",
            fix="take the config.json of this model; where options were given, those of its layers",
        )
    return weights.lazily({name: contents.value(name) for name in contents.names}, to_te=False)


def _opened(source: str | os.PathLike[str] | Tensors, config: Any) -> tuple[Tensors, Any, Path]:
    """Return tensors, their description, and their folder."""
    if isinstance(source, (str, os.PathLike)):
        folder = Path(source)
        if folder.name == "config.json":  # accepted for its folder
            folder = folder.parent
        return open_safetensors(folder)[0], folder if config is None else config, folder
    if not isinstance(source, Mapping):
        fix = "model.state_dict(); of a sharded one, te_fsdp.checkpoint.save_huggingface(path, model, config=...)"
        raise CheckpointError(f"Hugging Face model: {type(source).__name__}, no tensors by name", fix=fix)
    return source, config, Path("tensors in memory")
