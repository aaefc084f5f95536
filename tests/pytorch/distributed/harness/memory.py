"""Memory of this process's tensors."""

from __future__ import annotations

import gc
import os
import time

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from . import devices

LOOKS, PAUSE = 5, 0.05
#: Number of collectives that reach all threads of a group: it has two, and a free one takes the next.
OCCUPYING = 8


def live_bytes() -> int:
    """Return bytes of all tensors: on GPUs by the allocator, on the CPU of all storages that Python can reach.

    Collective over the world: on the CPU each process group runs a few small sums.
    """
    if devices.device_type() == "cuda":
        return allocated()
    _occupy_gloo()
    return size_of(storages())


def allocated() -> int:
    """Return bytes requested from the CUDA allocator, which rounds up to blocks of 512; 0 on the CPU."""
    if devices.device_type() == "cpu":
        return 0
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_stats()["requested_bytes.all.current"]


def storages() -> dict[int, torch.Tensor]:
    """Address -> a plain tensor, for each storage with bytes that Python can reach, those of gradients included.

    The smallest of a few searches, until two agree: gloo's threads release sent tensors slightly late.
    """
    looks = [_look()]
    pause = PAUSE * float(os.environ.get("TE_FSDP_TEST_TIMEOUT_SCALE", "1"))
    while len(looks) < 2 or (len(looks) < LOOKS and size_of(looks[-1]) < size_of(looks[-2])):
        time.sleep(pause)
        looks.append(_look())
    return min(looks, key=size_of)


def size_of(found: dict[int, torch.Tensor]) -> int:
    """Return bytes of the storages that `storages` yields."""
    return sum(tensor.untyped_storage().nbytes() for tensor in found.values())


def _occupy_gloo() -> None:
    """Run a last collective, because a thread of gloo keeps the tensors of one until the next."""
    for group in list(distributed_c10d._world.pg_map):
        for _ in range(OCCUPYING):
            dist.all_reduce(torch.zeros(1), group=group)


def _look() -> dict[int, torch.Tensor]:
    gc.collect()
    results = {}
    for item in gc.get_objects():
        if not issubclass(type(item), torch.Tensor) or item.is_meta:
            continue
        for tensor in (item, item.grad if item.is_leaf else None):
            plain = getattr(tensor, "_local_tensor", tensor)
            # Other types have no separate memory; fake tensors have no data pointer.
            if type(plain) in (torch.Tensor, torch.nn.Parameter) and plain.untyped_storage().nbytes():
                results[plain.untyped_storage().data_ptr()] = plain.detach()
    return results
