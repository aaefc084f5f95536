"""Bodies run unchanged under real torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import harness
import pytest
import torch
import torch.distributed as dist


def gathered_ranks(factor: int) -> list:
    value = torch.tensor([factor * dist.get_rank()], device=harness.device())
    parts = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, value)
    return [int(part) for part in parts]


@pytest.mark.ranks(2)
def test_a_body_under_torchrun():
    here = Path(__file__).parent
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(here), *(path for path in sys.path if path)]),
        "TE_FSDP_EMULATION": "none",
        "OMP_NUM_THREADS": "1",
        "TE_FSDP_TEST_DEVICE": harness.device_type(),
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "harness.torchrun", "test_torchrun:gathered_ranks", '{"factor": 3}']
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, cwd=here)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.strip().splitlines()[-1]) == [[0, 3], [0, 3]]
