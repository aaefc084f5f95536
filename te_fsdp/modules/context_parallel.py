"""Context parallelism: attention over sequences that are split over the ranks of ``cp``.

    sequence        0   1   2   3            2 x cp equal chunks; cp = 2
    cp rank 0       0           3            rank r has chunks r and 2 x cp - 1 - r, so that all ranks have
    cp rank 1           1   2                the same work in causal attention (TE: DualChunkSwap)

``fully_shard`` sets the cp group of attention modules. :func:`context_parallel_shard` splits batches.
Configurations that TE would compute wrongly, or reject without a reason, raise here. Settings of the model are
checked at setup, arguments of a call in its forward.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import logging
import math
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from te_fsdp.check_points import check_points
from te_fsdp.collectives.agreement import rank
from te_fsdp.collectives.rendezvous import collective_call
from te_fsdp.collectives.watching import run_while_all_live
from te_fsdp.errors import (
    InputError,
    MeshError,
    PlacementError,
    PrecisionError,
    require_flags,
    require_kind,
    suggest,
)
from te_fsdp.mesh import Meshes
from te_fsdp.records import module_record
from te_fsdp.upstream import te as _te, te_modules as _te_modules, torch_dtensor as _torch

_log = logging.getLogger("te_fsdp")

#: TE's names of the communication patterns of attention over cp.
COMM_TYPES = ("p2p", "all_gather", "a2a", "a2a+p2p")
_Batch = TypeVar("_Batch")


def set_context_parallel(
    model: nn.Module, meshes: Meshes, *, comm_type: str = "p2p", a2a_size: int | None = None
) -> None:
    """Set the ranks of ``meshes.cp`` on every TE attention module of ``model``, in place.

    :func:`te_fsdp.fully_shard` calls it with ``"p2p"`` unless attention has a cp group already. Call it before
    or after ``fully_shard`` to choose a different pattern, or if you call torch's ``fully_shard`` yourself.
    Without a ``cp`` axis it does nothing.

    Local operation. With ``"a2a+p2p"`` it is collective over the world because it creates process groups.
    Attention then communicates over ``cp`` in forward and backward. It sends keys and values around a ring,
    overlapped with computation (``"p2p"``), or all-gathers them (``"all_gather"``). With ``"a2a"`` it runs an
    all-to-all of queries, keys, values and outputs.

    Args:
        model: A module tree, sharded or not.
        meshes: Meshes of the job.
        comm_type: ``"p2p"``, ``"all_gather"``, ``"a2a"``, or ``"a2a+p2p"``. The last one is ``"a2a"`` within
            groups of ``a2a_size`` adjacent ranks (ideally of one node) and ``"p2p"`` between these groups.
        a2a_size: Group size of ``"a2a+p2p"``. It divides ``cp``.

    Raises:
        MeshError: ``comm_type`` is unknown, or ``a2a_size`` does not match it or the mesh.
        PlacementError: ``"a2a"`` cannot split the heads, or a softmax with a sink is used without ``"a2a"``.

    Source: ``set_context_parallel_group`` of TE 2.18 to 2.20.
    """
    _check_comm_type(meshes, comm_type, a2a_size)
    if meshes.cp is None:
        return
    # Only all-to-all splits heads: "p2p" and "all_gather" keep all heads of a tp rank.
    head_ranks = {"a2a": meshes.size("cp"), "a2a+p2p": a2a_size}.get(comm_type)
    for name, module in _attentions(model).items():
        _check_attention(name, module, comm_type, head_ranks)
    group: Any = meshes.cp.get_group()
    ranks = dist.get_process_group_ranks(group)
    if comm_type == "a2a+p2p":
        assert a2a_size is not None
        with collective_call("set_context_parallel", meshes.device_mesh):
            parts = run_while_all_live(lambda: meshes.cp_parts(a2a_size))
            group = [mesh.get_group() for mesh in parts]
    # TE overlaps the ring with computation on a second stream. All modules share it.
    stream = _te_modules.new_stream()
    for module in model.modules():
        # A TransformerLayer would only forward the call to these modules.
        if _te.kind_of(module) in ("MultiheadAttention", "DotProductAttention"):
            module.set_context_parallel_group(group, ranks, stream, comm_type)  # type: ignore[not-callable]
    _hook_attention_calls(model)


def _hook_attention_calls(model: nn.Module) -> None:
    """Register a check of every call of attention over ``cp``. Local operation."""
    for module in _attentions(model).values():
        hooks = module_record(module).hooks
        # Once per module: both `set_context_parallel` and `fully_shard` register it.
        if _check_call not in hooks:
            hooks.add(_check_call)
            module.register_forward_pre_hook(_torch.disable_compile(_check_call), with_kwargs=True)


def check_attention(model: nn.Module, meshes: Meshes) -> None:
    """Check that attention supports context parallelism on these meshes. Local operation.

    Raise MeshError if an attention module uses ranks other than those of ``meshes.cp``, or only some modules use them.
    """
    attentions = _attentions(model)
    groups = {name: _ranks_of(module) for name, module in attentions.items()}
    cp_ranks = None if meshes.cp is None else dist.get_process_group_ranks(meshes.cp.get_group())
    for name, ranks in groups.items():
        # Without any group `fully_shard` sets that of the meshes later.
        if ranks != cp_ranks and any(other is not None for other in groups.values()):
            raise MeshError(
                f"{name}: context-parallel ranks of attention",
                expected="none" if cp_ranks is None else f"{cp_ranks}, those of meshes.cp",
                got=ranks,
                why="Attention would exchange keys and values with ranks that have different sequences",
                fix="te_fsdp.set_context_parallel(model, meshes) with the meshes of fully_shard, instead of "
                "TransformerEngine's set_context_parallel_group",
            )
    if cp_ranks is not None and None in groups.values():
        for name, module in attentions.items():
            _check_attention(name, module, "p2p", None)


def set_attention_cp_group(model: nn.Module, meshes: Meshes) -> None:
    """Set the cp group with "p2p" unless the user has set one, after :func:`check_attention`. Local operation."""
    ranks = [_ranks_of(module) for module in _attentions(model).values()]
    # The user may have set the group with TE's own method, or with a different pattern.
    if None in ranks:
        set_context_parallel(model, meshes)
    _hook_attention_calls(model)
    if not ranks and rank() == 0:
        _log.warning(
            "fully_shard: cp=%d, but the model has no TransformerEngine attention. Your own attention sees only "
            "its rank's part of each sequence",
            meshes.size("cp"),
        )


def _attentions(model: nn.Module) -> dict[str, Any]:
    """Return every DotProductAttention of the model by its FQN."""
    return {
        _torch.without_wrappers(name) or type(module).__name__: module
        for name, module in model.named_modules()
        if _te.kind_of(module) == "DotProductAttention"
    }


def _ranks_of(attention: Any) -> list[int] | None:
    """Return the global ranks of an attention module's cp group; ``None`` for a single rank or no group."""
    ranks = None if attention.cp_group is None else list(attention.cp_global_ranks)
    return ranks if ranks is not None and len(ranks) > 1 else None


def _check_comm_type(meshes: Meshes, comm_type: str, a2a_size: int | None) -> None:
    """Check ``comm_type`` and ``a2a_size``; raise MeshError if TE does not support them."""
    require_kind("set_context_parallel", "meshes", meshes, Meshes, expected="te_fsdp.Meshes", error=MeshError)
    if comm_type not in COMM_TYPES:
        # Other libraries and papers use these names for the same schemes.
        guess = suggest(comm_type, COMM_TYPES, {"ring": "p2p", "ulysses": "a2a", "allgather": "all_gather"})
        raise MeshError(
            "set_context_parallel: comm_type",
            expected=f"one of {COMM_TYPES}",
            got=repr(comm_type),
            fix=f"comm_type={guess!r}" if guess else "",
        )
    cp = meshes.size("cp")
    if comm_type == "a2a+p2p" and cp > 1 and (a2a_size is None or not 1 < a2a_size < cp or cp % a2a_size):
        raise MeshError(
            f"set_context_parallel: a2a_size over cp={cp}",
            expected=f"a divisor of {cp} other than 1 and {cp}",
            got=a2a_size,
            why="a2a+p2p exchanges heads within groups of a2a_size ranks, and keys and values between these groups",
            fix="set a2a_size to the number of cp ranks per node, or use comm_type='a2a' or 'p2p'",
        )
    if comm_type != "a2a+p2p" and a2a_size is not None:
        raise MeshError(
            f"set_context_parallel: a2a_size={a2a_size} with comm_type={comm_type!r}",
            why="Only a2a+p2p has two levels of groups",
            fix="use comm_type='a2a+p2p', or omit a2a_size",
        )


def _check_attention(name: str, module: Any, comm_type: str, head_ranks: int | None) -> None:
    """Check the constructor settings of an attention module. ``head_ranks`` share its heads."""
    for option in ("num_attention_heads", "num_gqa_groups"):
        if head_ranks is None:
            break
        heads = getattr(module, option) // module.tp_size
        # cuDNN needs even numbers of heads (get_attention_backend of TE 2.18 to 2.20).
        if heads % head_ranks or heads % 2:
            raise PlacementError(
                f"{name}: {option}={getattr(module, option)} over tp={module.tp_size} and "
                f"{head_ranks} ranks of {comm_type}",
                expected=f"a multiple of {math.lcm(head_ranks, 2)} on each rank of tp",
                got=heads,
                why="a2a assigns complete heads to each of these ranks",
                fix="set_context_parallel(model, meshes, comm_type='p2p'), or a cp size that divides the number of "
                "heads",
            )
    if module.softmax_type != "vanilla" and comm_type != "a2a":
        raise PlacementError(
            f"{name}: softmax_type={module.softmax_type!r} with comm_type={comm_type!r}",
            why="TransformerEngine combines parts of a softmax row without the sink",
            fix="te_fsdp.set_context_parallel(model, meshes, comm_type='a2a'), before fully_shard",
        )


@functools.cache
def _argument_names(cls: type) -> tuple[str, ...]:
    """Return the argument names of TE's forward for a bound or sharded class."""
    stock: Any = next(c for c in _te.stock_classes(cls) if c.__module__.startswith("transformer_engine."))
    return tuple(inspect.signature(stock.forward).parameters)[1:]


def _check_call(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Check mask, window, dtype and sequence length of an attention call. Local operation."""
    # The result is the same on all cp ranks.
    if module.cp_group is None:
        return
    # Arguments may be positional, and the wrappers of FSDP2 and te_fsdp hide the signature.
    call = dict(zip(_argument_names(type(module)), args, strict=False)) | kwargs
    layout, mask, window = (
        getattr(module, name) if call.get(name) is None else call[name]
        for name in ("qkv_format", "attn_mask_type", "window_size")
    )
    sequence = 1 if layout == "bshd" else 0
    # TE 2.20 also accepts query, key and value in one tensor.
    query, key = (
        call[n] if call.get(n) is not None else call["qkv_layer"] for n in ("query_layer", "key_layer")
    )
    where = f"{type(module).__name__} over cp={len(module.cp_global_ranks)}"
    mask = mask.replace(",", "_")
    is_self_attention = query.shape[sequence] == key.shape[sequence]
    fix = ""
    if mask == "arbitrary" or "bottom_right" in mask:
        fix = "attn_mask_type='causal' or 'no_mask'"
    elif layout != "thd" and "padding" in mask:
        # TE caches the lengths of the first batch for all batches of its shape (_get_cu_seqlens_info_with_cp).
        fix = "pack the sequences (qkv_format='thd'), or use a causal mask and exclude the padding from the loss"
    elif "causal" in mask and not is_self_attention:
        fix = "attn_mask_type='no_mask' for cross-attention"
    if fix:
        raise PlacementError(
            f"{where}: attn_mask_type={mask!r}, qkv_format={layout!r}",
            why="TransformerEngine does not support it with context parallelism",
            fix=fix,
        )
    slides = window is not None and (window[0] != -1 or window[1] > 0)
    if slides and module.cp_comm_type in ("p2p", "a2a+p2p"):
        raise PlacementError(
            f"{where}: window_size={tuple(window)} with comm_type={module.cp_comm_type!r}",
            why="TransformerEngine attends to all or none of the keys of a chunk",
            fix="te_fsdp.set_context_parallel(model, meshes, comm_type='all_gather'), or 'a2a'",
        )
    if query.dtype == torch.float32:
        raise PrecisionError(
            f"{where}: dtype of queries",
            expected="bfloat16 or float16",
            got=query.dtype,
            why="TransformerEngine's attention over cp uses flash attention or cuDNN, which support no other dtypes",
            fix="params_dtype=torch.bfloat16, torch.autocast, or a precision policy that computes in bf16",
        )
    if query.shape[sequence] % 2:
        raise InputError(
            f"{where}: tokens per sequence and rank",
            expected="an even number (two chunks)",
            got=query.shape[sequence],
            fix="use te_fsdp.context_parallel_shard(batch, meshes) with sequence lengths divisible by 2 x cp",
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
    """Return this rank's part of each sequence of a batch, in the order that TE's attention over ``cp`` expects.

    Each sequence is split into 2 x cp equal chunks. Rank r gets chunks r and 2 x cp - 1 - r. Shard token ids,
    labels, loss masks and position ids the same way. Without a ``cp`` axis the batch is returned unchanged.

    Local operation. Batches of new shapes are compared over ``cp`` first (one gather of a checksum per tensor),
    because all ranks of a cp group must pass the same sequences.

    Args:
        batch: A tensor, or tensors in lists, tuples and mappings, each with the full sequences in ``dim``: shape
            ``(batch, sequence)``, or ``(sequence, ...)`` with ``dim=0``. Other values are returned unchanged.
        meshes: Meshes of the job.
        dim: Sequence dimension of all tensors.
        cu_seqlens: For packed sequences (``thd``): offsets of the sequences and the total length, int32 of shape
            ``(sequences + 1,)``, including padding. Each sequence is split separately.
        check_inputs: Whether to compare batches of new shapes over ``cp``.

    Returns:
        The batch with 1 / cp of the tokens in each tensor.

    Raises:
        InputError: 2 x cp does not divide the length of a sequence, or ranks of cp pass different batches. All
            ranks of the cp group raise the latter.

    Source: chunk order of ``get_batch_on_this_cp_rank`` of TE 2.18 to 2.20, which supports packed sequences only.
    """
    require_flags("context_parallel_shard", check_inputs=check_inputs)
    require_kind(
        "context_parallel_shard", "meshes", meshes, Meshes, expected="te_fsdp.Meshes", error=MeshError
    )
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
            return {name: cut(item, f"{path}[{name!r}]") for name, item in value.items()}
        if isinstance(value, (list, tuple)):
            parts = [cut(item, f"{path}[{index}]") for index, item in enumerate(value)]
            # A named tuple takes its fields as separate arguments.
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
            fix="shard tensors without a batch dimension separately with dim=0, and omit scalars",
        )
    ends = [0, tensor.shape[dim]] if ends is None else ends
    parts = []
    for start, end in itertools.pairwise(ends):
        # Two chunks of each rank: one of the first half and its mirror image (DualChunkSwap).
        chunk, remainder = divmod(end - start, 2 * size)
        if remainder or ends[-1] != tensor.shape[dim]:
            raise InputError(
                f"context_parallel_shard: {path}, {end - start} tokens of a sequence",
                expected=f"a multiple of {2 * size}, 2 x cp, and {ends[-1]} tokens in all",
                got=f"shape {tuple(tensor.shape)}",
                fix="pad each sequence (and its labels with the index that the loss ignores)",
            )
        parts += [tensor.narrow(dim, start + n * chunk, chunk) for n in (rank_, 2 * size - 1 - rank_)]
    return torch.cat(parts, dim)
