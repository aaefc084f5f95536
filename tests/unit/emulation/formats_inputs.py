"""Provide inputs that reach all edge cases of the formats."""

from __future__ import annotations

import numpy as np
import torch

KINDS = {"e4m3": 7, "e5m2": 8}  # TE dtype values
DTYPES = (torch.float32, torch.bfloat16)
PATTERNS = ("normal", "heavy", "blocks_of_zero", "ties", "special", "tiny", "huge", "zero")


def make(pattern: str, shape: tuple[int, int], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Return a (M, K) tensor of the named pattern."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    rows, cols = shape
    if pattern == "heavy":
        x = x * torch.exp(4 * torch.randn(shape, generator=generator))
    elif pattern == "blocks_of_zero":
        x[: rows // 2] = 0.0
        x[:, cols // 2 :] = 0.0
        x[rows // 2 :: 3] = -0.0
    elif pattern == "ties":
        # Small multiples of 1/8 under an amax that makes the scale a power of two: many exact midpoints.
        x = torch.randint(-120, 121, shape, generator=generator) / 8.0
        x[:, 0::16] = 28.0
        x[0::16] = -28.0
    elif pattern == "special":
        x.view(-1)[::17] = float("nan")
        x[rows // 3, cols // 3] = float("inf")
        x[rows - 1, cols - 1] = -float("inf")
        x.view(-1)[::13] = torch.tensor(-float("nan"))
        x[rows // 2, :3] = torch.tensor([1e-40, -1e-45, 3e38])
    elif pattern == "tiny":
        x = x * 1e-38
        x[0, : cols // 2] = 1e-45
        x[rows // 2 :] *= 1e-6
    elif pattern == "huge":
        x = (x * 1e38).clamp(-3.3e38, 3.3e38)
        x[rows // 2 :] *= 1e-30
    elif pattern == "zero":
        x = torch.zeros(shape)
    return x.to(dtype)


def array(x: torch.Tensor) -> np.ndarray:
    """Return float32 array of a tensor; bfloat16 fits exactly."""
    return x.detach().float().numpy()


def assert_bytes(got: torch.Tensor, expected: np.ndarray, what: str) -> None:
    """Compare bit for bit, both bytes and float32 scales."""
    got = got.detach().contiguous()
    assert tuple(got.shape) == expected.shape, f"{what}: shape {tuple(got.shape)}, expected {expected.shape}"
    left = got.numpy().view(np.uint8)
    right = np.ascontiguousarray(expected).view(np.uint8)
    wrong = np.argwhere(left != right)
    assert wrong.size == 0, f"{what}: {len(wrong)} bytes differ, first at {wrong[0].tolist()}"


def assert_floats(got: torch.Tensor, expected: np.ndarray, what: str) -> None:
    """Check equal float32 values, including NaN (with any payload) and the sign of zeros."""
    left, right = array(got), expected.astype(np.float32)
    assert left.shape == right.shape, f"{what}: shape {left.shape}, expected {right.shape}"
    same = (left.view(np.uint32) == right.view(np.uint32)) | (np.isnan(left) & np.isnan(right))
    assert same.all(), (
        f"{what}: {int((~same).sum())} values differ, first at {np.argwhere(~same)[0].tolist()}"
    )
