"""Frequencies of rotary embeddings.

Sources: ``RotaryPositionEmbedding`` of TransformerEngine 2.18 to 2.20.2 (``pytorch/attention/rope.py``) and
``modeling_rope_utils.py`` of transformers 4.57 and 5.23.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from te_fsdp.errors import CheckpointError
from te_fsdp.modules.semantics import Semantics

#: Name of the frequency buffer in TransformerEngine's module.
_BUFFER = "inv_freq"


def frequencies_of(buffers: Iterable[str], read: Callable[[str], torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the frequencies of a model's rotary embeddings by the embedding's FQN. Local operation."""
    names = (name for name in buffers if name.rpartition(".")[2] == _BUFFER)
    return {name.removesuffix(_BUFFER).removesuffix("."): read(name) for name in names}


def wanted_rotary(
    recorded: Semantics, actual: torch.Tensor | None, base: float, dim: int, scaling: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the settings that TE's rotary embedding must have to match a ``config.json``. Local operation.

    They equal the embedding's own settings if it rotates heads of ``dim`` channels by the same angles up to
    rounding. ``actual`` contains its frequencies (possibly modified after construction); ``None``: those of its
    constructor. ``scaling`` is the file's ``rope_scaling``. Raise CheckpointError if a number is missing in it.
    """
    rope_scaling: Mapping[str, Any] = scaling or {}

    def number(key: str) -> float:
        if type(rope_scaling.get(key)) not in (int, float):
            what = f"rope_scaling in config.json: {key}"
            fix = "restore the file that was published with the model"
            raise CheckpointError(what, expected="a number", got=rope_scaling.get(key), fix=fix)
        return rope_scaling[key]

    # fp64, for sequence lengths of the training. partial_rotary_factor has no effect if all channels are rotated.
    frequencies, kind = _plain(base, dim), _kind(rope_scaling)
    if kind == "linear":
        frequencies = frequencies / number("factor")
    elif kind == "llama3":
        low, high = number("low_freq_factor"), number("high_freq_factor")
        turns = frequencies * number("original_max_position_embeddings") / (2 * math.pi)
        extrapolated = ((turns - low) / (high - low)).clamp(0, 1)
        frequencies = frequencies * (extrapolated + (1 - extrapolated) / number("factor"))
    factor = recorded["seq_len_interpolation_factor"]
    actual = _plain(recorded["rotary_base"], dim) if actual is None else actual
    if factor is not None and recorded["pretrained_max_position_embeddings"] is not None:
        actual = actual / factor  # interpolation needs both arguments
    # Frequencies are computed in fp32, where rounding of the exponent is amplified by log(base), and may be cast to
    # bf16.
    rounding = 2 * max(torch.finfo(actual.dtype).eps, 2**-18)
    fits = kind in _KINDS and actual.shape == frequencies.shape  # others scale the scores as well
    fits = fits and torch.allclose(actual.double().cpu(), frequencies, rtol=rounding, atol=0.0)
    if scaling is None and (fits or recorded["rotary_base"] != base):
        return {"rotary_base": base}
    rope = {"rope_theta": base, **rope_scaling}
    base_text = recorded["rotary_base"] if fits else f"of the frequencies by {rope}"
    return {**recorded.settings, "rotary_base": base_text, "interleaved": False}


#: Kinds of ``rope_scaling`` that only change the angles.
_KINDS = ("default", "dynamic", "linear", "llama3")


def scales_attention(scaling: Mapping[str, Any] | None) -> bool:
    """Return whether a ``rope_scaling`` also scales attention scores (as YaRN and LongRoPE do) or is unknown."""
    return _kind(scaling or {}) not in _KINDS


def _kind(scaling: Mapping[str, Any]) -> Any:
    return scaling.get("rope_type", scaling.get("type", "default"))


def _plain(base: float, dim: int) -> torch.Tensor:
    return float(base) ** -(torch.arange(0, dim, 2, dtype=torch.float64, device="cpu") / dim)
