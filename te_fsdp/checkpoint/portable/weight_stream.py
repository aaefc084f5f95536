"""Stream of a sharded model's weights under Hugging Face's names, to iterate over or into a folder."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial, reduce
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast, get_args

import torch
from torch import nn
from torch.optim import Optimizer

from te_fsdp.checkpoint.directory import new_directory
from te_fsdp.checkpoint.host_memory import batches
from te_fsdp.checkpoint.lazy_tensors import Lazy, assign_files, total_bytes, write_header, write_index
from te_fsdp.checkpoint.model_state import owned_parameters, tied_names
from te_fsdp.checkpoint.portable.huggingface_config import write_config
from te_fsdp.checkpoint.portable.huggingface_map import Group, WeightMap
from te_fsdp.checkpoint.portable.huggingface_model import TeBlocks, TeNames, describe_model
from te_fsdp.checkpoint.portable.weight_transfer import (
    BLOCK,
    block_shares,
    check_fits,
    check_model,
    checksums_of,
    make_plan,
    quantization_config,
    quantize_blocks,
    repack,
    require_same_model,
    scale_name,
    shares_of,
)
from te_fsdp.checkpoint.shard_files import sync
from te_fsdp.checkpoint.storage import absolute
from te_fsdp.collectives.agreement import all_agree, from_rank_0, gather, rank, result_of, world_size
from te_fsdp.collectives.rendezvous import collective_call
from te_fsdp.errors import CheckpointError, OrderError, shorten
from te_fsdp.upstream.torch_dtensor import versions_of
from te_fsdp.upstream.torch_mixed_lists import foreach_writes

#: Least bytes of a file that is started only to let more ranks write at once.
_SMALLEST_FILE = 256 << 20
#: Limit in bytes of a rank's allocations on its device, except for a larger group.
_BUCKET_BYTES = 256 << 20
_MAX_FILE_BYTES = 5 * 10**9

WeightFormat: TypeAlias = Literal["native", "bf16", "fp8-block"]


def iter_weights(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    config: Any,
    names: TeNames | None = None,
    blocks: TeBlocks | None = None,
    format: WeightFormat = "native",
    receiver: int | Sequence[int] | None = None,
    bucket_bytes: int = 1 << 30,
    since: WeightStream | None = None,
) -> WeightStream:
    """Iterate over a model's weights as the Hugging Face model's tensors: pairs of a name and an unsharded tensor.

    The result is an iterator. It is collective over the world: iterate on all ranks, to the end, between steps. Each
    bucket is one broadcast from each rank that stores a part of it (one send if ``receiver`` is given), over the
    default process group on the model's device.

    Args:
        model: Sharded on any mesh or not sharded, quantized or not.
        optimizer: If it keeps main weights, values come from them, rounded once.
        config: As for :func:`te_fsdp.checkpoint.save_huggingface`; so are ``names`` and ``blocks``.
        names: Names of the model's parts.
        blocks: Options of the layers that the model does not record.
        format: ``"native"`` keeps each parameter's high-precision dtype. ``"bf16"`` converts to bf16. ``"fp8-block"``
            yields ``weight`` in float8_e4m3fn and ``weight_scale_inv`` in fp32, one per 128 x 128 block, for the
            linear layers, and bf16 for all else. Weights under ``Float8BlockScaling`` keep their bytes and scales
            if blocks fit; other weights are quantized once.
        receiver: Global rank that receives the tensors; the others get ``None`` for each. Several ranks receive one
            bucket each in turn. ``None``: all ranks receive all tensors.
        bucket_bytes: Limit in bytes of a receiver's allocations beyond training's memory. A group of weights that
            are converted together (query, key and value of a layer) may exceed it.
        since: A stream of the same model and format that has ended: yield only weights that changed after it.

    Raises:
        CheckpointError: An option that is not supported or differs between ranks, a model that ``config`` does not
            describe, ranks that do not store every element. The same on all ranks, before the first tensor.
        OrderError: ``optimizer`` has parameters that are not the model's, ``since`` has not ended, or weights are
            written to before the last bucket (on all ranks, at the next one).
    """
    with collective_call("huggingface.iter_weights"):
        options = (config, names, blocks, format, receiver, bucket_bytes, since)
        stream = all_agree(lambda: WeightStream(model, optimizer, *options))
        _compare_options(format=format, receiver=receiver, bucket_bytes=bucket_bytes, since=since is not None)
        stream.start()
    return stream


class WeightStream(Iterator[tuple[str, "torch.Tensor | None"]]):
    """Iterator of :func:`iter_weights`; pass it as ``since=`` to a later call once it has ended."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        config: Any,
        names: TeNames | None,
        blocks: TeBlocks | None,
        format: WeightFormat = "native",
        receiver: int | Sequence[int] | None = None,
        bucket_bytes: int = _BUCKET_BYTES,
        since: WeightStream | None = None,
        *,
        dtype: torch.dtype | None = None,
        comparable: bool = True,
    ) -> None:
        """See :func:`iter_weights`; ``dtype`` of format ``"native"``; only ``comparable`` streams work as ``since``."""
        _check_options(format, receiver, bucket_bytes, since)
        self._dtype, self._comparable = dtype if format == "native" else torch.bfloat16, comparable
        self.format, self.bucket_bytes, self.since = format, bucket_bytes, since
        #: Receivers of the buckets in turn; empty: all ranks receive each bucket.
        self.receivers = [receiver] if isinstance(receiver, int) else list(receiver or ())
        #: Checksums of the pieces that this rank stores, by tensor, which ``since`` compares.
        self.checksums: dict[str, list[list[int]]] = {}
        self.ended = False
        check_model("iter_weights", model, optimizer)
        self.weights = WeightMap.build(config, blocks, names, describe_model(model))
        check_fits("save_huggingface", model, self.weights, [])
        self._shares, names_in_map = shares_of(model, optimizer), self.weights.shapes(te=True)
        for name, first in tied_names(model).items():  # under the name that the map has
            if first in self._shares and first not in names_in_map and name in names_in_map:
                self._shares[name] = self._shares.pop(first)
        self._owned = owned = owned_parameters(model)
        foreach_writes().count(self)
        self._versions = versions_of(tensor.parameter for tensor in owned)
        if format == "fp8-block":
            if self.weights.architecture.style == "gpt2":
                raise CheckpointError(
                    "iter_weights: format='fp8-block' of a GPT-2 model",
                    expected="a model whose projections are nn.Linear",
                    why="GPT-2 stores them transposed, and no inference engine reads them in FP8",
                    fix="use format='bf16'",
                )
            for tensor in owned:
                self._shares |= block_shares(tensor)
        self._device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._tensors: Iterator[tuple[str, torch.Tensor | None]] = iter(())

    def start(self) -> None:
        """Agree on the plan and on the groups to send. Collective over the world."""
        self._plan = make_plan(self._shares, self.weights)
        #: Shape and dtype of each tensor of the model, by name, in order.
        self.tensors = all_agree(self._describe)
        require_same_model("iter_weights", [(n, t.shape, t.dtype) for n, t in self.tensors.items()])
        pieces = self._plan.own

        def sums() -> dict[str, list[list[int]]]:
            for group in self.weights.groups:
                for name, piece in ((n, piece) for n in group.zeros for piece in pieces.get(n, ())):
                    group.check_zeros({name: piece.on_device()})
            compared = pieces.items() if self._comparable else ()
            return {n: [checksums_of(piece, self.bucket_bytes) for piece in own] for n, own in compared}

        # Also without ``since``: this stream may be the ``since`` of a later call.
        self.checksums = all_agree(sums)
        self._groups = list(self.weights.groups)
        if self.since is not None:
            before = self.since.checksums
            own_changes = {name for name, sums in self.checksums.items() if sums != before.get(name)}
            # A group is sent if any rank has changed a part of it, so all ranks need one list.
            changed = set[str]().union(*gather(own_changes))
            self._groups = [g for g in self._groups if changed.intersection(self._plan.tensors_of(g))]
        # Half of the limit for the assembled tensors, half for a message, or for a group's converted tensors.
        self.buckets = [*batches(self._groups, self._bytes, self.bucket_bytes // 2)]
        self._tensors = self._run()

    def send_to(self, ranks: Mapping[str, int]) -> None:
        """Choose the receiver of each tensor, the same for all tensors of a group. The receivers take turns.

        No bucket is larger than the largest group. Call it before the first tensor, on all ranks with the same
        argument. Local operation.
        """
        limit = min(self.bucket_bytes // 2, max(map(self._bytes, self._groups), default=0))
        queues: dict[int, list[Group]] = {}
        for group in self._groups:
            queues.setdefault(ranks[self.names_of(group)[0]], []).append(group)
        buckets = (
            [(rank_, bucket) for bucket in batches(own, self._bytes, limit)] for rank_, own in queues.items()
        )
        # In turns, so that one rank writes its bucket while the next one receives.
        turns = [names for turn in zip_longest(*buckets) for names in turn if names is not None]
        self.receivers, self.buckets = [rank_ for rank_, _ in turns], [bucket for _, bucket in turns]

    def _describe(self) -> dict[str, Lazy]:
        """Return shapes and dtypes of the tensors; raise CheckpointError for a model that does not fit the map."""
        # Only shapes and dtypes are needed, so nothing is ever read.
        described = partial(Lazy, read=cast("Any", None))
        parameters = {name: share for name, share in self._plan.described.items() if not share.is_component}
        shapes = {name: described(share.shape, share.dtype) for name, share in parameters.items()}
        # The map checks names and shapes of tensors that are never read here.
        plain, result = self.weights.lazily(shapes, to_te=False, dtype=self._dtype), {}
        for group in self.weights.groups:
            for name in group.names(te=False, tied=False):
                result[name] = plain[name]
                if self._is_fp8(group):
                    shape = tuple(-(-size // BLOCK) for size in plain[name].shape)
                    result[name] = described(plain[name].shape, torch.float8_e4m3fn)
                    result[scale_name(name)] = described(shape, torch.float32)
        return result

    def _is_fp8(self, group: Group) -> bool:
        return self.format == "fp8-block" and self.weights.is_linear(group)

    def __next__(self) -> tuple[str, torch.Tensor | None]:
        """Return the next name and tensor; ``None`` for a tensor that another rank receives."""
        return next(self._tensors)

    def names_of(self, group: Group) -> list[str]:
        """Return the names under which a group's tensors are yielded."""
        named = (str, scale_name) if self._is_fp8(group) else (str,)
        return [rename(name) for name in group.names(te=False, tied=False) for rename in named]

    def _bytes(self, group: Group) -> int:
        return sum(self._plan.described[name].bytes for name in self._plan.tensors_of(group))

    @torch.no_grad()
    def _run(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Yield the tensors of each bucket. Collective over the world.

        An error of one rank is raised on all ranks at the next bucket, because they wait for each other there.
        """
        plan, failed = self._plan, None
        for number, groups in enumerate(self.buckets):
            failed = failed or self._written()
            receiver = self.receivers[number % len(self.receivers)] if self.receivers else None
            receives = receiver in (None, rank())
            names = [name for group in groups for name in plan.tensors_of(group)]
            tensors = plan.assemble(names, self._device, receiver, failed)
            for group in groups:
                # Popped, so that the memory of a group is free once its tensors are yielded.
                own = {name: tensors.pop(name) for name in plan.tensors_of(group)} if receives else {}
                remaining = self.names_of(group)
                try:
                    for name, tensor in self._converted(group, own) if receives else ():
                        yield name, tensor
                        remaining.remove(name)
                        del tensor
                except Exception as error:
                    failed = failed or error
                del own
                yield from ((name, None) for name in remaining)
        all_agree(lambda: result_of(None, failed))
        # Without a reference to the previous stream: a chain of streams would keep all their checksums.
        self.since, self.ended = None, True

    def _written(self) -> OrderError | None:
        """Return the error of a stream whose weights were written to since its start. Local operation."""
        versions = versions_of(tensor.parameter for tensor in self._owned)
        triples = zip(self._owned, versions, self._versions, strict=True)
        written = [tensor.fqn for tensor, version, before in triples if version != before]
        if not written:
            return None
        return OrderError(
            f"iter_weights: {shorten(written, 3)}",
            expected="weights as they were when the stream began",
            got="a write by an optimizer's step or other code before the last bucket",
            why="The receivers would have old and new weights in one model",
            fix="iterate to the end between two steps, or call iter_weights again",
        )

    def _converted(
        self, group: Group, tensors: dict[str, torch.Tensor]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield a group's tensors under Hugging Face's names. Local operation."""
        names, is_fp8 = group.names(te=False, tied=False), self._is_fp8(group)
        if is_fp8 and self._plan.exact.issuperset(group.te.names):
            values = repack(group, {n: tensors[f"{n}:data"] for n in group.te.names}, 1)
            scales = repack(group, {n: tensors[f"{n}:scale"] for n in group.te.names}, BLOCK)
            for name in names:
                yield name, values[name].view(torch.float8_e4m3fn)
                yield scale_name(name), scales[name]
            return
        # FP8 is computed from the most precise values, so these are not rounded to bf16 before.
        kinds = [tensor.dtype for name, tensor in tensors.items() if name not in group.zeros]
        dtype = reduce(torch.promote_types, kinds) if is_fp8 else self.tensors[names[0]].dtype
        converted = self.weights.convert(group, tensors, to_te=False, dtype=dtype)
        for name in names:
            tensor = converted.pop(name)
            if not is_fp8:
                yield name, tensor
                continue
            yield from zip((name, scale_name(name)), quantize_blocks(tensor), strict=True)


def _check_options(format: object, receiver: object, bucket_bytes: object, since: object) -> None:
    """Check the options of :func:`iter_weights`; raise CheckpointError otherwise. Local operation."""
    formats, most = get_args(WeightFormat), world_size()
    ranks = receiver if isinstance(receiver, Sequence) and receiver else [receiver]
    is_known = receiver is None or all(type(number) is int and 0 <= number < most for number in ranks)
    is_count = type(bucket_bytes) is int and bucket_bytes > 0
    for name, given, fits, expected in (
        ("format", format, format in formats, " or ".join(map(repr, formats))),
        ("receiver", receiver, is_known, f"None, or ranks below {most}"),
        ("bucket_bytes", bucket_bytes, is_count, "a positive byte count"),
    ):
        if not fits:
            raise CheckpointError(f"iter_weights: {name}", expected=expected, got=repr(given))
    if since is None or (isinstance(since, WeightStream) and since.ended and since.format == format):
        return
    got = type(since).__name__
    if isinstance(since, WeightStream):
        got = f"a stream of format={since.format!r}" if since.ended else "a stream that has not ended"
    raise CheckpointError(
        "iter_weights: since",
        expected=f"an earlier iter_weights(..., format={format!r}), iterated to its end",
        got=got,
        why="The earlier stream records which weights the receivers have",
        fix="keep the iterator: stream = iter_weights(...); for name, tensor in stream: ...",
    )


def _compare_options(**options: object) -> None:
    """Raise CheckpointError on all ranks if an option differs between ranks. Collective over the world."""
    by_rank = gather(options)
    if differing := [name for name in options if any(given[name] != by_rank[0][name] for given in by_rank)]:
        # Each rank would send different buckets, or wait for messages that no rank sends.
        raise CheckpointError(
            f"iter_weights: {', '.join(differing)}",
            expected="the same on all ranks",
            got=shorten([f"rank {n}: {[own[k] for k in differing]!r:.60}" for n, own in enumerate(by_rank)]),
            fix="pass equal arguments; with receiver=0 the other ranks iterate, too, and get None",
        )


# ------------------------------------------------------------------------------------------------------- folders


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
    max_file_bytes: int = _MAX_FILE_BYTES,
) -> None:
    """Write a model as a folder that ``transformers.AutoModelForCausalLM.from_pretrained`` reads, from any mesh.

    Norms, heads, activation and layouts are read from the model. The tensors are those of
    :func:`te_fsdp.huggingface.iter_weights`. Each is assembled on the device of the rank that writes its file, together
    with its group (query, key and value of a layer; gate and up; one expert). In addition to the model, a rank needs at
    most five times the bytes of the largest group, on the device and in the CPU's memory together. The folder appears
    when it is complete and on disk. Collective over the world: call on all ranks, between steps; all ranks must reach
    the folder.

    Args:
        path: The folder to make. It must not exist, or be an empty directory.
        model: Sharded or not, quantized or not.
        optimizer: If it has main weights, these are written, rounded once.
        config: A Hugging Face folder of the same model, whose tokenizer and similar files are copied; or a
            ``transformers`` configuration, or the contents of a ``config.json``.
        names: Names of the model's parts.
        blocks: Options of the layers that the model does not show, because its norms are of a custom class.
        dtype: Dtype of the files; ``None``: that of each parameter.
        max_file_bytes: Size after which a new file is started.

    Raises:
        CheckpointError: ``path`` exists; an unsupported model, or not the one that ``config`` describes; ranks that do
            not have every element; files that cannot be written. The same on all ranks, and no folder appears.
        OrderError: The optimizer has parameters that are not the model's.
    """
    with collective_call("checkpoint.save_huggingface"):
        stream = all_agree(
            lambda: WeightStream(model, optimizer, config, names, blocks, dtype=dtype, comparable=False)
        )
        _write_folder(path, stream, config, max_file_bytes)


@torch.no_grad()
def save_folder(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    config: Any,
    names: TeNames | None = None,
    blocks: TeBlocks | None = None,
    format: WeightFormat = "fp8-block",
    bucket_bytes: int = _BUCKET_BYTES,
    max_file_bytes: int = _MAX_FILE_BYTES,
) -> None:
    """Write a folder of weights for inference engines, as :func:`te_fsdp.checkpoint.save_huggingface`.

    ``config.json`` gets ``quantization_config`` for ``"fp8-block"``, as vLLM, SGLang and transformers read it. The
    arguments and errors are those of :func:`te_fsdp.checkpoint.save_huggingface`; ``format`` and ``bucket_bytes``, the
    limit in bytes of a rank's allocations on its device, are those of :func:`te_fsdp.huggingface.iter_weights`.
    """
    with collective_call("huggingface.save_folder"):
        options = (config, names, blocks, format, None, bucket_bytes)
        stream = all_agree(lambda: WeightStream(model, optimizer, *options, comparable=False))
        _write_folder(path, stream, config, max_file_bytes)


def _write_folder(path: Any, stream: WeightStream, config: Any, max_file_bytes: int) -> None:
    """Write all tensors of a stream that has not started. Collective over the world."""
    if type(max_file_bytes) is not int or max_file_bytes < 1:
        raise CheckpointError("max_file_bytes", expected="a positive byte count", got=repr(max_file_bytes))
    stream.start()
    ranks, tensors = world_size(), stream.tensors
    # More files than max_file_bytes requires, so that all ranks write, unless files would become small.
    most = min(max_file_bytes, max(_SMALLEST_FILE, -(-total_bytes(tensors) // ranks)))
    groups = (group for bucket in stream.buckets for group in bucket)
    assigned = assign_files(tensors, map(stream.names_of, groups), most)
    count = len(assigned)  # spread over the world: adjacent ranks share a host
    writers = [n * ranks // count if count <= ranks else n % ranks for n in range(count)]
    files = {file: (writer, names) for writer, (file, names) in zip(writers, assigned.items(), strict=True)}
    # Before the first tensor, because it replaces the buckets.
    stream.send_to({name: writer for writer, names in files.values() for name in names})
    with ExitStack() as stack:
        # Rank 0 alone makes the hidden folder, and renames it at the end, when all ranks have written.
        folder = from_rank_0(lambda: stack.enter_context(new_directory(absolute(path))))
        failed = _write_files(stream, folder, files)
        # After the end of the stream: a rank that cannot write still sends its parts to the others.
        all_agree(lambda: result_of(None, failed))

        def finish() -> None:
            write_index(folder, stream.tensors, {file: names for file, (_, names) in files.items()})
            is_fp8 = stream.format == "fp8-block"
            quantization = quantization_config(config, names=stream.weights.names) if is_fp8 else None
            write_config(folder, config, stream.tensors, quantization)
            stack.close()

        from_rank_0(finish)


def _write_files(
    stream: WeightStream, folder: Path, files: Mapping[str, tuple[int, Sequence[str]]]
) -> Exception | None:
    """Write the tensors that this rank receives, in a thread, while the next bucket is assembled.

    Collective over the world, also after an error of this rank, which is returned.
    """
    file_of = {name: file for file, (_, names) in files.items() for name in names}
    failed: Exception | None = None

    def append(bucket: dict[str, torch.Tensor]) -> None:
        for name, tensor in bucket.items():
            file = folder / file_of[name]
            if not file.exists():
                # The header needs only shapes. The bytes follow in its order, which is that of the stream.
                in_file = {key: stream.tensors[key] for key in files[file.name][1]}
                write_header(file, in_file, {})
            with file.open("ab") as opened:
                opened.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)

    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(lambda: None)
        for groups in stream.buckets:
            # Every rank takes all names of the bucket, with ``None`` for the tensors of others: it is collective.
            count = sum(len(stream.names_of(group)) for group in groups)
            bucket = {name: weight.cpu() for name, weight in islice(stream, count) if weight is not None}
            try:
                # At most two buckets are in the CPU's memory: the one being written, and the next.
                writing.result()
                writing = pool.submit(append, bucket)
            except Exception as error:
                failed = failed or error
            del bucket
        for _ in stream:  # its end is collective
            pass
        try:
            writing.result()
            for file, (writer, _) in files.items():
                # A file is on disk only when the host that wrote it has synced it.
                if writer == rank():
                    sync(folder / file)
        except Exception as error:
            failed = failed or error
    return failed
