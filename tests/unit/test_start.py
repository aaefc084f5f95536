"""Test process start: the launcher's environment, devices, a process without torchrun."""

from __future__ import annotations

import os
import re

import pytest
import torch

from te_fsdp import mesh_checks
from te_fsdp.errors import MeshError
from tests.unit.commands import run_text


def test_single_process_trains_without_torchrun(python):
    """Meshes.build initializes a process group of one rank, which then trains, and reuses an existing one."""
    script = """
import torch, torch.distributed as dist
import te_fsdp
meshes = te_fsdp.Meshes.build(device_type="cpu")
assert (dist.get_world_size(), dist.get_rank(), dist.get_backend()) == (1, 0, "gloo")
group = dist.group.WORLD
assert str(te_fsdp.Meshes.build(device_type="cpu")) == str(meshes) == "dp_replicate=1 x dp_shard=1 x tp=1"
assert dist.group.WORLD is group
model = te_fsdp.fully_shard(torch.nn.Linear(4, 2), meshes)
model(torch.ones(3, 4)).sum().backward()
assert torch.equal(model.bias.grad.full_tensor(), torch.full((2,), 3.0))
try:
    te_fsdp.Meshes.build(tp=2, device_type="cpu")
except te_fsdp.MeshError as error:
    print(error)
import sys
assert "transformer_engine" not in sys.modules  # a model without TE needs none of it
"""
    variables = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TE_FSDP_EMULATION")
    environment = {k: v for k, v in os.environ.items() if k not in variables}
    result = run_text(python, script, env=environment)
    assert result.stdout.strip() == (
        "Meshes.build: dp_replicate(1) * dp_shard(-1) * tp(2) = 2 * ?: expected a product equal to WORLD_SIZE = 1, "
        "got 2, which does not divide 1. Fix: sizes whose product is WORLD_SIZE; or start the script with torchrun "
        "--nproc-per-node N, because it runs as a single process now."
    )


@pytest.mark.parametrize(
    ("environment", "sizes", "text"),
    [
        (
            {"SLURM_STEP_NUM_TASKS": "8"},
            {"tp": 2},
            "no RANK in the environment: expected the variables of torchrun, got SLURM_",
        ),
        (
            {"OMPI_COMM_WORLD_SIZE": "2"},
            {},
            "Fix: start the script with torchrun (srun torchrun ..., docs/nodes.md)",
        ),
        ({"WORLD_SIZE": "4"}, {}, "got WORLD_SIZE=4. Each process would train a separate model"),
        ({"WORLD_SIZE": "4"}, {"dp_shard": 1}, ""),
        ({"SLURM_STEP_NUM_TASKS": "1"}, {}, ""),
        ({"WORLD_SIZE": "4", "RANK": "0"}, {}, ""),
        ({}, {}, ""),
    ],
)
def test_several_processes_without_torchrun_are_rejected(monkeypatch, environment, sizes, text):
    for name in ("RANK", *mesh_checks._STARTED):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    asked = {"pp": 1, "dp_replicate": 1, "dp_shard": -1, "cp": 1, "ep": 1, "tp": 1, **sizes}
    if not text:
        return mesh_checks.check_started(asked)
    with pytest.raises(MeshError, match=re.escape(text)):
        mesh_checks.check_started(asked)


@pytest.mark.parametrize(
    ("environment", "devices", "text"),
    [
        ({"LOCAL_RANK": "3", "WORLD_SIZE": "4"}, 4, 3),
        (
            {"LOCAL_RANK": "4", "WORLD_SIZE": "8"},
            4,
            "LOCAL_RANK=4: expected one of this process' 4 devices of type cuda",
        ),
        ({"WORLD_SIZE": "8"}, 4, "no LOCAL_RANK in the environment"),
        ({"WORLD_SIZE": "8"}, 1, 0),  # a launcher that shows each process its own
        ({}, 4, 0),
        (
            {"LOCAL_RANK": "0"},
            0,
            "torchrun --nproc-per-node 1, or set CUDA_VISIBLE_DEVICES to all devices",
        ),
    ],
)
def test_device_of_a_rank_and_errors_of_local_rank(monkeypatch, environment, devices, text):
    for name in ("LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    if isinstance(text, int):
        assert mesh_checks.device_of_rank("cuda") == text
        return
    with pytest.raises(MeshError, match=re.escape(text)):
        mesh_checks.device_of_rank("cuda")


def test_device_type_rejects_unknown_values():
    assert [mesh_checks.check_device_type(given) for given in ("cuda", torch.device("cpu"))] == [
        "cuda",
        "cpu",
    ]
    for wrong in ("cuda:0", "gpu"):
        with pytest.raises(MeshError, match="device_type: expected 'cuda' or 'cpu', got .*LOCAL_RANK"):
            mesh_checks.check_device_type(wrong)
