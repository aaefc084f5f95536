"""The random search over training configurations (`make search`): a few of its draws, and what it has found."""

from __future__ import annotations

import pytest
from matrix import search
from matrix.configurations import Configuration, draw

SEED = 0
#: Small draws of seed 0 whose factors differ.
DRAWS = (2, 3, 7, 21)
#: Configurations that deviated once, each with its cause mended since.
FOUND = (
    Configuration(side="never", units=("blocks.0", "side"), weights="quantized", recipe="mxfp8"),
    # MXFP8 weights that are replicated, several microbatches.
    draw(SEED, 44),
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


def test_a_number_is_one_configuration():
    """The same seed and number draw the same configuration, other numbers others."""
    assert draw(SEED, 3) == draw(SEED, 3)
    assert len({draw(SEED, number) for number in range(50)}) == 50
    assert draw(SEED, 3) != draw(SEED + 1, 3)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("drawn", [*(draw(SEED, number) for number in DRAWS), *FOUND], ids=str)
def test_drawn(pool, drawn):
    """The kind: any supported configuration trains as stock TE does in one process."""
    pool.arch = drawn.arch
    shares = pool.run(search.trial, drawn.ranks, drawn=drawn)[0]
    assert shares and max(shares.values()) <= 1


@pytest.mark.ranks(2)
@pytest.mark.parametrize("recipe", ["none", "mxfp8"])
def test_other_tokens_are_caught(pool, recipe):
    """Negative control: one rank trains on other tokens in the second step."""
    drawn = Configuration(recipe=recipe, modules=("mlp_gelu",))
    errors = pool.run_expect_error(search.trial, 2, drawn=drawn, spoil=True)
    assert any("gradient 1" in error.message for error in errors)
