"""Memory that this process holds for tensors."""

from __future__ import annotations

import gc
import os
import time

import torch

from . import devices

LOOKS, PAUSE = 5, 0.15


def live_bytes() -> int:
    """Bytes of all tensors: on GPUs by the allocator, on the CPU of all storages that Python can reach."""
    return allocated() if devices.device_type() == "cuda" else size_of(storages())


def allocated() -> int:
    """Bytes that the CUDA allocator has given out; 0 on the CPU."""
    if devices.device_type() == "cpu":
        return 0
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def storages() -> dict[int, torch.Tensor]:
    """Address -> a plain tensor, for each storage with bytes that Python can reach, those of gradients included.

    The smallest of a few looks, until two agree: gloo's threads let go of what they have sent a moment late.
    """
    looks = [_look()]
    pause = PAUSE * float(os.environ.get("TE_FSDP_TEST_TIMEOUT_SCALE", "1"))
    while len(looks) < 2 or (len(looks) < LOOKS and size_of(looks[-1]) < size_of(looks[-2])):
        time.sleep(pause)
        looks.append(_look())
    return min(looks, key=size_of)


def size_of(found: dict[int, torch.Tensor]) -> int:
    """Bytes of the storages behind what `storages` gives."""
    return sum(tensor.untyped_storage().nbytes() for tensor in found.values())


def _look() -> dict[int, torch.Tensor]:
    gc.collect()
    found = {}
    for item in gc.get_objects():
        if not issubclass(type(item), torch.Tensor) or item.is_meta:
            continue
        for tensor in (item, item.grad if item.is_leaf else None):
            plain = getattr(tensor, "_local_tensor", tensor)
            # Other types have no memory of their own; fake tensors cannot be asked.
            if type(plain) in (torch.Tensor, torch.nn.Parameter) and plain.untyped_storage().nbytes():
                found[plain.untyped_storage().data_ptr()] = plain.detach()
    return found
