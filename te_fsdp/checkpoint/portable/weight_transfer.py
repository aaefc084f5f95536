"""Transfer of a sharded model's tensors to the ranks that receive them unsharded."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from te_fsdp.checkpoint.async_save import aligned
from te_fsdp.checkpoint.compare import check_whole_job
from te_fsdp.checkpoint.holders import holders_of, lightest
from te_fsdp.checkpoint.lazy_tensors import Lazy
from te_fsdp.checkpoint.model_state import owned_parameters, tied_names
from te_fsdp.checkpoint.portable.fp8_blocks import has_whole_blocks, is_linear
from te_fsdp.checkpoint.portable.huggingface_map import Group, WeightMap
from te_fsdp.checkpoint.portable.huggingface_model import (
    Description,
    Share,
    TeBlocks,
    TeNames,
    describe_model,
    describe_shares,
    shares_of,
)
from te_fsdp.collectives.agreement import all_agree, gather, rank, row_checksums, world_size
from te_fsdp.errors import CheckpointError, shorten
from te_fsdp.features.main_weights import check_optimizer
from te_fsdp.layout import slices

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer


class Piece(NamedTuple):
    """A rectangle that one rank sends."""

    holder: int  #: Its global rank
    number: int  #: Among the pieces of all tensors that the holder sends
    tensor: str  #: Name in :attr:`TransferPlan.described`
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class TransferPlan(NamedTuple):
    """Every tensor of the unsharded model as the ranks send it; the same on all ranks, except ``own``."""

    parameters: dict[str, Description]  #: By name in the unsharded model
    described: dict[str, Description]  #: Tensors that are sent
    pieces: dict[str, list[Piece]]  #: By name of the tensor
    exact: frozenset[str]  #: TE's names of weights whose FP8 bytes are sent as they are
    own: dict[str, list[Lazy]]  #: This rank's pieces of the tensors, in the order of their numbers


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
    check_fits("save_huggingface", model, weights, [])
    shares, known = shares_of(model, optimizer), weights.shapes(te=True)
    for name, first in tied_names(model).items():  # under the name that the map has
        if first in shares and first not in known and name in known:
            shares[name] = shares.pop(first)
    return shares, weights


def check_fits(call: str, model: nn.Module, weights: WeightMap, problems: list[str]) -> None:
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


def make_plan(
    shares: Mapping[str, Share], exact: Mapping[str, Mapping[str, Share]], weights: WeightMap, names: TeNames
) -> TransferPlan:
    """Choose the rank that sends each piece. Collective over the world: one gather of descriptions."""
    mine = {name: share.about for name, share in shares.items()}
    blocks = {name: {kind: share.about for kind, share in one.items()} for name, one in exact.items()}
    everyone = gather((mine, blocks))
    # Bytes are sent where every rank with a part of the weight has them in whole blocks, for all weights of a group.
    held = [
        ({n for n, own in about.items() if any(math.prod(sizes) for _, sizes in own.places)}, exact_of)
        for about, exact_of in everyone
    ]
    fits = {
        name
        for group in weights.groups
        if is_linear(group, names) and has_whole_blocks(group)
        for name in group.te.names
        if all(name in exact_of or name not in parts for parts, exact_of in held)
        and any(name in exact_of for _, exact_of in held)
    }
    chosen = frozenset(
        name for group in weights.groups if fits.issuperset(group.te.names) for name in group.te.names
    )
    seen = []
    for about, other in everyone:
        sent = {name: one for name, one in about.items() if name not in chosen}
        # In that rank's order: pieces are numbered by it, and the order of a set differs from process to process.
        for name in (name for name in other if name in chosen):
            sent |= {f"{name}:{kind}": one for kind, one in other[name].items()}
        seen.append(sent)
    described, load = describe_shares(seen), Counter[int]()
    held = ([(name, one.shape, one.values, [*one.places]) for name, one in sent.items()] for sent in seen)
    pieces: dict[str, list[Piece]] = {}
    for name, (_, _, places, _) in holders_of("iter_weights", held).items():
        pieces[name] = []
        for (offsets, sizes), have in places.items():
            count = math.prod(sizes) * described[name].values.itemsize
            pieces[name].append(Piece(*lightest(have, load, count), name, offsets, sizes))
    everything = {**shares, **{f"{name}:{kind}": s for name, one in exact.items() for kind, s in one.items()}}
    own = {name: [piece for _, piece in everything[name].pieces] for name in seen[rank()]}
    return TransferPlan(describe_shares([about for about, _ in everyone]), described, pieces, chosen, own)


def tensors_of(group: Group, plan: TransferPlan) -> list[str]:
    """Return the names of the tensors that are sent for a group."""
    found = []
    for name in group.names(te=True, tied=True):
        if name in plan.exact:
            found += [f"{name}:data", f"{name}:scale"]
        elif name in plan.described:
            found.append(name)
    return found


def checksums_of(piece: Lazy, bytes_at_once: int) -> list[int]:
    """Return checksums of a piece's bytes, which allocate at most ``bytes_at_once``. Local operation.

    Version counters would cost less. FusedAdam's kernels write through pointers, without counting.
    """
    data = piece.on_device().contiguous().reshape(-1).view(torch.uint8)
    even = data.numel() - data.numel() % 8
    step = 8 * max(1, bytes_at_once // 32)  # a checksum needs three int64 tensors of its size
    parts = [row_checksums(part.view(torch.int64)[None]) for part in data[:even].split(step)] if even else []
    if data.numel() > even:
        parts.append(row_checksums(data[None, even:]))
    return torch.cat(parts).tolist() if parts else []


def assemble(
    plan: TransferPlan,
    names: Sequence[str],
    device: torch.device,
    receiver: int | None,
    failed: Exception | None = None,
) -> dict[str, torch.Tensor]:
    """Return the unsharded tensors of a bucket on the receivers. Collective over the world.

    ``failed`` is an earlier error of this rank. All ranks raise it here.
    """
    receives, own = receiver in (None, rank()), [*chain(*plan.own.values())]
    messages: dict[int, list[Piece]] = {}
    for piece in (piece for name in names for piece in plan.pieces[name]):
        messages.setdefault(piece.holder, []).append(piece)
    found: dict[str, torch.Tensor] = {}
    for name in names if receives else ():
        about = plan.described[name]
        found[name] = torch.empty(about.shape, dtype=about.values, device=device)
    for holder, pieces in sorted(messages.items()):
        sizes = [aligned(math.prod(p.sizes) * plan.described[p.tensor].values.itemsize) for p in pieces]
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
        _send(message, holder, receiver)
        if receives:
            for piece, data in zip(pieces, message.split(sizes), strict=True):
                dtype = plan.described[piece.tensor].values
                data = data[: math.prod(piece.sizes) * dtype.itemsize]
                found[piece.tensor][slices(piece.offsets, piece.sizes)] = data.view(dtype).view(piece.sizes)
        del message
    all_agree(lambda: raise_error(failed))
    return found


def _send(message: torch.Tensor, holder: int, receiver: int | None) -> None:
    """Send a message to the receivers. Collective over holder and receivers."""
    if world_size() == 1 or holder == receiver:
        return
    if receiver is None:
        dist.broadcast(message, src=holder)
    elif holder == rank():
        dist.send(message, receiver)
    else:
        dist.recv(message, holder)


def raise_error(error: Exception | None) -> None:
    """Raise an error, if there is one."""
    if error is not None:
        raise error
