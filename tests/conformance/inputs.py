"""Inputs made from seeds with integer arithmetic, with the same bits on every machine."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

PATTERNS = ("normal", "heavy", "zeros", "ties", "special", "tiny", "huge")


def words(seed: int, count: int) -> np.ndarray:
    """Return `count` 64-bit words, splitmix64 of a counter."""
    with np.errstate(over="ignore"):
        z = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z += np.uint64((seed * 0xD1342543DE82EF95 + 1) % 2**64)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def normal(seed: int, shape: Sequence[int]) -> np.ndarray:
    """Return about normal values: standard deviation 1.15, multiples of 2^-15 below 4 in size, exact in float32."""
    fields = words(seed, math.prod(shape)).view(np.uint16).reshape(-1, 4).astype(np.int64)
    return ((fields.sum(1) - 131070) / 32768.0).astype(np.float32).reshape(tuple(shape))


def whole(seed: int, shape: Sequence[int], low: int, high: int) -> np.ndarray:
    """Return integers of [low, high)."""
    span = np.uint64(high - low)
    return (words(seed, math.prod(shape)) % span).astype(np.int64).reshape(tuple(shape)) + low


def _special(x: np.ndarray) -> np.ndarray:
    x.reshape(-1)[5::97] = np.nan
    x.reshape(-1)[11::131] = np.inf
    x.reshape(-1)[17::139] = -np.inf
    x.reshape(-1)[23::53] = -0.0
    x.reshape(-1)[29::61] = np.float32(1e-40)
    return x


def pattern(name: str, seed: int, shape: Sequence[int]) -> np.ndarray:
    """Return float32 values of one of `PATTERNS`."""
    x = normal(seed, shape)
    if name == "heavy":
        x = np.ldexp(x, whole(seed + 1, shape, -14, 15).astype(np.int32))
    elif name == "zeros":
        flat = x.reshape(-1)
        flat[: flat.size // 2] = 0.0
        flat[: flat.size // 4] = -0.0
    elif name == "ties":
        # Small multiples of 1/8 under a largest value of 28: exact midpoints between neighbours of FP8.
        x = whole(seed, shape, -120, 121).astype(np.float32) / 8.0
        x.reshape(-1)[::16] = 28.0
    elif name == "special":
        x = _special(x)
    elif name == "tiny":
        x = np.ldexp(x, whole(seed + 1, shape, -146, -120).astype(np.int32))
    elif name == "huge":
        x = np.ldexp(x, whole(seed + 1, shape, 100, 126).astype(np.int32))
    elif name != "normal":
        raise ValueError(f"unknown pattern {name!r}: expected one of {PATTERNS}")
    return np.ascontiguousarray(x, dtype=np.float32)


class Env:
    """Environment of a case: TransformerEngine, the device, and inputs with their digest."""

    def __init__(self, device: str) -> None:
        import transformer_engine.pytorch as te
        import transformer_engine_torch as tex
        from transformer_engine.pytorch.constants import TE_DType

        self.te, self.tex, self.device, self.te_dtypes = te, tex, device, TE_DType
        self._digest = hashlib.sha256()

    def start(self) -> None:
        """Reset the inputs of the previous case."""
        self._digest = hashlib.sha256()

    def digest(self) -> str:
        """Return the digest of every input that the case has made so far."""
        return self._digest.hexdigest()[:16]

    def put(self, values: np.ndarray, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return a tensor of these values on the device, rounded to nearest on the CPU."""
        tensor = torch.from_numpy(np.array(values))
        tensor = tensor if dtype is None else tensor.to(dtype)
        flat = tensor.contiguous().reshape(-1)
        self._digest.update(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"empty")
        return tensor.to(self.device)

    def x(
        self,
        seed: int,
        shape: Sequence[int],
        dtype: torch.dtype = torch.float32,
        name: str = "normal",
        by: int = 0,
    ) -> torch.Tensor:
        """Return a tensor of a pattern, times 2**by."""
        return self.put(np.ldexp(pattern(name, seed, shape), by), dtype)

    def fp8(self, name: str) -> Any:
        """Return TransformerEngine's dtype of "e4m3" or "e5m2"."""
        return {"e4m3": self.tex.DType.kFloat8E4M3, "e5m2": self.tex.DType.kFloat8E5M2}[name]
