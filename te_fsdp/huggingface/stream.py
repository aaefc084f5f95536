"""Stream of a sharded model's weights under Hugging Face's names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import torch

from te_fsdp.checkpoint.model_state import owned_parameters
from te_fsdp.checkpoint.portable.huggingface import TeBlocks, TeNames, shares_to_write
from te_fsdp.checkpoint.portable.huggingface_map import Group
from te_fsdp.checkpoint.portable.huggingface_model import Share
from te_fsdp.collectives.agreement import all_agree, gather, rank, world_size
from te_fsdp.collectives.rendezvous import collective_call
from te_fsdp.errors import CheckpointError
from te_fsdp.huggingface.fp8_blocks import BLOCK, block_shares, is_linear, quantize_blocks, repack, scale_name
from te_fsdp.huggingface.transfer import (
    TransferPlan,
    assemble,
    bytes_of,
    checksums_of,
    make_plan,
    tensors_of,
)

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

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
        CheckpointError: An option that is not supported, a model that ``config`` does not describe, ranks that do not
            store every element. The same on all ranks, before the first tensor.
        OrderError: ``optimizer`` holds parameters of another model, or ``since`` has not ended.
    """
    with collective_call("huggingface.iter_weights"):
        stream = all_agree(
            lambda: WeightStream(
                model, optimizer, config, names, blocks, format, receiver, bucket_bytes, since
            )
        )
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
    ) -> None:
        _check_options(format, receiver, bucket_bytes, since)
        self.format, self.bucket_bytes, self.since = format, bucket_bytes, since
        #: Receivers of the buckets in turn; empty: all ranks receive each bucket.
        self.receivers = [receiver] if isinstance(receiver, int) else list(receiver or ())
        self.names = names or TeNames()
        #: Checksums of the pieces that this rank stores, by tensor: what ``since`` compares.
        self.checksums: dict[str, list[list[int]]] = {}
        self.ended = False
        self._shares, self._weights = shares_to_write(model, optimizer, config, names, blocks)
        self._exact: dict[str, dict[str, Share]] = {}
        if format == "fp8-block":
            if self._weights.architecture.style == "gpt2":
                raise CheckpointError(
                    "iter_weights: format='fp8-block' of a GPT-2 model",
                    expected="a model whose projections are nn.Linear",
                    why="GPT-2 stores them transposed, and no inference engine reads them in FP8",
                    fix="format='bf16'",
                )
            found = {owned.fqn: block_shares(owned) for owned in owned_parameters(model)}
            self._exact = {name: shares for name, shares in found.items() if shares}
        self._device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._tensors: Iterator[tuple[str, torch.Tensor | None]] = iter(())

    def start(self) -> None:
        """Agree on the plan and on the groups to send. Collective over the world."""
        self._plan = make_plan(self._shares, self._exact, self._weights, self.names)
        for name, shares in self._exact.items():
            if name in self._plan.exact:
                self._shares |= {f"{name}:{kind}": share for kind, share in shares.items()}
        self.buckets = self._make_buckets(self._changed_groups())
        self._tensors = self._run()

    def __next__(self) -> tuple[str, torch.Tensor | None]:
        """Return the next name and tensor; ``None`` for a tensor that another rank receives."""
        return next(self._tensors)

    def receiver_of(self, bucket: int) -> int | None:
        """Return the rank that receives a bucket; ``None`` for all ranks."""
        return self.receivers[bucket % len(self.receivers)] if self.receivers else None

    def names_of(self, group: Group) -> list[str]:
        """Return the names under which a group's tensors are yielded."""
        names = group.names(te=False, tied=False)
        if self.format != "fp8-block" or not is_linear(group, self.names):
            return list(names)
        return [found for name in names for found in (name, scale_name(name))]

    def _changed_groups(self) -> list[Group]:
        """Return the groups to send, and keep checksums for later calls. Collective over the world."""

        def sums() -> dict[str, list[list[int]]]:
            held = {name: self._shares[name].pieces for name in self._plan.described if name in self._shares}
            for group in self._weights.groups:
                biases = {n: held[n] for n in group.zeros if n in held}
                for name, pieces in biases.items():
                    for _, piece in pieces:
                        group.check_zeros({name: piece.on_device()})
            found = {}
            for name, pieces in held.items():
                found[name] = [checksums_of(piece, self.bucket_bytes) for _, piece in pieces]
            return found

        # Also without ``since``: this stream may be the ``since`` of a later call.
        self.checksums = all_agree(sums)
        if self.since is None:
            return list(self._weights.groups)
        before = self.since.checksums
        mine = {name for name, sums in self.checksums.items() if sums != before.get(name)}
        # A group is sent if any rank has changed a part of it, so all ranks need one list.
        changed = set[str]().union(*gather(mine))
        return [g for g in self._weights.groups if changed.intersection(tensors_of(g, self._plan))]

    def _make_buckets(self, groups: Sequence[Group]) -> list[list[Group]]:
        """Divide groups into buckets, in order."""
        buckets: list[list[Group]] = []
        size = 0
        for group in groups:
            more = sum(bytes_of(self._plan.described[name]) for name in tensors_of(group, self._plan))
            # Half of the limit for the assembled tensors, half for a message, or for a group's converted tensors.
            if not buckets or 2 * (size + more) > self.bucket_bytes:
                buckets.append([])
                size = 0
            buckets[-1].append(group)
            size += more
        return buckets

    @torch.no_grad()
    def _run(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Yield the tensors of each bucket. Collective over the world."""
        plan = self._plan
        for number, groups in enumerate(self.buckets):
            receiver = self.receiver_of(number)
            receives = receiver in (None, rank())
            names = [name for group in groups for name in tensors_of(group, plan)]
            tensors = assemble(plan, names, self._shares, self._device, receiver)
            for group in groups:
                # Popped, so that the memory of a group is free once its tensors are yielded.
                own = {name: tensors.pop(name) for name in tensors_of(group, plan)} if receives else None
                yield from self._converted(plan, group, own)
        self.since, self.ended = None, True

    def _converted(
        self, plan: TransferPlan, group: Group, tensors: dict[str, torch.Tensor] | None
    ) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Yield a group's tensors under Hugging Face's names; without ``tensors`` the names. Local operation."""
        if tensors is None:
            yield from ((name, None) for name in self.names_of(group))
            return
        names = group.names(te=False, tied=False)
        is_fp8 = self.format == "fp8-block" and is_linear(group, self.names)
        if is_fp8 and plan.exact.issuperset(group.te.names):
            values = repack(group, {n: tensors[f"{n}:data"] for n in group.te.names}, 1)
            scales = repack(group, {n: tensors[f"{n}:scale"] for n in group.te.names}, BLOCK)
            for name in names:
                yield name, values[name].view(torch.float8_e4m3fn)
                yield scale_name(name), scales[name]
            return
        converted = group.convert(tensors, to_te=False, dtype=self._dtype(plan, group, is_fp8))
        for name in names:
            tensor = converted.pop(name)
            if not is_fp8:
                yield name, tensor
                continue
            quantized, scale = quantize_blocks(tensor)
            yield name, quantized
            yield scale_name(name), scale

    def _dtype(self, plan: TransferPlan, group: Group, is_fp8: bool) -> torch.dtype:
        """Return the dtype that a group is converted to."""
        own = [plan.described[name] for name in tensors_of(group, plan) if name not in group.zeros]
        kinds = [one.values if is_fp8 else one.dtype for one in own]
        if self.format != "native" and not is_fp8:
            return torch.bfloat16
        found = kinds[0]
        # A group has one dtype: its parts are joined into one tensor.
        for kind in kinds[1:]:
            found = torch.promote_types(found, kind)
        return found


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
