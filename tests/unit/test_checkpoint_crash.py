"""A process that is killed in the middle of a save: the previous checkpoint stays the newest whole one."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from te_fsdp import checkpoint

# Two ranks, gloo, no TE. The victim kills itself when it is asked for the tensor number N of the second save, or, for
# "manifest", when everything is written but the manifest.
WORKER = """
import os, signal, sys
import torch, torch.distributed as dist
torch.set_num_threads(1)
from te_fsdp import checkpoint
from te_fsdp.checkpoint import planner, saving

directory, rank, moment = sys.argv[1], int(sys.argv[2]), sys.argv[3]
victim = 0 if moment == "manifest" else 1
dist.init_process_group("gloo", init_method=sys.argv[4], rank=rank, world_size=2)
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(4)))
optimizer = torch.optim.AdamW(model.parameters())
checkpoint.save(directory + "/step-1", model, optimizer, extra={"step": 1})

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

original, seen = planner._SavePlanner.lookup_object, [0]

def count(self, index):
    seen[0] += 1
    if rank == victim and moment.isdigit() and seen[0] > int(moment):
        die()
    return original(self, index)

planner._SavePlanner.lookup_object = count
if rank == victim and moment == "manifest":
    saving.write_manifest = die
for parameter in model.parameters():
    parameter.data += 1
print("saving", flush=True)
checkpoint.save(directory + "/step-2", model, optimizer, extra={"step": 2})
"""


@pytest.mark.parametrize("moment", ["0", "3", "manifest"])
def test_killed_while_saving(tmp_path: Path, moment: str) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", WORKER, str(tmp_path)]
    workers = [
        subprocess.Popen(
            [*command, str(rank), moment, address],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    victim = workers[0 if moment == "manifest" else 1]
    output, errors = victim.communicate(timeout=120)
    assert victim.returncode == -signal.SIGKILL, errors.decode()
    assert b"saving" in output, "it died in the second save"
    for worker in workers:  # the other rank notices, or would wait for gloo's timeout
        worker.kill()
        worker.communicate(timeout=60)

    newest = checkpoint.latest(tmp_path)
    assert newest == tmp_path / "step-1"
    left = [p.name for p in tmp_path.iterdir() if p.name.startswith(".step-2.te_fsdp-saving.")]
    assert len(left) == 1, "the save had begun"
    torch.manual_seed(0)
    saved = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    assert checkpoint.load(newest, model, torch.optim.AdamW(model.parameters())) == {"step": 1}
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), saved.parameters(), strict=True))
    checkpoint.save(tmp_path / "step-3", model)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-1", "step-3"]
