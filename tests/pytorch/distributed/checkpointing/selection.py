"""Cases of the large products of meshes: all on GPUs or with `--matrix full`."""

from __future__ import annotations

import pytest
from harness import devices

#: Meshes that save and load.
MESHES: dict[str, dict[str, int] | None] = {
    "one": None,
    "dp4": {"dp_shard": 4},
    "tp2": {"dp_shard": 1, "tp": 2},
    "tp4": {"dp_shard": 1, "tp": 4},
    "dp2xtp2": {"dp_shard": 2, "tp": 2},
    "hsdp2x2": {"dp_replicate": 2, "dp_shard": 2},
    "hsdp2x2xtp2": {"dp_replicate": 2, "dp_shard": 2, "tp": 2},
    "dp3xtp2": {"dp_shard": 3, "tp": 2},
}


def is_full(config: pytest.Config) -> bool:
    """Return whether to run the full product."""
    return devices.device_type() == "cuda" or config.getoption("--matrix", "covering") == "full"
