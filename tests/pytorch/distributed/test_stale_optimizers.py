"""Optimizers of replaced parameters, whose step raises. All other optimizers step."""

from __future__ import annotations

import pytest
from parity import stale_optimizers

WRONG = [(route, moment) for route, moments in stale_optimizers.MOMENTS.items() for moment in moments]
#: The call that replaces the parameters that there are at a moment; fully_shard alone is the first to do so without tp.
BY = {
    ("before set_device_mesh", 1): "fully_shard",
    ("before set_device_mesh", 2): "set_device_mesh",
    ("before fully_shard", 1): "fully_shard",
    ("before fully_shard", 2): "fully_shard",
    ("before materialize", 1): "materialize",
    ("before materialize", 2): "materialize",
    ("before reset_parameters", 1): "reset_parameters",
    ("before reset_parameters", 2): "reset_parameters",
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(("route", "moment"), WRONG)
def test_stale_optimizer_raises_at_the_first_step(pool, route, moment, tp):
    for kind, text in pool.run(stale_optimizers.step, 2, route=route, moment=moment, tp=tp):
        assert kind == "OrderError"
        assert text.startswith(
            "AdamW.step: up.weight, and 5 more of its 6: expected current parameters of the model"
        )
        assert f"got one from before {BY[moment, tp]}, which replaced it" in text
        assert "Fix: build the optimizer after te_fsdp.fully_shard and te_fsdp.materialize" in text


@pytest.mark.ranks(2)
@pytest.mark.parametrize("several", [False, True], ids=["one_group", "two_groups"])
@pytest.mark.parametrize("name", list(stale_optimizers.OPTIMIZERS))
def test_every_stale_optimizer_raises(pool, name, several):
    how = {"route": "fully_shard", "tp": 2, "name": name, "several": several}
    for kind, text in pool.run(stale_optimizers.step, 2, moment="before materialize", **how):
        assert kind == "OrderError" and text.startswith(f"{name}.step: up.weight")
    assert pool.run(stale_optimizers.step, 2, moment="", **how) == [("", "")] * 2


@pytest.mark.ranks(2)
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("route", list(stale_optimizers.MOMENTS))
def test_optimizer_built_after_materialize_trains(pool, route, tp):
    assert pool.run(stale_optimizers.step, 2, route=route, moment="", tp=tp) == [("", "")] * 2


@pytest.mark.ranks(2)
def test_one_stale_parameter_raises(pool):
    for text in pool.run(stale_optimizers.error_of_one_stale_parameter, 2):
        assert text.startswith("SGD.step: down.weight: expected current parameters of the model")


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("route", "tp"), [("torch", 1), ("torch", 2), ("te_fsdp alone", 1)])
@pytest.mark.parametrize("kind", list(stale_optimizers.COPIES))
def test_optimizer_of_copied_values_raises(pool, kind, route, tp):
    """Check optimizers of tensors that no backward gives gradients. They trained nothing, without an error."""
    has_memory = kind not in ("clone", "full")
    what = "up.weight" if has_memory else "a tensor of shape "
    how = {"route": route, "tp": tp, "kind": kind}
    for text, _ in pool.run(stale_optimizers.step_on_copies, 2, **how, name="AdamW", assigned=""):
        assert text.startswith(f"AdamW.step: {what}")
        assert "expected the model's parameters, got a different tensor" in text
        assert "Fix: build the optimizer from model.parameters()" in text
    # The same program with gradients, which it assigns itself, trains. Clones it must copy back.
    for assigned in ("before", "hook") if kind in ("local", "flat") else ():
        for text, changed in pool.run(
            stale_optimizers.step_on_copies, 2, **how, name="AdamW", assigned=assigned
        ):
            assert text == "" and all(changed)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", list(stale_optimizers.OPTIMIZERS))
def test_every_optimizer_of_copied_values_raises(pool, name):
    how = {"route": "torch", "tp": 2, "kind": "local", "name": name, "assigned": ""}
    for text, _ in pool.run(stale_optimizers.step_on_copies, 2, **how):
        assert text.startswith(f"{name}.step: up.weight, and 5 more of its 6")


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "body",
    [
        stale_optimizers.step_unrelated_optimizers,
        stale_optimizers.shared_parameter,
        stale_optimizers.replaced_parameters_are_freed,
    ],
)
def test_unrelated_optimizers_step(pool, body):
    pool.run(body, 2)
