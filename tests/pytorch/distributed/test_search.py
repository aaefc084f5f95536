"""The random search over training configurations (`make search`).

A few of its draws are tested, then the configurations that it has found.
"""

from __future__ import annotations

import itertools

import harness
import pytest
from matrix import search
from matrix.configurations import SCHEDULES, STRATEGIES, Configuration, draw

SEED = 0
#: Configurations whose factors differ; the last two are small draws of seed 1.
VARIED = (
    Configuration(
        recipe="current",
        weights="quantized",
        modules=("layernorm_linear",),
        mesh="tp4",
        strategy="no_shard",
        schedule="microbatch",
        microbatches=2,
    ),
    Configuration(
        arch="9.0",
        modules=("experts", "linear"),
        mesh="ep2xtp2",
        units=("blocks.0", "blocks.1"),
        schedule="start",
        microbatches=2,
        optimizer="adamw",
        route="some",
        clips=True,
    ),
    Configuration(
        recipe="current",
        modules=("grouped",),
        mesh="replicate2",
        strategy="optim_grads",
        outer="optim",
        microbatches=2,
        optimizer="sgd",
    ),
    Configuration(
        weights="fp32", precision="bf16 compute", optimizer="sgd", schedule="auto sync", microbatches=2
    ),
    draw(1, 20),
    draw(1, 37),
)
#: Configurations that deviated once, each with its cause mended since.
FOUND = (
    Configuration(side="never", units=("blocks.0", "side"), weights="quantized", recipe="mxfp8"),
    # MXFP8 weights that are replicated, several microbatches.
    Configuration(
        recipe="mxfp8",
        weights="quantized",
        modules=("transformer",),
        exempt=("blocks.0",),
        schedule="by hand",
        microbatches=2,
        side="never",
        evaluates=True,
    ),
    # Parameters that no unit shards: a part of them has optimizer state sharded over the replicas.
    Configuration(
        arch="9.0",
        modules=("mlp_swiglu", "linear"),
        mesh="replicate2",
        strategy="optim",
        first="no_shard",
        outer="optim",
        units=("blocks.0", "blocks.1"),
        exempt=("blocks.0:0", "blocks.1"),
        optimizer="sgd",
    ),
    # The gradients of a parameter that no backward reaches, where dp has one rank.
    Configuration(
        arch="9.0",
        modules=("layernorm_linear",),
        mesh="tp2",
        strategy="optim",
        schedule="no_sync",
        microbatches=2,
        optimizer="adamw",
        precision="fp32 sum",
        side="never",
    ),
    # A policy, and an fp32 vector in a bf16 unit.
    Configuration(precision="fp32 sum", vector=True, strategy="optim_grads", optimizer="sgd"),
    Configuration(
        precision="default",
        vector=True,
        mesh="tp2",
        sequence_parallel=True,
        frozen="blocks.0",
        modules=("linear", "mlp_gelu"),
    ),
    Configuration(
        recipe="mxfp8",
        weights="quantized",
        modules=("linear", "mlp_gelu"),
        exempt=("blocks.1",),
        strategy="optim_grads",
        schedule="no_sync",
        microbatches=3,
    ),
    Configuration(side="in the second step", units=("blocks.0",), optimizer="adamw", strategy="optim_grads"),
)


def _case(drawn):
    """Return the parameter of a test; Hopper GPUs skip recipes that need Blackwell."""
    marks = [pytest.mark.recipe(drawn.recipe)] if drawn.recipe in ("mxfp8", "nvfp4") else []
    return pytest.param(drawn, id=str(drawn), marks=marks)


def _trial(pool, drawn, ranks):
    """Return what rank 0 reports of a trial."""
    pool.arch = drawn.arch
    if drawn.recipe == "hybrid" and drawn.weights == "quantized" and harness.device_type() == "cuda":
        pytest.skip(
            "TransformerEngine 2.20 cannot build hybrid weights on a GPU: torch's is_fake refuses them"
        )
    return pool.run(search.trial, ranks, drawn=drawn)[0]


def test_draws_are_deterministic():
    """Check that a seed and a number always draw the same configuration, and a different number a different one."""
    assert draw(SEED, 3) == draw(SEED, 3)
    assert len({draw(SEED, number) for number in range(50)}) == 50
    assert draw(SEED, 3) != draw(SEED + 1, 3)


@pytest.mark.ranks(4)
@pytest.mark.covering(strength=0, always=[{"drawn": one} for one in FOUND])
@pytest.mark.parametrize("drawn", [_case(one) for one in (*VARIED, *FOUND)])
def test_drawn_configurations_equal_one_process(pool, drawn):
    """Check that any supported configuration trains as stock TE does in one process."""
    shares = _trial(pool, drawn, drawn.ranks)
    assert shares and max(shares.values()) <= 1


#: Devices and recipes of quantized weights, strategies, forms of microbatches, and what is not sharded.
PRODUCT = {
    "form": [
        ("10.0", "mxfp8"),
        ("10.0", "nvfp4"),
        ("10.0", "current"),
        ("10.0", "hybrid"),
        ("9.0", "delayed"),
        ("9.0", "block"),
    ],
    "strategy": STRATEGIES,
    "schedule": SCHEDULES,
    "exempt": [(), ("blocks.1",), ("blocks.0:0", "blocks.1:1")],
}


@pytest.mark.ranks(2)
@pytest.mark.covering(strength=1)
@pytest.mark.parametrize(
    "drawn",
    [
        _case(
            Configuration(
                arch=arch,
                recipe=recipe,
                weights="quantized",
                modules=("linear", "linear"),
                units=("blocks.0", "blocks.1"),
                microbatches=3,
                strategy=strategy,
                schedule=schedule,
                exempt=exempt,
            )
        )
        for (arch, recipe), strategy, schedule, exempt in itertools.product(*PRODUCT.values())
    ],
)
def test_columnwise_data_of_quantized_weights(pool, drawn):
    """Check the weight data that backward needs, by format, strategy, microbatch schedule and `no_shard`."""
    assert max(_trial(pool, drawn, 2).values()) <= 1


@pytest.mark.ranks(2)
@pytest.mark.parametrize("recipe", ["none", "mxfp8"])
def test_negative_control_different_tokens(pool, recipe):
    """Negative control: one rank trains on different tokens in the second step."""
    drawn = Configuration(recipe=recipe, modules=("mlp_gelu",))
    errors = pool.run_expect_error(search.trial, 2, drawn=drawn, spoil=True)
    assert any("gradient 1" in error.message for error in errors)
