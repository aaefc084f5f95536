"""Gloo process groups whose ranks connect at their first message.

Checked with torch 2.11 and 2.13.
"""

from __future__ import annotations

import datetime
import os
from typing import Any

import torch.distributed as dist

_NAME = "te_fsdp_gloo"


def new_lazy_group() -> Any:
    """Create a Gloo group over the world without connections between its ranks. Collective over the world.

    ``new_group(backend="gloo")`` connects all pairs of ranks. If all ranks exchange messages with rank 0 only, one
    connection per rank is enough.
    """
    if _NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(_NAME, _create, devices=["cpu"])
    return dist.new_group(backend=_NAME)


def _create(store: dist.Store, rank: int, size: int, timeout: datetime.timedelta) -> Any:
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    # The same interfaces as torch's own groups.
    interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    options._devices = [gloo.create_device(interface=name, lazy_init=True) for name in interfaces] or [
        gloo.create_default_device(lazy_init=True)
    ]
    options._threads = 2 * len(options._devices)
    options._timeout = timeout
    return gloo(store, rank, size, options)
