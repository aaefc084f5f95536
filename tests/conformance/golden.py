"""The file of recorded results: an xz stream of a JSON header, then the bytes of the outputs."""

from __future__ import annotations

import hashlib
import json
import lzma
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

Recorded = dict[str, Any]
#: A packed file contains shorter outputs (in bytes) in full.
SHORT = 1024
#: Number of values of a long output with a bound in a packed file.
SAMPLES = 384


def _raw(tensor: torch.Tensor) -> bytes:
    flat = tensor.contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def canonical(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values with a canonical NaN (float32 and 16-bit floats), because payloads have no meaning."""
    if not tensor.dtype.is_floating_point or tensor.element_size() == 1:
        return tensor
    return torch.where(torch.isnan(tensor), torch.full_like(tensor, float("nan")), tensor)


def digest(tensor: torch.Tensor) -> str:
    """Return the digest of a tensor's bits, NaN in one form."""
    return hashlib.sha256(_raw(canonical(tensor))).hexdigest()


def write(path: Path, about: dict[str, Any], cases: dict[str, Recorded]) -> None:
    """Write recorded cases.

    Args:
        path: file to write.
        about: versions and the machine.
        cases: by name `{"inputs": digest, "outputs": {name: tensor, or what `pack` makes of it}}`, or
            `{"raised": message}`.
    """
    payload = bytearray()

    def described(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: described(item) for key, item in value.items()}
        if not isinstance(value, torch.Tensor):
            return value
        at = len(payload)
        payload.extend(_raw(value))
        return {"tensor": at, "dtype": str(value.dtype).split(".")[1], "shape": list(value.shape)}

    header = json.dumps(described({"about": about, "cases": cases}), separators=(",", ":")).encode()
    path.write_bytes(lzma.compress(len(header).to_bytes(8, "little") + header + bytes(payload), preset=9))


def read(path: Path) -> tuple[dict[str, Any], dict[str, Recorded]]:
    """Return `(about, cases)` as passed to `write`."""
    stream = lzma.decompress(path.read_bytes())
    length = int.from_bytes(stream[:8], "little")
    payload = stream[8 + length :]

    def restored(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return (
            _tensor(value, payload)
            if "tensor" in value
            else {key: restored(item) for key, item in value.items()}
        )

    content = restored(json.loads(stream[8 : 8 + length]))
    return content["about"], content["cases"]


def _tensor(described: dict[str, Any], payload: bytes) -> torch.Tensor:
    dtype, shape = getattr(torch, described["dtype"]), described["shape"]
    tensor = torch.empty(shape, dtype=dtype)
    size = tensor.numel() * tensor.element_size()
    if size:
        raw = bytearray(payload[described["tensor"] : described["tensor"] + size])
        tensor = torch.frombuffer(raw, dtype=torch.uint8).view(dtype).reshape(shape).clone()
    return tensor


def sample(tensor: torch.Tensor, every: int) -> torch.Tensor:
    """Return every n-th value in reading order."""
    return tensor.reshape(-1)[::every]


def _stride(tensor: torch.Tensor, samples: int) -> int:
    """Return the distance between samples for about `samples` of them, from all columns."""
    every = -(-tensor.numel() // samples) | 1
    while math.gcd(every, tensor.shape[-1]) > 1:
        every += 2
    return every


def _packed(tensor: torch.Tensor, exact: bool, samples: int) -> Any:
    described = {"dtype": str(tensor.dtype).split(".")[1], "shape": list(tensor.shape)}
    if exact:
        return {**described, "digest": digest(tensor)}
    every = _stride(tensor, samples)
    return {**described, "every": every, "sample": sample(tensor, every)}


def pack(
    recorded: dict[str, Recorded],
    exact: Callable[[str, str], bool],
    *,
    short: int = SHORT,
    samples: int = SAMPLES,
) -> dict[str, Recorded]:
    """Shorten long outputs of cases: to digests if `exact(case, output)`, else to samples."""
    packed = {}
    for name, case in recorded.items():
        packed[name] = dict(case)
        if "outputs" in case:
            packed[name]["outputs"] = {
                key: _packed(value, exact(name, key), samples)
                if value.numel() * value.element_size() > short
                else value
                for key, value in case["outputs"].items()
            }
    return packed
