"""A model as a Hugging Face folder: of a state dict, of a checkpoint, or from all ranks that hold pieces of it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from te_fsdp.agree import all_agree, from_rank_0, own_ranks, rank, world_size
from te_fsdp.all_ranks import collective_call
from te_fsdp.checkpoint.directory import new_directory, sync
from te_fsdp.checkpoint.manifest import Tick, dtype_name
from te_fsdp.checkpoint.model_state import tied_names
from te_fsdp.checkpoint.portable.huggingface_config import (
    causal_lm_class,
    config_contents,
    first_given,
    read_config,
)
from te_fsdp.checkpoint.portable.huggingface_layers import TeBlocks, TeNames, parameter_names
from te_fsdp.checkpoint.portable.huggingface_map import Tensors, WeightMap
from te_fsdp.checkpoint.portable.huggingface_shares import (
    Arriving,
    Exchange,
    Plan,
    Share,
    Told,
    check_fits,
    describe_shares,
    plan_exchange,
    shares_of,
)
from te_fsdp.checkpoint.portable.lazy import Lazy, total_bytes
from te_fsdp.checkpoint.portable.safetensors import deal, write_file, write_folder, write_index
from te_fsdp.checkpoint.sums import silent
from te_fsdp.errors import CheckpointError
from te_fsdp.modules.semantics import semantics_of
from te_fsdp.sharding.optimizer import check_optimizer

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

__all__ = ["export_huggingface", "save_huggingface", "write_huggingface"]

#: Files beside the weights that a copy of a model needs.
_BESIDE = ("generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json")
_BESIDE += ("vocab.*", "merges.txt", "chat_template*", "LICENSE*")
#: Files are begun for more ranks to write at once only where each gets so many bytes.
_SMALLEST_FILE = 256 << 20


def export_huggingface(
    source: Tensors,
    target: str | os.PathLike[str],
    *,
    like: str | os.PathLike[str] | None = None,
    config: Any = None,
    blocks: TeBlocks | None = None,
    names: TeNames | None = None,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = 5 * 10**9,
    tick: Tick | None = None,
) -> None:
    """Write a Hugging Face model's folder from an unsharded TransformerEngine model's tensors. Local operation.

    Of a model that is there, :func:`save_huggingface` does it without options. Holds one group of tensors at a time
    besides ``source``. The folder appears when it is whole.

    Args:
        source: The model's state dict, or tensors yet to be read: plain tensors of the unsharded model.
        target: The folder to make; nothing may lie there yet but an empty directory.
        like: A Hugging Face folder of the same model: its ``config.json``, tokenizer and the like are copied, and
            names begin as in its files.
        config: The model's description, where there is no such folder.
        blocks: Options of the layers, ``TeBlocks.of(model)``: a state dict does not tell them.
        names: Names of the model's parts.
        dtype: Of the files; ``None`` keeps each tensor's.
        max_file_bytes: Size of a file beyond which another is begun.
        tick: Told the bytes of each block that is written.

    Raises:
        CheckpointError: Something lies at ``target``; neither ``like`` nor ``config``; options that are not known;
            what :meth:`WeightMap.lazily` raises.
    """
    described = first_given(like, config)
    if any(isinstance(tensor, DTensor) for tensor in source.values()):
        raise CheckpointError(
            "export_huggingface of a sharded model's state dict",
            expected="whole tensors of the unsharded model",
            got="DTensors",
            fix="te_fsdp.checkpoint.save_huggingface(path, model, config=...) writes it from all ranks",
        )
    weights, _ = WeightMap.of(read_config(described), source.keys(), {}, blocks, names)
    tensors = weights.like(described).lazily(source, to_te=False, dtype=dtype)
    write_huggingface(Path(os.path.abspath(target)), tensors, described, tick, shard_bytes=max_file_bytes)


def write_huggingface(
    target: Path,
    tensors: Mapping[str, Lazy],
    config: Any,
    tick: Tick | None = None,
    *,
    shard_bytes: int,
    force: bool = False,
) -> list[str]:
    """Write a Hugging Face model's folder; it appears when it is whole. Returns its files. Local operation.

    Args:
        target: The folder.
        tensors: Under Hugging Face's names.
        config: The model's description, or a folder with it and with a tokenizer, which is copied.
        tick: Told the bytes of each block that is written.
        shard_bytes: Size of a file beyond which another is begun.
        force: Replace what lies at the target.

    Raises:
        CheckpointError: Something lies at the target, or a tensor cannot be read or converted.
    """
    with new_directory(target, force=force, needed=total_bytes(tensors)) as temporary:
        names = write_folder(temporary, tensors, {}, tick or silent, shard_bytes)
        return names + _write_beside(temporary, config, tensors)


def _write_beside(folder: Path, config: Any, tensors: Mapping[str, Lazy]) -> list[str]:
    """Write ``config.json``, which tells the files' dtype, and copy what lies beside it; the files' names."""
    contents = dict(config_contents(config))
    dtypes = {dtype_name(tensor.dtype) for tensor in tensors.values()}
    if len(dtypes) == 1:
        key = "dtype" if "dtype" in contents else "torch_dtype"
        contents[key] = next(iter(dtypes))
    contents["architectures"] = contents.get("architectures") or [causal_lm_class(contents["model_type"])]
    (folder / "config.json").write_text(json.dumps(contents, indent=2, default=str) + "\n", encoding="utf-8")
    names = ["config.json"]
    beside = Path(config) if isinstance(config, (str, os.PathLike)) and Path(config).is_dir() else None
    for path in (path for pattern in _BESIDE for path in (beside.glob(pattern) if beside else ())):
        if path.is_file():
            shutil.copyfile(path, folder / path.name)
            names.append(path.name)
    return names


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

    Norms, heads, activation and how weights lie are read off the model; settings that ``config`` contradicts are
    errors. Each tensor is put together on the one rank that writes its file, a group of tensors at a time (query, key
    and value of a layer; gate and up; one expert): besides the model a rank has in the CPU's memory at most five times
    the bytes of the largest group, and on its device the pieces of one parameter. The folder appears when it is whole
    and on disk; training goes on as if nothing had been.

    Collective over the world: call on all ranks, between steps. Small messages and the weights go over a gloo group of
    te_fsdp's own (one all-to-all a group of tensors). All ranks must reach the folder.

    Args:
        path: The folder to make; nothing may lie there yet but an empty directory.
        model: Sharded or not, quantized or not.
        optimizer: If it keeps main weights, these are written, rounded once.
        config: A Hugging Face folder of the same model, whose tokenizer and the like are copied; or a ``transformers``
            configuration, or the contents of a ``config.json``.
        names: Names of the model's parts; default: those of :class:`TeNames`.
        blocks: Options of the layers where the model does not tell them, since its norms are of a class of its own.
        dtype: Of the files; ``None``: that of each parameter.
        max_file_bytes: Size of a file beyond which another is begun.

    Raises:
        CheckpointError: Something lies at ``path``; a model that is not supported, or another than ``config`` says;
            ranks that do not hold every element; files that cannot be written. The same on all ranks, and nothing
            appears.
        OrderError: An optimizer of other parameters.
    """
    target = Path(os.path.abspath(path))

    with collective_call("checkpoint.save_huggingface"):
        saving = all_agree(lambda: _Saving.of(model, optimizer, config, names, blocks, dtype, max_file_bytes))
        told, plan = own_ranks().round(
            lambda: {name: share.told for name, share in saving.shares.items()}, saving.plan
        )
        with ExitStack() as stack:
            folder = Path(from_rank_0(lambda: str(stack.enter_context(new_directory(target)))))
            tensors = all_agree(lambda: saving.write(folder, told, plan))

            def finish() -> None:
                write_index(folder, tensors, saving.files(tensors))
                _write_beside(folder, config, tensors)
                stack.close()

            from_rank_0(finish)


@dataclass
class _Saving:
    """One rank's part of :func:`save_huggingface`."""

    weights: WeightMap
    shares: dict[str, Share]
    dtype: torch.dtype | None
    max_file_bytes: int

    @classmethod
    def of(
        cls,
        model: nn.Module,
        optimizer: Optimizer | None,
        config: Any,
        names: TeNames | None,
        blocks: TeBlocks | None,
        *options: Any,
    ) -> _Saving:
        """Look at the model. Local operation."""
        if optimizer is not None:
            check_optimizer(model, optimizer)
        weights, wrong = WeightMap.of(config, parameter_names(model), semantics_of(model), blocks, names)
        check_fits("save_huggingface", model, weights, {"layers that would compute something else": wrong})
        shares = shares_of(model, optimizer)
        known = weights.shapes(te=True)
        for name, first in tied_names(model).items():  # whichever of a tied weight's names the map knows
            if first in shares and first not in known and name in known:
                shares[name] = shares.pop(first)
        return cls(weights.like(config), shares, *options)

    def plan(self, seen: list[dict[str, Told]]) -> list[tuple[dict[str, Told], Plan]]:
        """For each rank what it needs to know of all, and what it does."""
        told = describe_shares(seen)
        files = self.files(self.tensors(told, None)).values()
        writers = {name: _writer(n, len(files), len(seen)) for n, names in enumerate(files) for name in names}
        queues: list[list[list[str]]] = [[] for _ in seen]
        for batch in self.weights.batches(to_te=False):
            queue = queues[writers[batch[0].written(to_te=False)[0]]]
            queue.append([name for group in batch for name in group.te.names if name in told])
        return [(told, plan) for plan in plan_exchange(seen, queues)]

    def tensors(self, told: dict[str, Told], exchange: Exchange | None) -> dict[str, Lazy]:
        """What is written, of tensors that come over an exchange, or that are only described."""
        source = {name: Arriving(name, one.shape, one.dtype, exchange) for name, one in told.items()}
        return self.weights.lazily(source, to_te=False, dtype=self.dtype)

    def files(self, tensors: Mapping[str, Lazy]) -> dict[str, list[str]]:
        """Tensors by file; what is read together is in one."""
        most = min(self.max_file_bytes, max(_SMALLEST_FILE, -(-total_bytes(tensors) // world_size())))
        together = (batch[0].written(to_te=False) for batch in self.weights.batches(to_te=False))
        return deal(tensors, together, most)

    def write(self, folder: Path, told: dict[str, Told], plan: Plan) -> dict[str, Lazy]:
        """Write this rank's files. Collective over the world, even on a rank that fails."""
        exchange = Exchange(own_ranks(), self.shares, told, plan)
        tensors = self.tensors(told, exchange)
        files = self.files(tensors)
        try:
            for n, (file, names) in enumerate(files.items()):
                if _writer(n, len(files), world_size()) == rank():
                    write_file(folder / file, {name: tensors[name] for name in names}, {}, silent)
                    sync(folder / file)
        finally:
            exchange.drain()
        return tensors


def _writer(file: int, files: int, ranks: int) -> int:
    """The rank that writes a file: spread over the world, whose neighbours share a host."""
    return file * ranks // files if files <= ranks else file % ranks
