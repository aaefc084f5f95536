"""Context parallelism: each rank of ``cp`` computes its part of the same sequences, TE's attention asks the others.

    sequence        0   1   2   3            2 x cp equal chunks; cp = 2
    cp rank 0       0           3            rank r has chunks r and 2 x cp - 1 - r, so that causal attention costs
    cp rank 1           1   2                all ranks the same (TE: DualChunkSwap)

``fully_shard`` tells attention of the ranks, :func:`context_parallel_shard` cuts batches. What TE would compute
wrongly, or refuse without saying why, is refused here: at set-up what the model decides, in forward what a call does.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import logging
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from te_fsdp.check_points import check_points
from te_fsdp.collectives.agreement import rank
from te_fsdp.collectives.rendezvous import collective_call
from te_fsdp.errors import InputError, MeshError, PlacementError, PrecisionError, meant, require_flags
from te_fsdp.upstream import te as _te, te_modules as _te_modules, torch_dtensor as _torch

if TYPE_CHECKING:
    from torch import nn

    from te_fsdp.mesh import Meshes

_log = logging.getLogger("te_fsdp")

#: How attention over cp communicates, as TE names it.
COMM_TYPES = ("p2p", "all_gather", "a2a", "a2a+p2p")
_Batch = TypeVar("_Batch")
#: Key in a module's ``__dict__``: its calls are checked.
_WATCHED = "_te_fsdp_cp_watched"


def set_context_parallel(
    model: nn.Module, meshes: Meshes, *, comm_type: str = "p2p", a2a_size: int | None = None
) -> None:
    """Tell every attention of TE in ``model`` of the ranks of ``meshes.cp``, in place.

    :func:`te_fsdp.fully_shard` calls it with ``"p2p"``, unless attention knows its ranks already: call it before or
    after that to choose otherwise, or where you call torch's ``fully_shard`` yourself. Without a ``cp`` axis it does
    nothing.

    Local operation; with ``"a2a+p2p"`` collective over the world (process groups are made). Attention communicates over
    ``cp`` in forward and backward: keys and values around a ring (``"p2p"``, behind computation) or gathered
    (``"all_gather"``), or queries, keys, values and outputs from all to all (``"a2a"``).

    Args:
        model: A tree of modules, sharded or not.
        meshes: The job's.
        comm_type: ``"p2p"``, ``"all_gather"``, ``"a2a"``, or ``"a2a+p2p"``: ``"a2a"`` among ``a2a_size`` neighbouring
            ranks, which should be those of one node, ``"p2p"`` between these.
        a2a_size: Of ``"a2a+p2p"``; divides ``cp``.

    Raises:
        MeshError: An unknown ``comm_type``, or an ``a2a_size`` that does not fit.
        PlacementError: Heads that ``"a2a"`` cannot cut, or a softmax with a sink without ``"a2a"``.

    Source: ``set_context_parallel_group`` of TE 2.18 to 2.20.
    """
    _check_comm_type(meshes, comm_type, a2a_size)
    if meshes.cp is None:
        return
    cut = {"a2a": meshes.size("cp"), "a2a+p2p": a2a_size}.get(comm_type)
    for name, module in _attentions(model).items():
        _check_attention(name, module, comm_type, cut)
    group: Any = meshes.cp.get_group()
    ranks = dist.get_process_group_ranks(group)
    if comm_type == "a2a+p2p":
        assert a2a_size is not None
        with collective_call("set_context_parallel", meshes.device_mesh):
            group = [mesh.get_group() for mesh in meshes.cp_parts(a2a_size)]
    stream = _te_modules.new_stream()
    for module in model.modules():
        # Attention of both kinds; a layer would only pass the call on to these.
        if _te.kind_of(module) in ("MultiheadAttention", "DotProductAttention"):
            module.set_context_parallel_group(group, ranks, stream, comm_type)  # type: ignore[not-callable]
    _hook_attention_calls(model)


def _hook_attention_calls(model: nn.Module) -> None:
    """Check what each call of attention over ``cp`` decides, from now on. Local operation."""
    for module in _attentions(model).values():
        if _WATCHED not in module.__dict__:
            module.__dict__[_WATCHED] = True
            module.register_forward_pre_hook(_torch.disable_compile(_check_call), with_kwargs=True)


def check_attention(model: nn.Module, meshes: Meshes) -> None:
    """Refuse what :func:`set_attention_cp_group` could not make right. Local operation.

    Also attention that was told of other ranks than those of ``meshes.cp`` (``MeshError``), or of which only some was.
    """
    found = _attentions(model)
    told = {name: _ranks_of(module) for name, module in found.items()}
    wanted = None if meshes.cp is None else dist.get_process_group_ranks(meshes.cp.get_group())
    for name, ranks in told.items():
        if ranks != wanted and any(other is not None for other in told.values()):
            raise MeshError(
                f"{name}: context-parallel ranks of attention",
                expected="none" if wanted is None else f"{wanted}, those of meshes.cp",
                got=ranks,
                why="Attention would exchange keys and values with ranks that hold other sequences",
                fix="te_fsdp.set_context_parallel(model, meshes) with the meshes of fully_shard, instead of "
                "TransformerEngine's set_context_parallel_group",
            )
    if wanted is not None and None in told.values():
        for name, module in found.items():
            _check_attention(name, module, "p2p", None)


def set_attention_cp_group(model: nn.Module, meshes: Meshes) -> None:
    """``fully_shard``'s part with ``cp``: "p2p" where the user has not chosen, after :func:`check_attention`. Local."""
    ranks = [_ranks_of(module) for module in _attentions(model).values()]
    if None in ranks:
        set_context_parallel(model, meshes)
    _hook_attention_calls(model)
    if not ranks and rank() == 0:
        _log.warning(
            "fully_shard: cp=%d, and no attention of TransformerEngine in the model: attention of your own sees its "
            "rank's part of each sequence alone",
            meshes.size("cp"),
        )


def _attentions(model: nn.Module) -> dict[str, Any]:
    """Every core attention of TE, by a name for messages."""
    return {
        _torch.without_wrappers(name) or type(module).__name__: module
        for name, module in model.named_modules()
        if _te.kind_of(module) == "DotProductAttention"
    }


def _ranks_of(attention: Any) -> list[int] | None:
    """The global ranks that an attention was told of, ``None`` where they are one or none."""
    ranks = None if attention.cp_group is None else list(attention.cp_global_ranks)
    return ranks if ranks is not None and len(ranks) > 1 else None


def _check_comm_type(meshes: Meshes, comm_type: str, a2a_size: int | None) -> None:
    """Refuse words and sizes that TE does not know."""
    if comm_type not in COMM_TYPES:
        near = meant(comm_type, COMM_TYPES, {"ring": "p2p", "ulysses": "a2a", "allgather": "all_gather"})
        raise MeshError(
            "set_context_parallel: comm_type",
            expected=f"one of {COMM_TYPES}",
            got=repr(comm_type),
            fix=f"comm_type={near!r}" if near else "",
        )
    cp = meshes.size("cp")
    if comm_type == "a2a+p2p" and cp > 1 and (a2a_size is None or not 1 < a2a_size < cp or cp % a2a_size):
        raise MeshError(
            f"set_context_parallel: a2a_size over cp={cp}",
            expected=f"a divisor of {cp} between them",
            got=a2a_size,
            why="a2a+p2p exchanges heads among a2a_size neighbours, keys and values between such groups",
            fix="a2a_size=the ranks of cp that share a node; or comm_type='a2a' or 'p2p'",
        )
    if comm_type != "a2a+p2p" and a2a_size is not None:
        raise MeshError(
            f"set_context_parallel: a2a_size={a2a_size} with comm_type={comm_type!r}",
            why="Only a2a+p2p has groups of two kinds",
            fix="comm_type='a2a+p2p', or no a2a_size",
        )


def _check_attention(name: str, module: Any, comm_type: str, cut: int | None) -> None:
    """What follows from how an attention was built. ``cut``: over how many ranks its heads are dealt out."""
    for what in ("num_attention_heads", "num_gqa_groups"):
        if cut is None:
            break
        heads = getattr(module, what) // module.tp_size
        # cuDNN's rule of even numbers: TE 2.18 to 2.20, get_attention_backend
        if heads % cut or heads % 2:
            raise PlacementError(
                f"{name}: {what}={getattr(module, what)} over tp={module.tp_size} and {cut} ranks of {comm_type}",
                expected=f"a multiple of {math.lcm(cut, 2)} on each rank of tp",
                got=heads,
                why="a2a gives each of these ranks whole heads",
                fix="set_context_parallel(model, meshes, comm_type='p2p'), or a cp axis that divides the heads",
            )
    if module.softmax_type != "vanilla" and comm_type != "a2a":
        raise PlacementError(
            f"{name}: softmax_type={module.softmax_type!r} with comm_type={comm_type!r}",
            why="TransformerEngine puts parts of a row together without its sink",
            fix="te_fsdp.set_context_parallel(model, meshes, comm_type='a2a'), before fully_shard",
        )


@functools.cache
def _argument_names(cls: type) -> tuple[str, ...]:
    """Names of the arguments of TE's forward behind a bound or sharded class."""
    stock: Any = next(c for c in cls.__mro__ if c.__module__.startswith("transformer_engine."))
    return tuple(inspect.signature(stock.forward).parameters)[1:]


def _check_call(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """What a call of attention decides: mask, window, dtype, lengths. Local, the same on all ranks of cp."""
    if module.cp_group is None:
        return
    call = dict(zip(_argument_names(type(module)), args, strict=False)) | kwargs
    layout, mask, window = (
        getattr(module, name) if call.get(name) is None else call[name]
        for name in ("qkv_format", "attn_mask_type", "window_size")
    )
    sequence = 1 if layout == "bshd" else 0
    # TE 2.20 may be handed queries, keys and values in one tensor.
    query, key = (
        call[n] if call.get(n) is not None else call["qkv_layer"] for n in ("query_layer", "key_layer")
    )
    where = f"{type(module).__name__} over cp={len(module.cp_global_ranks)}"
    _check_mask(where, mask.replace(",", "_"), layout, query.shape[sequence] == key.shape[sequence])
    slides = window is not None and (window[0] != -1 or window[1] > 0)
    if slides and module.cp_comm_type in ("p2p", "a2a+p2p"):
        raise PlacementError(
            f"{where}: window_size={tuple(window)} with comm_type={module.cp_comm_type!r}",
            why="Keys come in pieces, of which TransformerEngine takes all or none",
            fix="te_fsdp.set_context_parallel(model, meshes, comm_type='all_gather'), or 'a2a'",
        )
    if query.dtype == torch.float32:
        raise PrecisionError(
            f"{where}: dtype of queries",
            expected="bfloat16 or float16",
            got=query.dtype,
            why="TransformerEngine attends over cp by flash attention or cuDNN, which have no others",
            fix="params_dtype=torch.bfloat16, torch.autocast, or a precision policy that computes in bf16",
        )
    if query.shape[sequence] % 2:
        raise InputError(
            f"{where}: tokens of a sequence on each rank",
            expected="an even number, two chunks",
            got=query.shape[sequence],
            fix="te_fsdp.context_parallel_shard(batch, meshes), of sequences that 2 x cp divides",
        )


def _check_mask(where: str, mask: str, layout: str, alike: bool) -> None:
    """Refuse masks that TE has no attention for. ``alike``: queries and keys are equally many."""
    fix = ""
    if mask == "arbitrary" or "bottom_right" in mask:
        fix = "attn_mask_type='causal' or 'no_mask'"
    elif layout != "thd" and "padding" in mask:
        # TE would keep the lengths of the first batch for all later ones of its shape (_get_cu_seqlens_info_with_cp).
        fix = "pack the sequences (qkv_format='thd'), or leave padding behind a causal mask out of the loss"
    elif "causal" in mask and not alike:
        fix = "attn_mask_type='no_mask' for attention to another sequence"
    if fix:
        raise PlacementError(
            f"{where}: attn_mask_type={mask!r}, qkv_format={layout!r}",
            why="TransformerEngine has no attention over a context-parallel axis for it",
            fix=fix,
        )


# --- batches


def context_parallel_shard(
    batch: _Batch,
    meshes: Meshes,
    *,
    dim: int = 1,
    cu_seqlens: torch.Tensor | None = None,
    check_inputs: bool = True,
) -> _Batch:
    """This rank's part of each sequence of a batch, in the order that TE's attention over ``cp`` takes it.

    Of 2 x cp equal chunks rank r gets chunks r and 2 x cp - 1 - r. Cut token ids, labels, masks of the loss and
    position ids alike. Without a ``cp`` axis the batch comes back as it is.

    Local operation. Batches of new shapes are compared over ``cp`` first (one gather of a checksum per tensor): its
    ranks must bring the same sequences.

    Args:
        batch: A tensor, or tensors in lists, tuples and mappings; each with the whole sequences in ``dim``, so
            ``(batch, sequence)`` or ``(sequence, ...)`` with ``dim=0``. Other values are passed on.
        meshes: The job's.
        dim: The sequence's, in all tensors.
        cu_seqlens: Of packed sequences (``thd``): where each begins, and the end of the last, int32 of shape
            ``(sequences + 1,)``, padding included. Each sequence is cut by itself.
        check_inputs: Compare batches of new shapes over ``cp``.

    Returns:
        The batch, of tensors with 1 / cp of the tokens.

    Raises:
        InputError: A sequence that 2 x cp does not divide; or ranks of cp that bring different batches, on all of them.

    Source: the order of ``get_batch_on_this_cp_rank`` of TE 2.18 to 2.20, which takes packed sequences alone.
    """
    require_flags("context_parallel_shard", check_inputs=check_inputs)
    if meshes.cp is None:
        return batch
    for check in check_points().batch if check_inputs else ():
        check(batch, meshes)
    size, rank_ = meshes.size("cp"), meshes.cp.get_local_rank()
    ends = None if cu_seqlens is None else [int(end) for end in cu_seqlens.tolist()]

    def cut(value: Any, path: str) -> Any:
        if isinstance(value, torch.Tensor):
            return _cut(value, path, size, rank_, dim, ends)
        if isinstance(value, Mapping):
            return {name: cut(one, f"{path}[{name!r}]") for name, one in value.items()}
        if isinstance(value, (list, tuple)):
            parts = [cut(one, f"{path}[{place}]") for place, one in enumerate(value)]
            # A named tuple takes its parts one by one.
            return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
        return value

    return cut(batch, "batch")


def _cut(
    tensor: torch.Tensor, path: str, size: int, rank_: int, dim: int, ends: list[int] | None
) -> torch.Tensor:
    if tensor.dim() <= max(dim, -dim - 1):
        raise InputError(
            f"context_parallel_shard: {path}",
            expected=f"a sequence in dim {dim}",
            got=f"shape {tuple(tensor.shape)}",
            fix="cut tensors without a batch dim by themselves, with dim=0, and leave scalars out",
        )
    ends = [0, tensor.shape[dim]] if ends is None else ends
    parts = []
    for start, end in itertools.pairwise(ends):
        chunk, left = divmod(end - start, 2 * size)
        if left or ends[-1] != tensor.shape[dim]:
            raise InputError(
                f"context_parallel_shard: {path}, {end - start} tokens of a sequence",
                expected=f"a multiple of {2 * size}, 2 x cp, and {ends[-1]} tokens in all",
                got=f"shape {tuple(tensor.shape)}",
                fix="pad each sequence (and its labels with the index that the loss ignores)",
            )
        parts += [tensor.narrow(dim, start + n * chunk, chunk) for n in (rank_, 2 * size - 1 - rank_)]
    return torch.cat(parts, dim)
