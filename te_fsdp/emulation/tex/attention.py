"""Fused attention, as TransformerEngine calls it over a context-parallel axis or for padded packed sequences.

Over a context-parallel axis cuDNN (or flash-attn) attends from this rank's queries to one part of the keys at a time,
and TransformerEngine's own Python puts the parts together, by the logarithm of each row's sum of exponentials. Here
that one call is plain PyTorch: products and softmax in fp32, results rounded once to the dtype of the inputs. Queries,
keys and values are tensors of 16 bits, (batch, sequence, heads, channels) or (sequence, batch, heads, channels).
Features of cuDNN that are not emulated have no available backend: FP8 attention, biases, sinks, dropout, packed
sequences over that axis.

Packed sequences (tokens, heads, channels) may have padding between them: each one is attended to by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from te_fsdp.emulation.tex import enums
from te_fsdp.emulation.tex.enums import DType, NVTE_Fused_Attn_Backend, NVTE_QKV_Format, NVTE_QKV_Layout

#: Layout -> whether it is sequence first. Queries, keys and values of one buffer come as views of it.
_LAYOUTS = {
    int(layout): name.startswith("NVTE_SB")
    for name, layout in NVTE_QKV_Layout.__members__.items()
    if name.startswith(("NVTE_SB", "NVTE_BS")) and not ("SBHD" in name and "BSHD" in name)
}
_FORMATS = {int(NVTE_QKV_Format.NVTE_BSHD): False, int(NVTE_QKV_Format.NVTE_SBHD): True}
_CAUSAL = (
    int(enums.NVTE_Mask_Type.NVTE_CAUSAL_MASK),
    int(enums.NVTE_Mask_Type.NVTE_CAUSAL_BOTTOM_RIGHT_MASK),
)
_NO_MASK = int(enums.NVTE_Mask_Type.NVTE_NO_MASK)
_PACKED = {
    int(layout)
    for name, layout in NVTE_QKV_Layout.__members__.items()
    if name.startswith("NVTE_T") and not name.endswith(("BSHD", "SBHD"))
}
#: Mask of packed sequences -> mask within one sequence.
_OF_ONE = {
    int(enums.NVTE_Mask_Type.NVTE_PADDING_MASK): enums.NVTE_Mask_Type.NVTE_NO_MASK,
    int(enums.NVTE_Mask_Type.NVTE_PADDING_CAUSAL_MASK): enums.NVTE_Mask_Type.NVTE_CAUSAL_MASK,
    int(
        enums.NVTE_Mask_Type.NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK
    ): enums.NVTE_Mask_Type.NVTE_CAUSAL_BOTTOM_RIGHT_MASK,
}
#: Position of each argument that decides here, in the call of TransformerEngine before 2.20.
_PLACES = {
    "qkv_dtype": 1,
    "qkv_layout": 3,
    "bias_type": 4,
    "attn_mask_type": 5,
    "softmax_type": 6,
    "dropout": 7,
    "head_dim_qk": 12,
    "head_dim_v": 13,
}


def get_fused_attn_backend(*args: Any) -> Any:
    """Return the backend for an attention that is emulated here, else none.

    TransformerEngine 2.20 passes one object and expects ``(backend, reason)``, older ones pass the fields and expect
    the backend.
    """
    fields = {name: getattr(args[0], name) if len(args) == 1 else args[at] for name, at in _PLACES.items()}
    reason = _refused(fields)
    backend = (
        NVTE_Fused_Attn_Backend.NVTE_No_Backend
        if reason
        else NVTE_Fused_Attn_Backend.NVTE_F16_arbitrary_seqlen
    )
    return (backend, reason) if len(args) == 1 else backend


def _refused(fields: dict[str, Any]) -> str:
    """Return why an attention has no fused backend; empty if it has one."""
    if int(fields["qkv_dtype"]) not in (int(DType.kFloat16), int(DType.kBFloat16)):
        return "cuDNN attends in fp16 and bf16; FP8 is not emulated on the CPU"
    if fields["head_dim_qk"] % 8 or fields["head_dim_v"] % 8:
        return "cuDNN takes heads of a multiple of 8 channels"
    return _not_emulated(
        fields["qkv_layout"],
        fields["bias_type"],
        fields["attn_mask_type"],
        fields["softmax_type"],
        fields["dropout"],
    )


def _not_emulated(layout: Any, bias: Any, mask: Any, softmax: Any, dropout: float) -> str:
    is_packed = int(layout) in _PACKED and int(mask) in _OF_ONE
    if int(layout) not in _LAYOUTS and not is_packed:
        return "fused attention of this layout is not emulated on the CPU"
    if int(bias) or int(softmax) or dropout:
        return "fused attention with bias, sinks or dropout is not emulated on the CPU"
    return (
        ""
        if is_packed or int(mask) in (_NO_MASK, *_CAUSAL)
        else "padding in fused attention is not emulated on the CPU"
    )


def _check(layout: Any, formats: tuple[Any, ...], bias: Any, mask: Any, softmax: Any, dropout: float) -> bool:
    """Return whether tensors are sequence first; refuses what :func:`get_fused_attn_backend` does."""
    reason = _not_emulated(layout, bias, mask, softmax, dropout)
    first = _LAYOUTS.get(int(layout))
    if reason or any(_FORMATS.get(int(one)) is not first for one in formats):
        raise NotImplementedError(
            reason or "fused attention that changes the layout is not emulated on the CPU"
        )
    return bool(first)


def _heads_first(tensor: torch.Tensor, sequence_first: bool, heads: int) -> torch.Tensor:
    """Return an fp32 tensor (batch, heads, sequence, channels). Shared keys and values are copied per head."""
    turned = tensor.permute(1, 2, 0, 3) if sequence_first else tensor.permute(0, 2, 1, 3)
    return turned.float().repeat_interleave(heads // turned.shape[1], dim=1)


def _given_back(tensor: torch.Tensor, like: torch.Tensor, sequence_first: bool) -> torch.Tensor:
    """Invert :func:`_heads_first` in the dtype of ``like``. Values of shared heads are summed."""
    groups = like.shape[2]
    summed = tensor.unflatten(1, (groups, tensor.shape[1] // groups)).sum(2)
    turned = summed.permute(2, 0, 1, 3) if sequence_first else summed.permute(0, 2, 1, 3)
    return turned.to(like.dtype).contiguous()


def _scores(
    q: torch.Tensor, k: torch.Tensor, scale: float, mask: Any, window: tuple[int, int], bottom_right: bool
) -> torch.Tensor:
    """Return the scaled scores in fp32, minus infinity for masked keys."""
    queries, keys = q.shape[-2], k.shape[-2]
    left, right = window[0], 0 if int(mask) in _CAUSAL else window[1]
    bottom = bottom_right or int(mask) == int(enums.NVTE_Mask_Type.NVTE_CAUSAL_BOTTOM_RIGHT_MASK)
    distance = torch.arange(keys) - torch.arange(queries).unsqueeze(1) - (keys - queries if bottom else 0)
    hidden = torch.zeros(queries, keys, dtype=torch.bool)
    if right >= 0:
        hidden |= distance > right
    if left >= 0:
        hidden |= distance < -left
    return (scale * (q @ k.transpose(-1, -2))).masked_fill(hidden, float("-inf"))


def fused_attn_fwd(
    max_seqlen_q: int,
    max_seqlen_kv: int,
    is_training: bool,
    attn_scale: float,
    p_dropout: float,
    set_zero: bool,
    qkv_layout: Any,
    o_format: Any,
    qkv_scale_inv_format: Any,
    bias_type: Any,
    attn_mask_type: Any,
    softmax_type: Any,
    window_size: tuple[int, int],
    bottom_right_diagonal: bool,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_kv: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *rest: Any,
) -> list[torch.Tensor]:
    """Return ``[output, logarithms of the rows' sums (batch, heads, queries, 1) in fp32, random state]``."""
    del max_seqlen_q, max_seqlen_kv, is_training, set_zero, qkv_scale_inv_format
    return_max_logit = rest[-2]
    if int(qkv_layout) in _PACKED:
        if reason := _not_emulated(qkv_layout, bias_type, attn_mask_type, softmax_type, p_dropout):
            raise NotImplementedError(reason)
        options = (attn_scale, _OF_ONE[int(attn_mask_type)], window_size, bottom_right_diagonal)
        output = q.new_zeros(*q.shape[:2], v.shape[2])
        sums = q.new_zeros(*q.shape[:2], 1, dtype=torch.float32)
        largest = [torch.full_like(sums, float("-inf"))] if return_max_logit else []
        for queries, keys in _sequences(cu_seqlens_q, cu_seqlens_kv, *rest[1:3]):
            found = _forward(*(one[None] for one in (q[queries], k[keys], v[keys])), False, *options)
            output[queries] = found[0][0]
            for packed, one in zip((sums, *largest), found[1:], strict=False):
                packed[queries] = one[0].transpose(0, 1)
        return [output, sums, *largest, torch.zeros(2, dtype=torch.int64)]
    first = _check(qkv_layout, (o_format,), bias_type, attn_mask_type, softmax_type, p_dropout)
    options = (attn_scale, attn_mask_type, window_size, bottom_right_diagonal)
    output, sums, largest_scores = _forward(q, k, v, first, *options)
    return [output, sums, *([largest_scores] if return_max_logit else []), torch.zeros(2, dtype=torch.int64)]


def _sequences(*bounds: torch.Tensor) -> Iterator[tuple[slice, slice]]:
    """Yield the queries and the keys of each sequence.

    ``bounds`` are cumulative lengths of queries and of keys, and the same with the padding behind each sequence.
    """
    lengths = (one.diff().tolist() for one in bounds[:2])
    starts = (one[:-1].tolist() for one in bounds[2:])
    for queries, keys, query, key in zip(*lengths, *starts, strict=True):
        if queries:
            yield slice(query, query + queries), slice(key, key + keys)


def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, first: bool, scale: float, *mask: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the output, the logarithms of the rows' sums, and the rows' largest scores."""
    heads = q.shape[2]
    query, key, value = (_heads_first(one, first, heads) for one in (q, k, v))
    scores = _scores(query, key, scale, *mask)
    sums = scores.logsumexp(-1, keepdim=True)
    # A row that sees no key has a sum of zero, and attends to nothing.
    attended = torch.exp(scores - sums).nan_to_num(0.0) @ value
    output = _given_back(attended, torch.empty((), dtype=q.dtype).expand(1, 1, heads, 1), first)
    return output, sums, scores.amax(-1, keepdim=True)


def fused_attn_bwd(
    max_seqlen_q: int,
    max_seqlen_kv: int,
    attn_scale: float,
    p_dropout: float,
    set_zero: bool,
    qkv_layout: Any,
    o_format: Any,
    do_format: Any,
    dqkv_layout: Any,
    qkv_scale_inv_format: Any,
    do_scale_inv_format: Any,
    bias_type: Any,
    attn_mask_type: Any,
    softmax_type: Any,
    window_size: tuple[int, int],
    bottom_right_diagonal: bool,
    deterministic: bool,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_kv: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    d_o: torch.Tensor,
    fake_dtype: Any,
    aux_ctx_tensors: list[torch.Tensor],
    *rest: Any,
) -> list[torch.Tensor | None]:
    """Return ``[dquery, dkey, dvalue, None, None]``, using the sums of full rows (these keys may be a part)."""
    del max_seqlen_q, max_seqlen_kv, set_zero, qkv_scale_inv_format, do_scale_inv_format, deterministic
    del fake_dtype
    if int(dqkv_layout) != int(qkv_layout):
        raise NotImplementedError("fused attention that changes the layout is not emulated on the CPU")
    inputs, sums = (q, k, v, o, d_o), aux_ctx_tensors[0]
    if int(qkv_layout) in _PACKED:
        options = (attn_scale, _OF_ONE[int(attn_mask_type)], window_size, bottom_right_diagonal)
        found = [torch.zeros_like(one) for one in inputs[:3]]
        for queries, keys in _sequences(cu_seqlens_q, cu_seqlens_kv, *rest[:2]):
            places = (queries, keys, keys, queries, queries)
            parts = [one[place][None] for one, place in zip(inputs, places, strict=True)]
            back = _backward(*parts, sums[queries].transpose(0, 1)[None], False, *options)
            for gradient, place, one in zip(found, places, back, strict=False):
                gradient[place] = one[0]
        return [*found, None, None]
    first = _check(qkv_layout, (o_format, do_format), bias_type, attn_mask_type, softmax_type, p_dropout)
    options = (attn_scale, attn_mask_type, window_size, bottom_right_diagonal)
    return [*_backward(*inputs, sums, first, *options), None, None]


def _backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    d_o: torch.Tensor,
    sums: torch.Tensor,
    first: bool,
    scale: float,
    *mask: Any,
) -> list[torch.Tensor]:
    """Return the gradients of queries, keys and values."""
    query, key, value, output, gradient = (_heads_first(one, first, q.shape[2]) for one in (q, k, v, o, d_o))
    scores = _scores(query, key, scale, *mask)
    probabilities = torch.exp(scores - sums.reshape(*scores.shape[:-1], 1)).nan_to_num(0.0)
    inner = (gradient * output).sum(-1, keepdim=True)
    of_scores = scale * probabilities * (gradient @ value.transpose(-1, -2) - inner)
    found = (of_scores @ key, of_scores.transpose(-1, -2) @ query, probabilities.transpose(-1, -2) @ gradient)
    return [_given_back(one, like, first) for one, like in zip(found, (q, k, v), strict=True)]


__all__ = ["fused_attn_bwd", "fused_attn_fwd", "get_fused_attn_backend"]
