"""The part of the large products that runs: all of it on GPUs or with `--matrix full`."""

from __future__ import annotations

import pytest
from harness import devices


def is_full(config: pytest.Config) -> bool:
    """Whether to run the full product."""
    return devices.device_type() == "cuda" or config.getoption("--matrix", "covering") == "full"
