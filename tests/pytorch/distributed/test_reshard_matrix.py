"""Checkpoints of every mesh, loaded on every other mesh.

They include each kind of module, weights in FP32 and BF16, and optimizer state.

One model has all kinds. Each mesh loads the checkpoint of one mesh, a different one each day. With `--matrix full` and
on GPUs it loads those of all meshes, also of eight ranks. Values are compared bit for bit with the originals, weights
in fp32 and in bf16. Two further losses agree to rounding.
"""

from __future__ import annotations

import math

import pytest
from checkpointing import reshard
from checkpointing.selection import MESHES, is_full

# fp32: ten chained sums of up to 256 products in a different order. bf16: activations are rounded to 8 bits, so that a
# loss may move by a unit in the last place.
TOLERANCE = {"fp32": 1e-5, "bf16": 2**-8}


def ranks(mesh: str) -> int:
    return math.prod((MESHES[mesh] or {}).values())


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "mesh" in metafunc.fixturenames:
        chosen = [mesh for mesh in MESHES if is_full(metafunc.config) or ranks(mesh) < 8]
        metafunc.parametrize(
            "mesh", [pytest.param(mesh, marks=pytest.mark.ranks(ranks(mesh))) for mesh in chosen]
        )


class Saved:
    """Return the checkpoints of the meshes so far, with their further losses."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.losses: dict[str, dict[str, list[float]]] = {}

    def get(self, pool, mesh: str) -> dict[str, list[float]]:
        """Return losses of a mesh after its save, which is made when first requested."""
        if mesh not in self.losses:
            where = {"axes": MESHES[mesh], "directory": self.directory, "name": mesh}
            self.losses[mesh] = run_body(pool, reshard.save_all, mesh, **where)[0]
        return self.losses[mesh]


def run_body(pool, body, mesh: str, **kwargs):
    """Run a body; on GPUs with kernels that always add in the same order."""
    environment = {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}
    return pool.run(body, ranks(mesh), env=environment, **kwargs)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Saved:
    return Saved(str(tmp_path_factory.mktemp("reshard")))


def available(pool, most: int) -> list[str]:
    """Return the meshes with this number of ranks that fit this machine."""
    return [mesh for mesh in MESHES if ranks(mesh) <= min(pool.max_ranks, most)]


def test_load_from_every_other_mesh(pool, saved, mesh, request, matrix_seed):
    meshes = available(pool, 8 if is_full(request.config) else 7)
    others = [name for name in meshes if name != mesh]
    if not is_full(request.config):  # seven days see every pair of the seven meshes
        source, following = (meshes[(matrix_seed + step) % len(meshes)] for step in (0, 1))
        others = [following if mesh == source else source]
    losses = {name: saved.get(pool, name) for name in others}
    where = {"axes": MESHES[mesh], "directory": saved.directory, "names": others, "train": others}
    for outcomes in run_body(pool, reshard.load_all, mesh, **where):
        assert outcomes.keys() == {f"{n}-fp32" for n in others} | {f"{n}-bf16" for n in others}
        for key, outcome in outcomes.items():
            name, dtype = key.rsplit("-", 1)
            assert outcome["wrong"] == [], key
            assert outcome["tensors"] > 150, key
            assert outcome["losses"] == pytest.approx(losses[name][dtype], rel=TOLERANCE[dtype], abs=0), key


@pytest.mark.ranks(4)
def test_negative_control_stacked_rows_as_unstacked(pool, saved):
    """Negative control: with Shard(0) for gated fc1 and fused projections, and only there, the comparison fails."""
    saved.get(pool, "tp2")
    where = {"axes": MESHES["tp4"], "directory": saved.directory, "names": ["tp2"], "train": []}
    for outcome in run_body(pool, reshard.load_all, "tp4", spoil=True, **where)[0].values():
        stacked = (
            "swiglu.fc1_",
            "layer.layernorm_mlp.fc1_",
            "stacked.qkv.",
            "grouped_queries.layernorm_qkv.",
        )
        expected = (*stacked, "cross.key_value.")
        wrong = {name for name in outcome["wrong"] if not name.endswith("step")}
        assert all(any(part in name for name in wrong) for part in expected)
        assert all(name.startswith(expected) for name in wrong), wrong
        assert "swiglu.fc1_bias.exp_avg_sq" in wrong
