"""By which angles rotary embeddings turn: those of TransformerEngine's module, and of what a ``config.json`` says.

Facts are those of ``RotaryPositionEmbedding`` of TransformerEngine 2.18 to 2.20.2 (``pytorch/attention/rope.py``), and
of ``modeling_rope_utils.py`` of transformers 4.57 and 5.23.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from te_fsdp.errors import CheckpointError
from te_fsdp.modules.semantics import Semantics

#: Name of the buffer that TransformerEngine's module has them in.
_BUFFER = "inv_freq"


def frequencies_of(buffers: Iterable[str], read: Callable[[str], torch.Tensor]) -> dict[str, torch.Tensor]:
    """Angles of one position that rotary embeddings have, by the embedding's name, of a model's buffers. Local."""
    names = (name for name in buffers if name.rpartition(".")[2] == _BUFFER)
    return {name.removesuffix(_BUFFER).removesuffix("."): read(name) for name in names}


def wanted_rotary(
    one: Semantics, found: torch.Tensor | None, base: float, dim: int, scaling: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Settings that a rotary embedding of TransformerEngine's must have, to be as a ``config.json`` says. Local.

    Equal to its own where it turns heads of ``dim`` channels as it shall, to a rounding. ``found`` are its frequencies,
    perhaps written to since it was made; ``None``: what its constructor makes. ``scaling`` is the file's
    ``rope_scaling``. CheckpointError: it lacks a number.
    """
    wanted, factor = _frequencies(base, dim, scaling or {}), one["seq_len_interpolation_factor"]
    found = _plain(one["rotary_base"], dim) if found is None else found
    if factor is not None and one["pretrained_max_position_embeddings"] is not None:
        found = found / factor  # with one of both alone it does not interpolate
    # They are made in fp32, where the exponent's rounding counts log(base) times, and perhaps rounded to bf16.
    rounding = 2 * max(torch.finfo(found.dtype).eps, 2**-18)
    fits = wanted is not None and found.shape == wanted.shape
    fits = fits and torch.allclose(found.double().cpu(), wanted, rtol=rounding, atol=0.0)
    if scaling is None and (fits or one["rotary_base"] != base):
        return {"rotary_base": base}
    rope = {"rope_theta": base, **(scaling or {})}
    told = one["rotary_base"] if fits else f"of the frequencies by {rope}"
    return {**one.settings, "rotary_base": told, "interleaved": False}


#: Kinds of ``rope_scaling`` that are angles alone.
_KINDS = ("default", "dynamic", "linear", "llama3")


def scales_attention(scaling: Mapping[str, Any] | None) -> bool:
    """Whether a ``rope_scaling`` makes scores of attention larger, too, as YaRN and LongRoPE do, or is not known."""
    return _kind(scaling or {}) not in _KINDS


def _kind(scaling: Mapping[str, Any]) -> Any:
    return scaling.get("rope_type", scaling.get("type", "default"))


def _plain(base: float, dim: int) -> torch.Tensor:
    return float(base) ** -(torch.arange(0, dim, 2, dtype=torch.float64, device="cpu") / dim)


def _frequencies(base: float, dim: int, scaling: Mapping[str, Any]) -> torch.Tensor | None:
    """In fp64, for lengths of the training; ``None`` if scores are scaled as well."""

    def number(key: str) -> float:
        if type(scaling.get(key)) not in (int, float):
            raise CheckpointError(
                f"rope_scaling in config.json: {key}", expected="a number", got=scaling.get(key)
            )
        return scaling[key]

    plain, kind = _plain(base, dim), _kind(scaling)
    if kind == "linear":
        return plain / number("factor")
    if kind == "llama3":
        low, high = number("low_freq_factor"), number("high_freq_factor")
        turns = plain * number("original_max_position_embeddings") / (2 * math.pi)
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        return plain * (kept + (1 - kept) / number("factor"))
    return plain if kind in _KINDS else None  # partial_rotary_factor has no effect where heads turn whole
