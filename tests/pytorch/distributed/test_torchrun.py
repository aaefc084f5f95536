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


LAUNCHERS = {
    "one-node": (["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"], 2),
    "two-nodes": (["scripts/torchrun_nodes.py", "2", "2"], 4),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_harness_body_under_torchrun(launcher, python):
    command, ranks = LAUNCHERS[launcher]
    here = Path(__file__).parent
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(here), *(path for path in sys.path if path)]),
        "TE_FSDP_EMULATION": "none",
        "OMP_NUM_THREADS": "1",
        "TE_FSDP_TEST_DEVICE": harness.device_type(),
    }
    command = [
        python,
        *command,
        "-m",
        "harness.torchrun",
        "test_torchrun:gathered_ranks",
        '{"factor": 3}',
    ]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, cwd=here.parents[2]
    )
    assert done.returncode == 0, done.stderr
    expected = [3 * rank for rank in range(ranks)]
    assert json.loads(done.stdout.strip().splitlines()[-1]) == [expected] * ranks


def test_failed_node_ends_the_job(python):
    root = Path(__file__).parents[3]
    sleeps = "import os, time; assert os.environ['GROUP_RANK'] == '0', 'second node'; time.sleep(60)"
    command = [
        python,
        "scripts/torchrun_nodes.py",
        "2",
        "1",
        "--no-python",
        sys.executable,
        "-c",
        sleeps,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False, cwd=root)
    assert done.returncode != 0 and "second node" in done.stderr
