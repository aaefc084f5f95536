"""Small functions: rotary embedding, row padding, dropout, facts about the emulated device."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from te_fsdp.emulation._errors import EmulationError
from te_fsdp.emulation.tex.enums import NVTE_QKV_Format


def get_cublasLt_version() -> int:
    """Return a cuBLASLt version with every feature that TransformerEngine checks."""
    return 130600


def get_cudnn_version() -> int:
    """Return a cuDNN version with every feature that TransformerEngine checks."""
    return 91400


def get_num_cublas_streams() -> int:
    """Return the number of streams of a grouped GEMM: 1, because groups run one after the other."""
    return 1


def device_supports_multicast(device_id: int = -1) -> bool:
    """Return ``False``: NVLink multicast is not emulated."""
    del device_id
    return False


def ubuf_built_with_mpi() -> bool:
    """Return ``False``: Userbuffers are not available."""
    return False


def swap_first_dims(tensor: torch.Tensor, *, out: torch.Tensor | None) -> torch.Tensor:
    """Return the contiguous ``tensor.transpose(0, 1)``, written to ``out`` unless it is ``None``."""
    swapped = tensor.transpose(0, 1)
    if out is None:
        return swapped.contiguous()
    out.copy_(swapped)
    return out


def _rotate(x: torch.Tensor, interleaved: bool, back: bool) -> torch.Tensor:
    """Return ``[-odd, even]`` pairs, halves or neighbors; ``back`` gives the transposed map."""
    if interleaved:
        pairs = x.unflatten(-1, (-1, 2))
        first, second = pairs[..., 0], pairs[..., 1]
        return torch.stack((second, -first) if back else (-second, first), dim=-1).flatten(-2)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((second, -first) if back else (-second, first), dim=-1)


def _rope(
    input: torch.Tensor,
    freqs: torch.Tensor,
    start_positions: torch.Tensor | None,
    qkv_format: Any,
    interleaved: bool,
    cu_seqlens: torch.Tensor | None,
    cp: tuple[int, int],
    back: bool,
) -> torch.Tensor:
    """Rotate the first ``freqs.shape[-1]`` channels of each head by its position; copy the others.

    ``cp`` is size and rank of context parallelism: of 2 x size equal parts of each sequence the input has the rank-th
    from the front and the rank-th from the back. ``cu_seqlens`` bounds the packed sequences of (tokens, heads,
    channels), over all ranks of context parallelism; what follows the last is zero.
    """
    if int(qkv_format) == int(NVTE_QKV_Format.NVTE_THD):
        assert cu_seqlens is not None, "packed sequences have bounds"
        bounds = (cu_seqlens.long() // cp[0]).tolist()
        output = torch.zeros_like(input)
        for number, (start, end) in enumerate(itertools.pairwise(bounds)):
            first = None if start_positions is None else start_positions[number]
            one, format = input[start:end, None], NVTE_QKV_Format.NVTE_SBHD
            output[start:end] = _rope(one, freqs, first, format, interleaved, None, cp, back)[:, 0]
        return output
    sequence_first = int(qkv_format) == int(NVTE_QKV_Format.NVTE_SBHD)
    if not sequence_first and int(qkv_format) != int(NVTE_QKV_Format.NVTE_BSHD):
        raise NotImplementedError(
            f"fused rotary embedding of format {qkv_format!r} is not emulated on the CPU"
        )
    x = input if sequence_first else input.transpose(0, 1)
    length, batch, channels = x.shape[0], x.shape[1], freqs.shape[-1]
    if not length:
        return input.clone()
    angles = freqs.float().reshape(freqs.shape[0], channels)
    size, rank = cp
    positions = torch.arange(length)
    if size > 1:
        half = length // 2
        positions = torch.cat(
            (positions[:half] + rank * half, positions[half:] + (2 * size - rank - 2) * half)
        )
    positions = positions.unsqueeze(1).expand(length, batch)
    if start_positions is not None:
        positions = positions + start_positions.reshape(1, batch).long()
    if int(positions.max()) >= angles.shape[0]:
        raise EmulationError(
            f"rotary embedding has {angles.shape[0]} positions, but position {int(positions.max())} is used"
        )
    angles = angles[positions].unsqueeze(2)
    head = x[..., :channels].float()
    if back:
        rotated = head * angles.cos() + _rotate(head * angles.sin(), interleaved, True)
    else:
        rotated = head * angles.cos() + _rotate(head, interleaved, False) * angles.sin()
    result = torch.cat((rotated.to(input.dtype), x[..., channels:]), dim=-1)
    # A copy has the strides of a new tensor also where a dimension has size 1: TransformerEngine reads them.
    return torch.empty(input.shape, dtype=input.dtype).copy_(
        result if sequence_first else result.transpose(0, 1)
    )


def fused_rope_forward(
    input: torch.Tensor,
    freqs: torch.Tensor,
    start_positions: torch.Tensor | None,
    qkv_format: Any,
    interleaved: bool,
    cu_seqlens: torch.Tensor | None,
    cp_size: int,
    cp_rank: int,
) -> torch.Tensor:
    """Return the rotary embedding of (s, b, h, d) or (b, s, h, d), angles (s, 1, 1, d2) (``common/fused_rope``)."""
    return _rope(
        input, freqs, start_positions, qkv_format, interleaved, cu_seqlens, (cp_size, cp_rank), False
    )


def fused_rope_backward(
    output_grads: torch.Tensor,
    freqs: torch.Tensor,
    start_positions: torch.Tensor | None,
    qkv_format: Any,
    interleaved: bool,
    cu_seqlens: torch.Tensor | None,
    cp_size: int,
    cp_rank: int,
) -> torch.Tensor:
    """Return the backward of :func:`fused_rope_forward`: the transposed rotation."""
    return _rope(
        output_grads, freqs, start_positions, qkv_format, interleaved, cu_seqlens, (cp_size, cp_rank), True
    )


def _copy_rows(
    input: torch.Tensor, output: torch.Tensor, input_rows: Sequence[int], output_rows: Sequence[int]
) -> None:
    if (
        sum(input_rows) != input.shape[0]
        or sum(output_rows) != output.shape[0]
        or len(input_rows) != len(output_rows)
    ):
        raise EmulationError(
            f"row counts {list(input_rows)} -> {list(output_rows)} do not fit tensors of {input.shape[0]} "
            f"and {output.shape[0]} rows"
        )
    output.zero_()
    source = target = 0
    for rows, new_rows in zip(input_rows, output_rows, strict=True):
        kept = min(rows, new_rows)
        output[target : target + kept] = input[source : source + kept]
        source, target = source + rows, target + new_rows


def fused_multi_row_padding(
    input: torch.Tensor, output: torch.Tensor, input_row_list: list[int], padded_input_row_list: list[int]
) -> None:
    """Copy groups of rows into a buffer with longer groups, the rest of each zero."""
    _copy_rows(input, output, input_row_list, padded_input_row_list)


def fused_multi_row_unpadding(
    input: torch.Tensor, output: torch.Tensor, input_row_list: list[int], unpadded_input_row_list: list[int]
) -> None:
    """Return the inverse of :func:`fused_multi_row_padding`."""
    _copy_rows(input, output, input_row_list, unpadded_input_row_list)


def dropout_fwd(
    input: torch.Tensor, dropout_probability: float, out: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``(output, keep mask)``, kept values over their probability; the mask has a byte for each value."""
    keep = 1.0 - dropout_probability
    mask = torch.empty(input.shape, dtype=torch.uint8, device=input.device).bernoulli_(keep)
    result = (input.float() * mask / keep).to(input.dtype)
    return (result if out is None else out.copy_(result)), mask


def dropout_bwd(
    grad_output: torch.Tensor,
    mask: torch.Tensor,
    dropout_probability: float,
    grad_input: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the gradient of :func:`dropout_fwd`."""
    result = (grad_output.float() * mask / (1.0 - dropout_probability)).to(grad_output.dtype)
    return result if grad_input is None else grad_input.copy_(result)


__all__ = [
    "device_supports_multicast",
    "dropout_bwd",
    "dropout_fwd",
    "fused_multi_row_padding",
    "fused_multi_row_unpadding",
    "fused_rope_backward",
    "fused_rope_forward",
    "get_cublasLt_version",
    "get_cudnn_version",
    "get_num_cublas_streams",
    "swap_first_dims",
    "ubuf_built_with_mpi",
]
