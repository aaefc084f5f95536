"""DTensors in dtypes that process groups do not communicate."""

from __future__ import annotations

from typing import Any

import harness
import pytest
import torch
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

DTYPES = [
    "int16",
    "uint16",
    "uint32",
    "uint64",
    "uint8",
    "int8",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "complex64",
    "complex128",
]


def moved(rows: int) -> list[str]:
    """Distribute, redistribute and gather values of each dtype; return the moves that have changed bits."""
    import te_fsdp

    meshes = te_fsdp.Meshes.build(dp_shard=2, tp=2, device_type=harness.device_type())
    te_fsdp.fully_shard(torch.nn.Linear(8, 8, device=harness.device()), meshes)
    mesh = meshes.device_mesh["dp_shard", "tp"]
    placements: list[Any] = [
        (Shard(0), Shard(0)),
        (Shard(0), Shard(1)),
        (Replicate(), Shard(1)),
        (Replicate(),) * 2,
    ]
    changed = []
    for name in DTYPES:
        dtype = getattr(torch, name)
        numbers = torch.arange(rows * 6 * dtype.itemsize, dtype=torch.uint8) * 37
        bits = numbers.view(dtype).view(rows, 6).to(harness.device())
        for source in placements:
            sharded = distribute_tensor(bits.clone(), mesh, source)
            for target in placements:
                full = sharded.redistribute(placements=target).full_tensor()
                if not torch.equal(full.view(torch.uint8), bits.view(torch.uint8)):
                    changed.append(f"{name} {source} {target}")
    return changed


@pytest.mark.ranks(4)
@pytest.mark.parametrize("rows", [8, 7])
def test_moves_keep_all_bits(pool, rows):
    assert pool.run(moved, 4, rows=rows) == [[]] * 4
