"""Every optimizer on a different mesh. State is bit-exact. The load makes no step."""

from __future__ import annotations

import math

import pytest
from checkpointing import main_weights, optimizers

ORIGIN = {"dp_shard": 2, "tp": 2}
# fp32: three chained sums of up to 48 products in a different order. bf16: activations are rounded to 8 bits.
TOLERANCE = {"float32": 1e-5, "bfloat16": 2**-7}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return str(tmp_path_factory.mktemp("optimizers"))


def run_body(pool, body, axes, directory, **kwargs):
    """Run a body; on GPUs with kernels that always add in the same order."""
    environment = {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}
    ranks = math.prod(axes.values())
    return pool.run(body, ranks, env=environment, axes=axes, directory=directory, **kwargs)


@pytest.mark.ranks(4)
def test_every_optimizer_loads_on_different_meshes(pool, directory):
    saved = run_body(pool, optimizers.save_optimizers, ORIGIN, directory)[0]
    for axes in ({"dp_shard": 4}, {"dp_shard": 1, "tp": 2}, {"dp_shard": 1}):
        results = run_body(pool, optimizers.load_optimizers, axes, directory)
        assert max(outcome["sgd"]["empty"] for outcome in results) >= 2 * (axes["dp_shard"] == 4)
        for outcomes in results:
            for name, (dtype, _) in optimizers.OPTIMIZERS.items():
                outcome, before = outcomes[name], saved[name]
                assert outcome["wrong"] == [], (axes, name)
                assert outcome["tensors"] >= (9 if name == "sgd" else 16), name
                assert outcome["options"] == before["options"], name
                rel = TOLERANCE[str(dtype).removeprefix("torch.")]
                assert outcome["losses"] == pytest.approx(before["losses"], rel=rel, abs=0), (axes, name)
    # Negative control: without the load state, options and losses are others.
    for name, outcome in run_body(pool, optimizers.load_optimizers, {"dp_shard": 1}, directory, load=False)[
        0
    ].items():
        assert len(outcome["wrong"]) >= 8
        assert outcome["options"] != saved[name]["options"]
        assert outcome["losses"] != pytest.approx(saved[name]["losses"], rel=1e-3, abs=0)


@pytest.mark.ranks(4)
def test_load_without_the_optimizer_updates_main_weights(pool, tmp_path):
    cases = [("current", "fused", 1, 2), ("delayed", "adamw", 1, 2), ("current", "cut", 2, 1)]
    results = pool.run(main_weights.load_without_optimizer, 4, cases=cases, directory=str(tmp_path))
    assert results == [[2, 2, 2]] * 4


@pytest.mark.ranks(2)
@pytest.mark.parametrize("only_rank", [None, 1])
def test_main_weights_that_the_optimizer_does_not_keep(pool, tmp_path, only_rank):
    """Over BF16 weights the next step raised, and spoke of a copied optimizer; over FP32 weights it raised, too."""
    for found in pool.run(main_weights.not_kept, 2, directory=str(tmp_path), only_rank=only_rank):
        kind, text = found.pop("refused")
        assert kind == "CheckpointError" and "Nothing was loaded" in text
        fix = "call te_fsdp.main_weights(model, optimizer) before load"
        assert f"optimizer state 'master_param' is only in the checkpoint: {fix} (0.bias, 0.weight," in text
        states = [f"optimizer.state.{layer}.{name}" for layer in range(3) for name in ("bias", "weight")]
        assert found == {
            "changed": 0,
            "left": states,
            "weights": True,
            "converted": "only in the checkpoint: left out",
            "keys": ["exp_avg", "exp_avg_sq", "step"],
            "same": True,
        }
