"""State dicts of optimizers whose kernels read options from device memory."""

from __future__ import annotations

import pytest
from harness import devices
from plain_dcp import capturable


@pytest.mark.ranks(2)
@pytest.mark.parametrize("by", ["sharded", "full"])
@pytest.mark.parametrize(
    ("sharder", "main_weights"), [("torch", False), ("te_fsdp", False), ("te_fsdp", True)]
)
def test_capturable_fused_adam_resumes_from_cpu_state(pool, sharder, main_weights, by):
    """Check that options are moved to the device. A kernel that reads host memory is an illegal access on GPUs."""
    for found in pool.run(capturable.resumed, 2, sharder=sharder, main_weights=main_weights, by=by):
        device = devices.device_type()
        assert found == {"equal": 2, "moved": 2, "options": [device], "rates": [device]}
