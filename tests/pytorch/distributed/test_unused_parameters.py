"""Parameters that a backward does not reach.

No released memory is read. Gradients are those of one process.
"""

from __future__ import annotations

import math

import pytest
import torch
from no_sharding import weight_decay
from quantization import unused_units
from torch.distributed.fsdp import MixedPrecisionPolicy

HOW = ("two outputs", "left out", "frozen trunk")


@pytest.mark.ranks(2)
@pytest.mark.arch("9.0", "10.0")
@pytest.mark.covering(
    strength=1, always=[{"arch": "9.0", "recipe": "current"}, {"arch": "10.0", "recipe": "mxfp8"}]
)
@pytest.mark.parametrize("recipe", ["current", "delayed", "block", "mxfp8", "nvfp4"])
def test_unused_quantized_weights_have_zero_gradients(pool, arch, recipe):
    """Check that an unsharded quantized weight is never read outside of its unsharded window.

    ``zeros_like`` of such a weight dequantizes it, and its memory is released (SIGSEGV on the CPU, SIGABRT on GPUs).
    """
    for how in HOW:
        pool.run(unused_units.training, 2, recipe=recipe, how=how)


@pytest.mark.ranks(2)
@pytest.mark.arch("9.0")
@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("recipe", ["current", "block"])
@pytest.mark.parametrize(
    "options",
    [
        {"zero_copy": True},
        {"fp32_gradients": True},
        {"schedule": "no_sync", "fp32_gradients": True, "units": ()},
        {"schedule": "microbatch"},
        {"schedule": "by hand"},
        {"units": ()},
        {"strategy": "optim_grads"},
    ],
    ids=str,
)
def test_zero_gradients_do_not_read_the_weight(pool, arch, recipe, options):
    """Check that every path that creates zero gradients, torch's included, does not read the weight."""
    pool.run(unused_units.training, 2, recipe=recipe, how="left out", **options)


@pytest.mark.ranks(2)
@pytest.mark.arch("9.0")
def test_torch_reduce_scatter_unused_params(pool, arch):
    """Check a user's own ``fully_shard`` with ``set_reduce_scatter_unused_params`` (torch 2.13 and later)."""
    pool.run(unused_units.training, 2, recipe="current", how="left out", engine="torch")


@pytest.mark.ranks(2)
@pytest.mark.arch("9.0")
def test_negative_control_gradients_of_a_different_step(pool, arch):
    """Negative control: the gradients of a different step."""
    errors = pool.run_expect_error(unused_units.training, 2, recipe="current", how="left out", spoil=True)
    assert all("trunk.weight" in error.message for error in errors)


DP2, HSDP, REPLICATE2 = (
    {"dp_shard": 2},
    {"dp_replicate": 2, "dp_shard": 2},
    {"dp_replicate": 2, "dp_shard": 1},
)


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize(
    ("axes", "strategy", "outer"),
    [
        (DP2, "no_shard", "no_shard"),
        (DP2, "optim", "no_shard"),
        (DP2, "optim_grads", "no_shard"),
        (DP2, "optim_grads_params", "no_shard"),
        (HSDP, "optim_grads", "no_shard"),
        (HSDP, "optim_grads_params", "no_shard"),
        (REPLICATE2, "optim_grads_params", "no_shard"),
        (HSDP, "optim_grads_params", "optim"),
        (REPLICATE2, "optim_grads", "optim"),
    ],
)
def test_parameters_unused_on_all_ranks_are_not_decayed(pool, axes, strategy, outer):
    """Check that `.grad` is None if no rank uses the parameter, and zeros on unused ranks otherwise."""
    for schedule in ("plain", "no_sync", "microbatch", "by hand"):
        options = {"strategy": strategy, "outer": outer, "schedule": schedule}
        pool.run(weight_decay.train_with_weight_decay, math.prod(axes.values()), axes=axes, **options)


@pytest.mark.ranks(2)
def test_unused_parameters_have_no_gradient_beside_accumulated_ones(pool):
    """Check a reduction in another dtype, for which FSDP2 accumulates microbatches apart from ``.grad``."""
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float64)
    for axes in ({"dp_shard": 1}, DP2, REPLICATE2):
        for schedule in ("no_sync", "microbatch", "by hand"):
            options = {"axes": axes, "schedule": schedule, "mp_policy": policy}
            pool.run(weight_decay.train_with_weight_decay, math.prod(axes.values()), **options)


@pytest.mark.ranks(2)
def test_negative_control_decay_with_zero_gradients(pool):
    """Negative control: gradients of zeros in place of None."""
    options = {"strategy": "optim_grads_params", "outer": "no_shard", "schedule": "plain", "zeros": True}
    errors = pool.run_expect_error(weight_decay.train_with_weight_decay, 2, axes=DP2, **options)
    assert all("never" in error.message or "c." in error.message for error in errors)
