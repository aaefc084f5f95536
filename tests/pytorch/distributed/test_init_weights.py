"""A model's own initialization, such as `init_weights`, which runs on unsharded tensors."""

from __future__ import annotations

import pytest
from parity import init_weights as bodies

from te_fsdp.layout import STRATEGIES


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("kind", "axes", "strategy", "route"),
    [
        *(("Applied", {"dp_shard": 2}, strategy, "sharded") for strategy in STRATEGIES),
        ("Named", {"dp_shard": 2}, "optim_grads_params", "sharded"),
        ("Renamed", {"dp_shard": 2}, "optim_grads_params", "sharded"),
        *(("Public", {"dp_shard": 2}, strategy, "sharded") for strategy in STRATEGIES),
        ("Public", {"dp_shard": 1, "tp": 2}, "optim_grads_params", "bound"),
        ("PublicByClass", {"dp_shard": 2}, "optim_grads_params", "bound"),
        *(
            ("PublicReset", {"dp_shard": 2}, strategy, "sharded")
            for strategy in ("optim", "optim_grads_params")
        ),
        ("PublicReset", {"dp_shard": 1, "tp": 2}, "optim_grads_params", "bound"),
        ("Inner", {"dp_shard": 2}, "optim_grads_params", "sharded"),
        *(("Stock", {"dp_shard": 2}, strategy, "sharded") for strategy in STRATEGIES),
        ("Stock", {"dp_shard": 2}, "optim_grads_params", "bound"),
        ("Applied", {"dp_shard": 1, "tp": 2}, "no_shard", "sharded"),
        ("Named", {"dp_shard": 1, "tp": 2}, "optim_grads_params", "bound"),
    ],
    ids=lambda value: "_".join(f"{k}{v}" for k, v in value.items()) if isinstance(value, dict) else value,
)
def test_initial_values_equal_one_process(pool, kind, axes, strategy, route):
    """Check every form of a model's own initialization bit for bit, from the same random state."""
    pool.run(bodies.equals_one_process, 2, kind=kind, axes=axes, strategy=strategy, route=route)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("kind", ["Applied", "Named"])
@pytest.mark.parametrize(
    "axes", [{"dp_shard": 2, "tp": 2}, {"dp_replicate": 2, "dp_shard": 2}], ids=["tp", "hsdp"]
)
def test_initial_values_equal_one_process_on_larger_meshes(pool, kind, axes):
    """Check tp, stacked layouts and replicas."""
    pool.run(bodies.equals_one_process, 4, kind=kind, axes=axes, strategy="optim_grads_params")


@pytest.mark.cpu
@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
@pytest.mark.parametrize("name", ["llama", "llama-tied-biased"])
def test_huggingface_models(pool, name, strategy):
    """Check `_init_weights` called by `init_weights`, which marks a model on meta as initialized."""
    pytest.importorskip("transformers")
    pool.run(bodies.huggingface, 2, name=name, strategy=strategy)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
def test_init_weights_keeps_loaded_values(pool, strategy):
    pool.run(bodies.keeps_loaded_values, 2, strategy=strategy)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("NeedsArguments", "an initialization of its own that cannot be called"),
        ("AssignsParameters", "its own initialization assigned parameters"),
    ],
)
def test_init_that_cannot_run_raises_on_all_ranks(pool, kind, text):
    for error in pool.run_expect_error(bodies.error_of_init, 2, kind=kind):
        assert error.type_name == "InitError"
        assert text in error.message


@pytest.mark.ranks(2)
@pytest.mark.parametrize("route", ["sharded", "bound", "alone"])
@pytest.mark.parametrize(
    ("through", "names"),
    [("init", ("blocks.1.fc1_weight", "norm.weight")), ("helper", ("column.weight", "embedding.weight"))],
    ids=["init", "helper"],
)
def test_inline_initialization_on_meta_raises(pool, through, names, route):
    """Check values that a constructor writes on meta, which nothing can repeat."""
    for error in pool.run_expect_error(bodies.inline, 2, through=through, route=route):
        assert error.type_name == "InitError"
        assert "initialized by code that ran on meta" in error.message
        assert all(name in error.message for name in names)
        assert "positions" not in error.message


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_inline_initialization_raises_under_every_strategy(pool, strategy):
    for error in pool.run_expect_error(bodies.inline, 2, through="init", route="sharded", strategy=strategy):
        assert error.type_name == "InitError"


@pytest.mark.ranks(2)
def test_writes_to_data_in_a_constructor_warn(pool):
    """Check writes that torch does not count. Only the constructor's source shows them."""
    for warnings in pool.run(bodies.inline, 2, through="data", route="sharded"):
        assert ["Inline" in text and "normal_" in text for text in warnings] == [True]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("route", ["sharded", "bound", "alone"])
def test_constructor_that_repeats_reset_parameters_passes(pool, route):
    """Negative control: writes that `materialize` repeats."""
    pool.run(bodies.inline, 2, through="none", route=route)


@pytest.mark.ranks(2)
def test_forward_of_a_model_that_materializes_itself(pool):
    """Check that its parameters do not count as assigned to ``.data``."""
    pool.run(bodies.forward_of_materialized, 2)
