"""`te_fsdp.integrations.training_log` on several ranks: own values, and the health of weights that are cut."""

from __future__ import annotations

import harness
import pytest
import torch
import torch.distributed as dist


def told(recipe: str) -> dict:
    """Numbers of a logging step over a sharded model, and the same of the whole weights."""
    from quantization.bodies import quantized_weights
    from quantization.one_scale import stock

    import te_fsdp
    from te_fsdp import _torch
    from te_fsdp.integrations.training_log import TrainingLog

    model = stock("linear", recipe, "meta", hidden=128)
    te_fsdp.fully_shard(model, te_fsdp.Meshes.build(device_type=harness.device_type()))
    te_fsdp.materialize(model, seed=3)
    with torch.no_grad():  # underflow in a known share, on one rank alone
        for _, _, parameter in quantized_weights(model):
            value = harness.full(parameter).to(harness.device())
            value[: len(value) // 4] = 0
            rows = value.chunk(2)[dist.get_rank()]
            _torch.local_of(parameter).copy_(rows)
    log = TrainingLog(every=1, health_of=model)
    found = log.step(1, loss=torch.tensor(float(dist.get_rank()), device=harness.device()))
    found["amaxes"] = sorted(float(harness.full(p).abs().max()) for _, _, p in quantized_weights(model))
    return found


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("recipe", "name", "most"), [("current", "float8", 448), ("mxfp8", "mxfp8", 448), ("nvfp4", "nvfp4", 6)]
)
def test_own_values_and_health(pool, recipe, name, most):
    first, second = pool.run(told, 2, recipe=recipe)
    assert (first["loss"], second["loss"]) == (0, 1)
    health = {key: value for key, value in first.items() if key.startswith(name)}
    assert health == {key: second[key] for key in health}
    assert 0.25 <= health[f"{name}/zero"] < (0.45 if name == "nvfp4" else 0.27)
    assert 0 < health[f"{name}/saturated"] < 0.15
    if name == "float8":  # the amax of the whole weight is the largest value of the format
        scales = [health["float8/scale_inv_min"], health["float8/scale_inv_max"]]
        ends = [first["amaxes"][0], first["amaxes"][-1]]
        assert [scale * most for scale in scales] == pytest.approx(ends, rel=1e-6)
    else:
        assert (f"{name}/scale_inv_max" in health) == (name == "mxfp8")
