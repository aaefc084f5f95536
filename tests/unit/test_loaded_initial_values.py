"""Test main weights after a load of parameters for which TE has kept the initial value."""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

import te_fsdp
from te_fsdp import checkpoint, emulation
from te_fsdp.upstream.torch_dtensor import local_of


def build(te, seed, single, sharded, quantized=True):
    from transformer_engine.common import recipe as recipes

    torch.manual_seed(seed)
    grouped = {"single_grouped_weight": True, "use_grouped_tensor": True} if single else {}
    options = {"enabled": quantized, "recipe": recipes.MXFP8BlockScaling()}
    with (
        warnings.catch_warnings(),
        te.quantized_model_init(**options, preserve_high_precision_init_val=True),
    ):
        warnings.simplefilter("ignore")  # experimental according to TE
        layer = te.GroupedLinear(3, 128, 64, bias=False, params_dtype=torch.bfloat16, device="cpu", **grouped)
    model = nn.Sequential(layer)
    if sharded:
        te_fsdp.fully_shard(model, te_fsdp.Meshes.build(device_type="cpu"), checks="setup")
    return model


@pytest.fixture
def group():
    """End the process group of one rank that `Meshes.build` starts."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def main_weights(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    te_fsdp.main_weights(model, optimizer)
    mains = [optimizer.state[parameter]["master_param"] for parameter in model.parameters()]
    return torch.cat([local_of(main).flatten() for main in mains])


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("converts", [False, True])
def test_main_weights_start_from_loaded_values(te, tmp_path, monkeypatch, converts, single, sharded):
    """Cover loaded bytes and values that the load quantizes. Bug class: the initial weights reappear."""
    monkeypatch.setenv("NVTE_GROUPED_LINEAR_SINGLE_PARAM", "1")
    emulation.switch_arch("10.0")
    saved = build(te, 1, single, sharded, quantized=not converts)
    checkpoint.save(tmp_path / "saved", saved)
    model = build(te, 2, single, sharded)
    checkpoint.load(tmp_path / "saved", model)
    expected, found = main_weights(saved), main_weights(model)
    # MXFP8 has a relative step of 1/16.
    torch.testing.assert_close(found, expected, rtol=1 / 16, atol=1e-3)
    # The negative control: other initial values are further away.
    assert (main_weights(build(te, 2, single, sharded)) - expected).abs().max() > 0.05
