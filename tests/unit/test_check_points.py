"""Check that fully_shard runs no setup function or check that a model does not need."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from te_fsdp.apply_fully_shard import Setup, start_checks
from te_fsdp.check_points import CheckPoints
from te_fsdp.lifecycle import runs_if
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


def test_setup_skips_functions_whose_condition_is_false():
    ran = []
    needed, unneeded = (
        runs_if(name)(lambda setup, name=name: ran.append(name)) for name in ("fused", "axes")
    )
    Setup.run(SimpleNamespace(fused=[1], axes=set()), (unneeded, needed, lambda setup: ran.append("always")))
    assert ran == ["fused", "always"]


@pytest.mark.parametrize(
    ("axes", "expected"),
    [({"tp"}, "tp cp,tp local"), ({"cp"}, "cp,tp local"), (set(), "local")],
    ids=["tp", "cp", "none"],
)
def test_checks_over_axes_of_one_rank_do_not_start(axes, expected):
    ran = []
    over = {name: lambda state, name=name: ran.append(name) for name in ("tp", "cp,tp", "ep", "local")}
    points = CheckPoints(
        axes={over[name]: name.split(",") for name in ("tp", "cp,tp", "ep")}, sharded=tuple(over.values())
    )
    state = SimpleNamespace(model=torch.nn.Linear(1, 1), checks=points)
    start_checks(SimpleNamespace(axes=set(axes), state=state))
    assert ran == expected.split()
