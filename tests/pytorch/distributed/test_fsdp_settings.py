"""FSDP2's public communication settings, which have the same effect on te_fsdp's units."""

from __future__ import annotations

import pytest
from strategies import fsdp_settings
from strategies.fsdp_settings import SETTINGS, is_available

MESHES = {
    "dp2": {"dp_shard": 2},
    "tp2": {"dp_shard": 1, "tp": 2},
    "hsdp": {"dp_replicate": 2, "dp_shard": 1},
}
MIXED = {"": "optim_grads_params", "blocks.0": "optim_grads", "blocks.1": "optim"}
#: Sums of fp32 in a different order than in one process: 2^-24 times the square root of about 10^3 terms, three steps.
ORDER_OF_SUMS = 1e-5


@pytest.mark.ranks(2)
@pytest.mark.arch("9.0")
@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("strategy", ["optim_grads_params", "optim", MIXED], ids=["all", "optim", "mixed"])
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("setting", SETTINGS)
def test_settings_have_the_effect_of_fsdp2(pool, arch, setting, mesh, strategy):
    """Check outputs and weights of three steps, with the setting changed after the first."""
    if not is_available(setting):
        pytest.skip("this torch does not have it")
    for errors in pool.run(
        fsdp_settings.compare_with_setting, 2, setting=setting, axes=MESHES[mesh], strategy=strategy
    ):
        assert len(errors) == 17 and max(errors.values()) < ORDER_OF_SUMS, errors


@pytest.mark.ranks(2)
@pytest.mark.arch("9.0")
@pytest.mark.skipif(not is_available("manual finalization"), reason="new in torch 2.15")
def test_step_without_finalize_backward_raises(pool, arch):
    """Check that a step raises if FSDP2 has not reduced the gradients."""
    options = {"setting": "manual finalization", "axes": MESHES["dp2"], "strategy": "optim_grads_params"}
    errors = pool.run_expect_error(fsdp_settings.compare_with_setting, 2, **options, forgets=True)
    assert all("were not reduced" in error.message for error in errors)


@pytest.mark.ranks(2)
@pytest.mark.arch("9.0")
def test_negative_control_doubled_gradients(pool, arch):
    """Negative control: the reference has doubled gradients."""
    options = {"setting": "hook", "axes": MESHES["dp2"], "strategy": "optim"}
    for errors in pool.run(fsdp_settings.compare_with_setting, 2, **options, spoils=True):
        assert max(errors.values()) > 1000 * ORDER_OF_SUMS, errors
