"""Stream of a sharded model's weights under Hugging Face's names."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import torch
from torch import nn

from te_fsdp.checkpoint.async_save import batches
from te_fsdp.checkpoint.lazy_tensors import Lazy
from te_fsdp.checkpoint.model_state import owned_parameters
from te_fsdp.checkpoint.portable.fp8_blocks import (
    BLOCK,
    block_shares,
    is_linear,
    quantize_blocks,
    repack,
    scale_name,
)
from te_fsdp.checkpoint.portable.huggingface_map import ROUNDED, Group
from te_fsdp.checkpoint.portable.huggingface_model import Share, TeBlocks, TeNames, given_or_default
from te_fsdp.checkpoint.portable.weight_transfer import (
    TransferPlan,
    assemble,
    checksums_of,
    make_plan,
    raise_error,
    shares_to_write,
    tensors_of,
)
from te_fsdp.collectives.agreement import all_agree, gather, rank, world_size
from te_fsdp.collectives.rendezvous import collective_call
from te_fsdp.errors import CheckpointError, OrderError, require_kind, shorten
from te_fsdp.upstream.torch_dtensor import versions_of

if TYPE_CHECKING:
    from torch.optim import Optimizer

_log = logging.getLogger("te_fsdp")

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
    bucket is one broadcast from each rank that stores a part of it (one send where ``receiver`` is given), over the
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
            where blocks fit; other weights are quantized once.
        receiver: Global rank that receives the tensors; the others get ``None`` for each. Several ranks receive one
            bucket each in turn. ``None``: all ranks receive all tensors.
        bucket_bytes: Limit in bytes of what a receiver allocates beyond training's memory. A group of weights that
            are converted together (query, key and value of a layer) may exceed it.
        since: A stream of the same model and format that has ended: yield only weights that changed after it.

    Raises:
        CheckpointError: An option that is not supported or differs between ranks, a model that ``config`` does not
            describe, ranks that do not store every element. The same on all ranks, before the first tensor.
        OrderError: ``optimizer`` holds parameters of another model, ``since`` has not ended, or weights are written to
            before the last bucket (on all ranks, at the next one).
    """
    with collective_call("huggingface.iter_weights"):
        stream = all_agree(
            lambda: WeightStream(
                model, optimizer, config, names, blocks, format, receiver, bucket_bytes, since
            )
        )
        options = (format, receiver, bucket_bytes, since is not None)
        _compare_options(dict(zip(("format", "receiver", "bucket_bytes", "since"), options, strict=True)))
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
        format: WeightFormat,
        receiver: int | Sequence[int] | None,
        bucket_bytes: int,
        since: WeightStream | None,
        *,
        dtype: torch.dtype | None = None,
        comparable: bool = True,
    ) -> None:
        """See :func:`iter_weights`.

        ``dtype`` is that of the tensors in the format ``"native"``. Only ``comparable`` streams work as ``since``.
        """
        require_kind("iter_weights", "model", model, nn.Module, expected="a model", error=CheckpointError)
        _check_options(format, receiver, bucket_bytes, since)
        self._dtype, self._comparable = dtype if format == "native" else torch.bfloat16, comparable
        self.format, self.bucket_bytes, self.since = format, bucket_bytes, since
        #: Receivers of the buckets in turn; empty: all ranks receive each bucket.
        self.receivers = [receiver] if isinstance(receiver, int) else list(receiver or ())
        self.names = given_or_default(names, TeNames)
        #: Checksums of the pieces that this rank stores, by tensor: what ``since`` compares.
        self.checksums: dict[str, list[list[int]]] = {}
        self.ended = self._warned = False
        self._shares, self._weights = shares_to_write(model, optimizer, config, names, blocks)
        self._exact: dict[str, dict[str, Share]] = {}
        self._owned = owned = owned_parameters(model)
        self._versions = versions_of(one.parameter for one in owned)
        if format == "fp8-block":
            if self._weights.architecture.style == "gpt2":
                raise CheckpointError(
                    "iter_weights: format='fp8-block' of a GPT-2 model",
                    expected="a model whose projections are nn.Linear",
                    why="GPT-2 stores them transposed, and no inference engine reads them in FP8",
                    fix="format='bf16'",
                )
            found = {owned.fqn: block_shares(owned) for owned in owned}
            self._exact = {name: shares for name, shares in found.items() if shares}
        self._device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._tensors: Iterator[tuple[str, torch.Tensor | None]] = iter(())

    def start(self) -> None:
        """Agree on the plan and on the groups to send. Collective over the world."""
        self._plan = make_plan(self._shares, self._exact, self._weights, self.names)
        #: Shape and dtype of each tensor of the model, by name, in order.
        self.tensors = self._describe()
        held = {name: pieces for name, pieces in self._plan.own.items() if name in self._plan.described}

        def sums() -> dict[str, list[list[int]]]:
            for group in self._weights.groups:
                for name, piece in ((n, piece) for n in group.zeros for piece in held.get(n, ())):
                    group.check_zeros({name: piece.on_device()})
            compared = held.items() if self._comparable else ()
            return {n: [checksums_of(piece, self.bucket_bytes) for piece in own] for n, own in compared}

        # Also without ``since``: this stream may be the ``since`` of a later call.
        self.checksums = all_agree(sums)
        self._groups = list(self._weights.groups)
        if self.since is not None:
            before = self.since.checksums
            mine = {name for name, sums in self.checksums.items() if sums != before.get(name)}
            # A group is sent if any rank has changed a part of it, so all ranks need one list.
            changed = set[str]().union(*gather(mine))
            self._groups = [g for g in self._groups if changed.intersection(tensors_of(g, self._plan))]
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
            [(at, bucket) for bucket in batches(own, self._bytes, limit)] for at, own in queues.items()
        )
        # In turns, so that one rank writes its bucket while the next one receives.
        turns = [one for turn in zip_longest(*buckets) for one in turn if one is not None]
        self.receivers, self.buckets = [at for at, _ in turns], [bucket for _, bucket in turns]

    def _describe(self) -> dict[str, Lazy]:
        """Return shapes and dtypes of the tensors; raise CheckpointError for a model that does not fit the map."""
        held = {name: Lazy(one.shape, one.dtype, _unread) for name, one in self._plan.parameters.items()}
        # The map checks names and shapes of tensors that are never read here.
        plain, found = self._weights.lazily(held, to_te=False, dtype=self._dtype), {}
        for group in self._weights.groups:
            for name in group.names(te=False, tied=False):
                found[name] = plain[name]
                if self._is_fp8(group):
                    shape = tuple(-(-size // BLOCK) for size in plain[name].shape)
                    found[name] = Lazy(plain[name].shape, torch.float8_e4m3fn, _unread)
                    found[scale_name(name)] = Lazy(shape, torch.float32, _unread)
        return found

    def _is_fp8(self, group: Group) -> bool:
        return self.format == "fp8-block" and is_linear(group, self.names)

    def __next__(self) -> tuple[str, torch.Tensor | None]:
        """Return the next name and tensor; ``None`` for a tensor that another rank receives."""
        return next(self._tensors)

    def names_of(self, group: Group) -> list[str]:
        """Return the names under which a group's tensors are yielded."""
        names = group.names(te=False, tied=False)
        return [
            each for name in names for each in ((name, scale_name(name)) if self._is_fp8(group) else (name,))
        ]

    def _bytes(self, group: Group) -> int:
        """Return the bytes that are sent for a group."""
        return sum(self._plan.described[name].bytes for name in tensors_of(group, self._plan))

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
            names = [name for group in groups for name in tensors_of(group, plan)]
            tensors = assemble(plan, names, self._device, receiver, failed)
            for group in groups:
                # Popped, so that the memory of a group is free once its tensors are yielded.
                own = {name: tensors.pop(name) for name in tensors_of(group, plan)} if receives else {}
                left = self.names_of(group)
                try:
                    for name, tensor in self._converted(plan, group, own) if receives else ():
                        yield name, tensor
                        left.remove(name)
                        del tensor
                except Exception as error:
                    failed = failed or error
                del own
                yield from ((name, None) for name in left)
        all_agree(lambda: raise_error(failed))
        # Without a reference to the previous stream: a chain of streams would keep all their checksums.
        self.since, self.ended = None, True

    def _written(self) -> OrderError | None:
        """Return the error of a stream whose weights were written to since its start. Local operation."""
        now = versions_of(one.parameter for one in self._owned)
        together = zip(self._owned, now, self._versions, strict=True)
        written = [one.fqn for one, version, before in together if version != before]
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
        self, plan: TransferPlan, group: Group, tensors: dict[str, torch.Tensor]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield a group's tensors under Hugging Face's names. Local operation."""
        names, is_fp8 = group.names(te=False, tied=False), self._is_fp8(group)
        if is_fp8 and plan.exact.issuperset(group.te.names):
            values = repack(group, {n: tensors[f"{n}:data"] for n in group.te.names}, 1)
            scales = repack(group, {n: tensors[f"{n}:scale"] for n in group.te.names}, BLOCK)
            for name in names:
                yield name, values[name].view(torch.float8_e4m3fn)
                yield scale_name(name), scales[name]
            return
        # FP8 is computed from the most precise values, so these are not rounded to bf16 before.
        kinds = [tensor.dtype for name, tensor in tensors.items() if name not in group.zeros]
        dtype = reduce(torch.promote_types, kinds) if is_fp8 else self.tensors[names[0]].dtype
        converted = group.convert(tensors, to_te=False, dtype=dtype)
        if not self._warned and group.rounds(tensors, converted):
            self._warned = True
            _log.warning(ROUNDED, ", ".join(converted))
        for name in names:
            tensor = converted.pop(name)
            if not is_fp8:
                yield name, tensor
                continue
            quantized, scale = quantize_blocks(tensor)
            yield name, quantized
            yield scale_name(name), scale


def _unread(first: int, last: int) -> torch.Tensor:
    raise AssertionError("shape and dtype are needed alone")


def _check_options(
    format: object,
    receiver: object,
    bucket_bytes: object,
    since: object,
) -> None:
    """Check the options of :func:`iter_weights`; raise CheckpointError otherwise. Local operation."""
    if format not in get_args(WeightFormat):
        raise CheckpointError(
            "iter_weights: format", expected=" or ".join(map(repr, get_args(WeightFormat))), got=repr(format)
        )
    ranks = receiver if isinstance(receiver, Sequence) and receiver else [receiver]
    known = [type(one) is int and 0 <= one < world_size() for one in ranks]
    if receiver is not None and not all(known):
        raise CheckpointError(
            "iter_weights: receiver", expected=f"None, or ranks below {world_size()}", got=repr(receiver)
        )
    if not isinstance(bucket_bytes, int) or isinstance(bucket_bytes, bool) or bucket_bytes < 1:
        raise CheckpointError(
            "iter_weights: bucket_bytes", expected="a number of bytes above 0", got=repr(bucket_bytes)
        )
    if since is None:
        return
    if not isinstance(since, WeightStream) or not since.ended or since.format != format:
        got = "a stream that has not ended" if isinstance(since, WeightStream) else type(since).__name__
        if isinstance(since, WeightStream) and since.ended:
            got = f"a stream of format={since.format!r}"
        raise CheckpointError(
            "iter_weights: since",
            expected=f"an earlier iter_weights(..., format={format!r}), iterated to its end",
            got=got,
            why="The earlier stream records which weights the receivers have",
            fix="keep the iterator: stream = iter_weights(...); for name, tensor in stream: ...",
        )


def _compare_options(options: dict[str, object]) -> None:
    """Raise CheckpointError on all ranks if an option differs between ranks. Collective over the world."""
    seen = gather(options)
    if wrong := [name for name in options if any(one[name] != seen[0][name] for one in seen)]:
        # Each rank would send other buckets, or wait for messages that no rank sends.
        raise CheckpointError(
            f"iter_weights: {', '.join(wrong)}",
            expected="the same on all ranks",
            got=shorten([f"rank {n}: {[one[name] for name in wrong]!r:.60}" for n, one in enumerate(seen)]),
            fix="pass equal arguments; with receiver=0 the other ranks iterate, too, and get None",
        )
