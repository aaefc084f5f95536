"""Check that the core works without te_fsdp.checks."""

from __future__ import annotations

import sys

import pytest

from tests.unit.commands import run_text

PROGRAM = """
import sys
import torch
import torch.distributed as dist
import te_fsdp

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
te_fsdp.fully_shard(model, te_fsdp.Meshes.build(dp_shard=1, device_type="cpu"), units=["0"], checks=sys.argv[1])
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(2, 4)).sum().backward()
optimizer.step()
optimizer.zero_grad()
print(sorted(name for name in sys.modules if name.startswith("te_fsdp.checks")))
dist.destroy_process_group()
"""


@pytest.mark.parametrize(("level", "loaded"), [("off", False), ("setup", True)])
def test_checks_off_does_not_import_checks(level, loaded):
    done = run_text(sys.executable, PROGRAM, level)
    assert (done.stdout.strip() != "[]") == loaded, done.stdout
