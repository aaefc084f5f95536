"""Transfer of a sharded model's tensors to the ranks that receive them unsharded.

torch's ``HuggingFaceStorageWriter`` (2.11 to 2.15) does not assemble tensors: it writes tensors that are unsharded on a
rank, with a file of them in memory at once, or every rank's shards, which a second pass over the disk must join. It
does not sync or rename at the end, and it writes the model's own tensors without reordering rows. Measured on 2 CPU
ranks with 509 MB: 5.5 to 6.1 s and 1.7 s of CPU time here; 6.8 to 13 s, 2.3 to 3.0 s and twice the disk there.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from te_fsdp.checkpoint.compare import check_spans_world
from te_fsdp.checkpoint.host_memory import aligned
from te_fsdp.checkpoint.lazy_tensors import InMemory, Lazy
from te_fsdp.checkpoint.model_state import OwnedTensor, component_entry, owned_parameters
from te_fsdp.checkpoint.optimizer_state import describe_state
from te_fsdp.checkpoint.portable.huggingface_map import Group, WeightMap
from te_fsdp.checkpoint.portable.huggingface_model import TeNames
from te_fsdp.checkpoint.reader import with_remainders
from te_fsdp.checkpoint.tensor_entries import Shape, TensorEntry, holders_of, lightest
from te_fsdp.collectives.agreement import all_agree, are_equal, digest, gather, rank, result_of, world_size
from te_fsdp.errors import CheckpointError, PlacementError, require_kind, shorten
from te_fsdp.features.main_weights import check_optimizer, main_weight
from te_fsdp.features.written_weights import unscaled_main_weight, written_main_weights
from te_fsdp.layout import Box, slices
from te_fsdp.quantized.components import components_of
from te_fsdp.tensor_checksums import row_checksums
from te_fsdp.upstream import te as _te

#: Rows and columns that share a scale, as vLLM, SGLang and transformers read FP8 weights.
BLOCK = 128
#: The largest finite value of ``torch.float8_e4m3fn``.
_LARGEST = torch.finfo(torch.float8_e4m3fn).max


class Share(NamedTuple):
    """A rank's part of one tensor of the unsharded model."""

    shape: Shape
    dtype: torch.dtype  #: Dtype of the parameter
    values: torch.dtype  #: Dtype of the sent values
    #: Offsets of each piece, and its values, which are read when they are sent; in messages its shape
    pieces: Sequence[tuple[Shape, Any]] = ()
    is_component: bool = False  #: Whether these are FP8 bytes or scales (:func:`block_shares`)

    @classmethod
    def of(cls, entry: TensorEntry, dtype: torch.dtype) -> Share:
        """Return the share of a parameter of a dtype whose values are those of an entry."""
        return cls(entry.shape, dtype, entry.dtype, [(p.offsets, InMemory(p.tensor)) for p in entry.pieces])

    @property
    def bytes(self) -> int:
        """Return the size in bytes of the unsharded tensor."""
        return math.prod(self.shape) * self.values.itemsize


def check_model(call: str, model: nn.Module, optimizer: Optimizer | None) -> None:
    """Check that all ranks have parts of one model, which has the optimizer's parameters; raise otherwise."""
    require_kind(call, "model", model, nn.Module, expected="a model", error=CheckpointError)
    if optimizer is not None:
        check_optimizer(model, optimizer)
    check_spans_world(model, None)


def shares_of(model: nn.Module, optimizer: Optimizer | None) -> dict[str, Share]:
    """Return this rank's share of every parameter, by name in the unsharded model. Local operation.

    FSDP2 units are resharded. Values are those of an fp32 main weight if the optimizer has one, else the parameter's. A
    tied parameter has its first name; a stacked parameter of experts becomes one for each, with global indices.
    """
    result: dict[str, Share] = {}
    parameters = owned_parameters(model)
    mains = {} if optimizer is None else written_main_weights(optimizer)
    for owned in parameters:
        share = _share(owned, optimizer, mains)
        if not owned.is_grouped:
            result[owned.fqn] = share
            continue
        for n in range(share.shape[0]):
            own = [(first, p) for first, p in share.pieces if first[0] <= n < first[0] + p.shape[0]]
            pieces = [(first[1:], p.select(n - first[0])) for first, p in own]
            result[f"{owned.fqn}{n}"] = share._replace(shape=share.shape[1:], pieces=pieces)
    return result


def _share(owned: OwnedTensor, optimizer: Optimizer | None, mains: Mapping[int, torch.Tensor]) -> Share:
    info, dtype, main = owned.info, owned.parameter.dtype, main_weight(optimizer, owned.parameter)
    local: Any = owned.local
    if main is not None and main.dtype != torch.int16:
        assert optimizer is not None
        written = mains.get(id(owned.parameter))
        state = unscaled_main_weight(optimizer, owned.parameter) if written is None else written
        entry = describe_state(f"main weight of {owned.fqn}", state, owned)[1]
        assert entry is not None
        return Share.of(entry, dtype)
    if main is None and not _te.is_quantized(local):
        return Share.of(TensorEntry.cut(local, info.original_shape, info.boxes), dtype)

    def piece(box: Box) -> Lazy:
        if main is not None:  # FusedAdam's remainders of bf16 weights
            return with_remainders(*(InMemory(tensor[box.local_slices()]) for tensor in (local, main)))
        # Its rows are on the device, unlike those of other lazy tensors: a message is assembled there.
        return Lazy(box.sizes, dtype, lambda low, high: local.dequantize()[box.local_slices()][low:high])

    pieces = [(box.original, piece(box)) for box in info.boxes]
    return Share(info.original_shape, dtype, dtype if main is None else torch.float32, pieces)


def describe_shares(by_rank: Sequence[Mapping[str, Share]]) -> dict[str, Share]:
    """Return every tensor of the unsharded model, without shares, from the ranks' descriptions, which must agree."""
    result: dict[str, Share] = {}
    for number, shares in enumerate(by_rank):
        for name, share in shares.items():
            kind = share._replace(pieces=())
            # A rank without elements may have no main weight either.
            if share.pieces and result.setdefault(name, kind) != kind:
                raise CheckpointError(
                    f"{name}: of a different kind on rank {number}",
                    expected=f"shape, dtype and dtype of the main weight {tuple(result[name][:3])}",
                    got=tuple(kind[:3]),
                    fix="build and train the same model, with the same optimizer, on all ranks",
                )
    return result


# ------------------------------------------------------------------------------------------------------- FP8


# Weights of Hugging Face in FP8 have one scale per 128 x 128 block.


def quantize_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize a (rows, columns) weight with one scale per 128 x 128 block. Local operation.

    Returns:
        The weight in float8_e4m3fn, and fp32 factors (rows / 128, columns / 128), rounded up, that multiply it back.
    """
    rows, columns = weight.shape
    scales = torch.empty((-(-rows // BLOCK), -(-columns // BLOCK)), dtype=torch.float32, device=weight.device)
    values = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    height = BLOCK * max(1, rows // (8 * BLOCK))  # an eighth of the rows at a time bounds the memory
    for first in range(0, rows, height):
        strip = weight[first : first + height]
        pad = (0, -columns % BLOCK, 0, -len(strip) % BLOCK)
        padded = torch.nn.functional.pad(strip.float(), pad)
        blocks = padded.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK))
        amax = blocks.abs().amax(dim=(1, 3))
        # On a GPU torch multiplies by the reciprocal of a number, which rounds twice.
        scale = torch.where(amax > 0, amax / torch.full_like(amax, _LARGEST), 1.0)
        quantized = (blocks / scale[:, None, :, None]).clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn)
        values[first : first + height] = quantized.flatten(2).flatten(0, 1)[: len(strip), :columns]
        scales[first // BLOCK : first // BLOCK + len(scale)] = scale
    return values, scales


def scale_name(name: str) -> str:
    """Return the name of the scales of an FP8 weight."""
    return name.removesuffix("weight") + "weight_scale_inv"


def quantization_config(config: Any, *, names: TeNames | None = None) -> dict[str, Any]:
    """Return ``quantization_config`` of ``config.json`` for weights in the format ``"fp8-block"``. Local operation.

    ``config`` is the model's description, as for :func:`te_fsdp.checkpoint.save_huggingface`.
    """
    weights = WeightMap.build(config, names=names)
    unquantized = [
        name.removesuffix(".weight")
        for group in weights.groups
        for name, shape in group.shapes(te=False).items()
        if len(shape) == 2 and not weights.is_linear(group) and weights.names.embedding not in group.te.names
    ]
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": unquantized or ["lm_head"],
    }


def has_full_blocks(group: Group) -> bool:
    """Return whether TE's tensors consist of whole 128-row blocks of Hugging Face's."""
    if group.te.zero_centered != group.huggingface.zero_centered or group.huggingface.transposed:
        return False
    is_one = len(group.te.names) == len(group.parts)
    return is_one or all(part[0] % (BLOCK * group.te.groups) == 0 for part in group.parts)


def block_shares(owned: OwnedTensor) -> dict[str, Share]:
    """Return this rank's FP8 bytes (``NAME:data``) and scales (``NAME:scale``) of a weight; empty for other formats.

    Hugging Face's FP8 weights have one scale per 128 x 128 block.
    """
    local: Any = owned.local
    if owned.is_grouped or str(_te.format_of(local)) != "float8-block":
        return {}
    if getattr(local.get_metadata()["fp8_dtype"], "name", "") != "kFloat8E4M3":
        return {}
    (part,), components = owned.parts(), {c.name: c for c in components_of(local, owned.fqn)}
    result = {}
    for kind, name in (("data", "rowwise_data"), ("scale", "rowwise_scale_inv")):
        try:
            entry = component_entry(components[name], part, owned.fqn)
        except (KeyError, PlacementError):  # without the component, or a shard that ends within a block
            return {}
        result[f"{owned.fqn}:{kind}"] = Share.of(entry, entry.dtype)._replace(is_component=True)
    return result


def repack(group: Group, tensors: Mapping[str, torch.Tensor], block: int) -> dict[str, torch.Tensor]:
    """Return Hugging Face's tensors of elements that each cover ``block`` rows and columns of a weight."""
    parts = [tuple(-(-size // block) for size in part) for part in group.parts]
    return group.huggingface.pack(group.te.unpack(tensors, parts))


# ------------------------------------------------------------------------------------------------------- transfer


class SentPiece(NamedTuple):
    """A rectangle that one rank sends."""

    holder: int  #: Global rank that sends it
    number: int  #: Index among the pieces of all tensors that the holder sends
    tensor: str  #: Name in :attr:`TransferPlan.described`
    offsets: Shape
    sizes: Shape


class TransferPlan(NamedTuple):
    """Every tensor of the unsharded model as the ranks send it; the same on all ranks, except ``own``."""

    described: dict[str, Share]  #: By name in the unsharded model, or of FP8 bytes and scales
    pieces: dict[str, list[SentPiece]]  #: Pieces of each sent tensor, by name
    exact: frozenset[str]  #: TE's names of weights whose FP8 bytes are sent as they are
    own: dict[str, list[Lazy]]  #: This rank's pieces of the tensors, in the order of their numbers

    def tensors_of(self, group: Group) -> list[str]:
        """Return the names of the tensors that are sent for a group."""
        result = []
        for name in group.names(te=True, tied=True):
            if name in self.exact:
                result += [f"{name}:data", f"{name}:scale"]
            elif name in self.pieces:
                result.append(name)
        return result

    def assemble(
        self,
        names: Sequence[str],
        device: torch.device,
        receiver: int | None,
        failed: Exception | None = None,
    ) -> dict[str, torch.Tensor]:
        """Return the unsharded tensors of a bucket on the receivers. Collective over the world.

        ``failed`` is an earlier error of this rank. All ranks raise it here.
        """
        receives, own = receiver in (None, rank()), [*chain(*self.own.values())]
        messages: dict[int, list[SentPiece]] = {}
        for piece in (piece for name in names for piece in self.pieces[name]):
            messages.setdefault(piece.holder, []).append(piece)
        result: dict[str, torch.Tensor] = {}
        for name in names if receives else ():
            share = self.described[name]
            result[name] = torch.empty(share.shape, dtype=share.values, device=device)
        for holder, pieces in sorted(messages.items()):
            sizes = [aligned(math.prod(p.sizes) * self.described[p.tensor].values.itemsize) for p in pieces]
            if holder != rank() and not receives and receiver is not None:
                continue
            message = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
            if holder == rank():
                try:
                    for piece, part in zip(pieces, message.split(sizes), strict=True):
                        data = own[piece.number].on_device().to(device).contiguous().reshape(-1)
                        part[: data.nbytes] = data.view(torch.uint8)
                except Exception as error:  # the other ranks wait for the message
                    failed = failed or error
            if world_size() > 1 and holder != receiver:
                if receiver is None:
                    dist.broadcast(message, src=holder)
                elif holder == rank():
                    dist.send(message, receiver)
                else:
                    dist.recv(message, holder)
            if receives:
                for piece, data in zip(pieces, message.split(sizes), strict=True):
                    dtype = self.described[piece.tensor].values
                    values = data[: math.prod(piece.sizes) * dtype.itemsize].view(dtype).view(piece.sizes)
                    result[piece.tensor][slices(piece.offsets, piece.sizes)] = values
            del message
        all_agree(lambda: result_of(None, failed))
        return result


def check_fits(call: str, model: nn.Module, weights: WeightMap, problems: list[str]) -> None:
    """Raise CheckpointError for problems of a model and its map. Local operation.

    Adds weights if tensor parallelism shards two blocks as one to ``problems``: each rank then has rows of gate and
    up that differ from the unsharded model's.
    """
    forms = [g.te for g in weights.groups if len(g.te.names) < len(g.parts) and not g.te.layout.is_stacked]
    gated = {name for form in forms if form.groups == 1 for name in form.names}
    cut = [
        owned.fqn
        for owned in owned_parameters(model)
        if (owned.fqn in gated or f"{owned.fqn}0" in gated)
        and owned.info.rule.shard_dim == int(owned.is_grouped)
        and owned.info.coordinates.tp_size > 1
    ]
    if weights.differences:
        problems.append(f"layers with a different function: {shorten([*weights.differences], 20)}")
    if cut:
        problem = "gate above up, sharded by tensor parallelism as one block (use expert parallelism)"
        problems.append(f"{problem}: {shorten(cut, 20)}")
    if problems:
        raise CheckpointError(
            f"{call}: {type(model).__name__} does not fit: {'; '.join(problems)}",
            why="Nothing was changed",
            fix="name the model's parts by TeNames, build the layers with read_config(...).te_kwargs()",
        )


def require_same_model(call: str, description: object) -> None:
    """Raise CheckpointError on all ranks if their Hugging Face folders differ. Collective over the world."""
    # Each rank reads a folder of its own machine.
    if world_size() > 1 and not are_equal([digest(repr(description))]).all():
        raise CheckpointError(
            f"{call}: the ranks read different models",
            expected="config.json and files with the same tensors, dtypes, biases and values on all ranks",
            got="differences between ranks",
            fix="copy one folder to all machines",
        )


def make_plan(shares: Mapping[str, Share], weights: WeightMap) -> TransferPlan:
    """Choose the rank that sends each piece. Collective over the world: one gather of descriptions.

    ``shares`` may have FP8 bytes and scales of weights in addition to their values.
    """
    shapes = ([(offsets, p.shape) for offsets, p in share.pieces] for share in shares.values())
    by_rank = gather({n: s._replace(pieces=own) for (n, s), own in zip(shares.items(), shapes, strict=True)})
    # Bytes are sent if every rank with a part of the weight has them in whole blocks, for all weights of a group.
    stored = [
        {n for n, share in own.items() if any(math.prod(sizes) for _, sizes in share.pieces)}
        for own in by_rank
    ]
    fits = {
        name
        for group in weights.groups
        if weights.is_linear(group) and has_full_blocks(group)
        for name in group.te.names
        if all(f"{name}:data" in own or name not in held for own, held in zip(by_rank, stored, strict=True))
        and any(f"{name}:data" in own for own in by_rank)
    }
    chosen = frozenset(
        name for group in weights.groups if fits.issuperset(group.te.names) for name in group.te.names
    )

    def is_sent(name: str, share: Share) -> bool:
        return name.rpartition(":")[0] in chosen if share.is_component else name not in chosen

    # In each rank's order, which numbers its pieces.
    sent = [[(name, share) for name, share in own.items() if is_sent(name, share)] for own in by_rank]
    described, load = describe_shares(by_rank), Counter[int]()
    messages = ([(name, share.shape, share.values, [*share.pieces]) for name, share in own] for own in sent)
    pieces: dict[str, list[SentPiece]] = {}
    for name, (_, dtype, chunks, _) in holders_of("iter_weights", messages).items():
        pieces[name] = []
        for (offsets, sizes), holders in chunks.items():
            count = math.prod(sizes) * dtype.itemsize
            pieces[name].append(SentPiece(*lightest(holders, load, count), name, offsets, sizes))
    own = {name: [piece for _, piece in shares[name].pieces] for name, _ in sent[rank()]}
    return TransferPlan(described, pieces, chosen, own)


def checksums_of(piece: Lazy, bytes_at_once: int) -> list[int]:
    """Return checksums of a piece's bytes, which allocate at most ``bytes_at_once``. Local operation.

    Version counters would cost less. FusedAdam's kernels write through pointers, without counting.
    """
    data = piece.on_device().contiguous().reshape(-1).view(torch.uint8)
    even = data.numel() - data.numel() % 4
    step = 4 * max(1, bytes_at_once // 32)  # a checksum needs three int64 tensors of the shape of the words
    parts = [row_checksums(part.view(torch.int32)[None]) for part in data[:even].split(step)] if even else []
    if data.numel() > even:
        parts.append(row_checksums(data[None, even:]))
    return torch.cat(parts).tolist() if parts else []
