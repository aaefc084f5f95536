"""Check the requirements of a single grouped parameter before any change."""

import types
import warnings

import pytest
import torch

import te_fsdp
from te_fsdp.errors import PlacementError, PrecisionError
from te_fsdp.layout import ExpertRange
from te_fsdp.modules.grouped import check_recipe, check_single, plan_single_shard_dims
from te_fsdp.quantized.alignment import Grid
from te_fsdp.quantized.grouped_weight import grouped_shard_dim, grouped_weight_class
from te_fsdp.upstream.te_modules import grouped_path_problem


@pytest.fixture(autouse=True)
def _switched_on(monkeypatch):
    monkeypatch.setenv("NVTE_GROUPED_LINEAR_SINGLE_PARAM", "1")


def build(te, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # experimental according to TE
        return te.GroupedLinear(
            3,
            128,
            256,
            bias=False,
            params_dtype=torch.bfloat16,
            device="cpu",
            single_grouped_weight=True,
            **options,
        )


def on(te, monkeypatch, capability, version):
    """Simulate a device and a cuBLASLt version."""
    linear = te.module.grouped_linear
    monkeypatch.setattr(linear, "get_device_compute_capability", lambda: capability)
    monkeypatch.setattr(linear, "tex", types.SimpleNamespace(get_cublasLt_version=lambda: version))


@pytest.mark.parametrize(
    ("capability", "recipe", "enough", "short", "words"),
    [
        ((9, 0), None, 130400, 130300, "cuBLASLt 13.4 or later"),
        ((9, 0), "Float8CurrentScaling", 130500, 130400, "cuBLASLt 13.5 or later"),
        ((9, 0), "Float8BlockScaling", 130600, 130500, "cuBLASLt 13.6 or later"),
        ((10, 0), None, 130300, 130200, "cuBLASLt 13.3 or later"),
        ((10, 0), "MXFP8BlockScaling", 130300, 130200, "cuBLASLt 13.3 or later"),
    ],
)
def test_old_cublas_is_reported_for_grouped_kernels(
    te, monkeypatch, capability, recipe, enough, short, words
):
    from transformer_engine.common import recipe as recipes

    made = getattr(recipes, recipe)() if recipe else None
    on(te, monkeypatch, capability, enough)
    assert grouped_path_problem(made) == ""
    on(te, monkeypatch, capability, short)
    problem = grouped_path_problem(made)
    assert words in problem and f"found 13.{short // 100 % 100}" in problem


def test_unsupported_devices_and_recipes_are_reported(te, monkeypatch):
    from transformer_engine.common import recipe as recipes

    on(te, monkeypatch, (8, 9), 130600)
    assert "not for compute capability 8.9" in grouped_path_problem(None)
    on(te, monkeypatch, (10, 0), 130600)
    for recipe in (recipes.DelayedScaling(), recipes.Float8BlockScaling()):
        assert f"no grouped kernels for {type(recipe).__name__}" in grouped_path_problem(recipe)


def test_single_grouped_weight_is_rejected_before_binding(te, monkeypatch):
    module = build(te, use_grouped_tensor=True)
    check_single(module, "experts")
    on(te, monkeypatch, (9, 0), 130100)
    with pytest.raises(
        PlacementError, match=r"with this device.*13\.4 or later for its grouped kernels .* found 13\.1"
    ):
        te_fsdp.set_device_mesh(module)
    assert type(module) is te.GroupedLinear and not isinstance(module.weight, te_fsdp.errors.TeFsdpError)
    del module.use_grouped_tensor  # as before TransformerEngine 2.19
    with pytest.raises(PlacementError, match=r"so the parameter gets no gradient.*2\.19 or later"):
        check_single(module, "experts")


def test_single_grouped_weight_rejects_delayed_scaling(te):
    from transformer_engine.common import recipe as recipes

    with te.quantized_model_init(enabled=True, recipe=recipes.DelayedScaling()):
        module = build(te, use_grouped_tensor=True)
    with pytest.raises(PlacementError, match=r"delayed scaling.*stores such weights separately"):
        check_single(module, "experts")
    module = build(te, use_grouped_tensor=True)
    te_fsdp.set_device_mesh(module)
    x, splits = torch.randn(384, 128).bfloat16(), torch.tensor([128, 128, 128])
    with (
        pytest.raises(PrecisionError, match="no grouped kernels for DelayedScaling"),
        te.autocast(enabled=True, recipe=recipes.DelayedScaling()),
    ):
        module(x, splits)
    check_recipe(module, "experts")  # outside of any recipe


def test_single_grouped_weight_requires_the_environment_variable(te, monkeypatch):
    """TE ignores the option with a warning only. Stock modules then have one parameter per expert."""
    monkeypatch.delenv("NVTE_GROUPED_LINEAR_SINGLE_PARAM")
    with pytest.raises(PlacementError, match=r"NVTE_GROUPED_LINEAR_SINGLE_PARAM=1, got not set"):
        te_fsdp.GroupedLinear(2, 128, 128, device="cpu", single_grouped_weight=True)
    assert build(te, use_grouped_tensor=True).weight0.shape == (256, 128)


def test_bound_grouped_weight_shares_memory_with_te(te):
    """The bound parameter and TE's own view share the memory that TE allocated."""
    module = build(te, use_grouped_tensor=True)
    pointer = module.weight.rowwise_data.data_ptr()
    te_fsdp.set_device_mesh(module)
    assert type(module.weight) is torch.nn.Parameter and module.weight.shape == (3, 256, 128)
    seen = module._get_weight_tensors()[0]
    assert isinstance(seen, te.tensor.GroupedTensor)
    assert module.weight.data_ptr() == seen.rowwise_data.data_ptr() == pointer
    module(torch.randn(384, 128).bfloat16(), torch.tensor([256, 0, 128])).sum().backward()
    assert module.weight.grad.shape == (3, 256, 128) and bool(module.weight.grad[0].any())
    assert not bool(module.weight.grad[1].any()), "an expert without tokens has a gradient of zeros"


@pytest.mark.parametrize("recipe", ["MXFP8BlockScaling", "Float8CurrentScaling"])
def test_stock_module_loads_a_bound_quantized_weight(te, recipe):
    """TE's ``GroupedTensor`` read the memory of te_fsdp's class, which has none. The process then crashed."""
    from transformer_engine.common import recipe as recipes

    with te.quantized_model_init(recipe=getattr(recipes, recipe)()):
        stock, bound = (build(te, use_grouped_tensor=True) for _ in range(2))
    te_fsdp.set_device_mesh(bound)
    state = bound.state_dict()
    assert type(state["weight"]) is grouped_weight_class()
    values = [expert.dequantize() for expert in stock.weight.split_into_quantized_tensors()]
    assert not torch.equal(torch.stack(values), bound.weight.dequantize()), "the control"
    stock.load_state_dict(state)
    values = [expert.dequantize() for expert in stock.weight.split_into_quantized_tensors()]
    assert torch.equal(torch.stack(values), bound.weight.dequantize())


def test_grouped_weight_shard_dim_is_chosen_by_divisibility(te):
    assert [grouped_shard_dim((4, 6, 5), ranks) for ranks in (1, 2, 4, 3, 5, 7)] == [0, 0, 0, 1, 2, 0]
    module = build(te, use_grouped_tensor=True)
    assert plan_single_shard_dims(module, Grid(dp_shard=2)) == {"weight": 1}
    assert plan_single_shard_dims(module, Grid(dp_shard=3)) == {"weight": 0}
    from transformer_engine.common import recipe as recipes

    with te.quantized_model_init(enabled=True, recipe=recipes.MXFP8BlockScaling()):
        module = build(te, use_grouped_tensor=True)
    for ranks, cut in ((2, 1), (3, 0), (8, 1), (16, 0)):  # full blocks of 32 rows, else complete experts
        assert plan_single_shard_dims(module, Grid(dp_shard=ranks)) == {"weight": cut}, ranks


def test_grouped_weight_shard_dim_is_equal_on_all_ep_ranks(te):
    """Ranks with different numbers of experts must shard the same dim of one tensor."""
    assert [ExpertRange(0, 4, 7, 4).counts(), ExpertRange(4, 3, 7, 4).counts()] == [(4, 3), (4, 3)]
    assert ExpertRange(2, 2, 4, 2).counts() == ExpertRange(0, 2, 4).counts() == (2, 2)
    module = build(te, use_grouped_tensor=True)  # three
    for experts, cut in ((ExpertRange(0, 3, 4, 3), 1), (ExpertRange(3, 3, 6, 3), 0)):
        sharded = {"dp_shard": 3, "tp": 1}
        module.out_features, module.in_features = 384, 128
        assert plan_single_shard_dims(module, Grid(**sharded), experts) == {"weight": cut}, experts


def test_quantized_grouped_weight_requires_full_blocks(te):
    """Quantized experts that are not full blocks are rejected before any change."""
    from transformer_engine.common import recipe as recipes

    with te.quantized_model_init(enabled=True, recipe=recipes.MXFP8BlockScaling()):
        module = build(te, use_grouped_tensor=True)
    module.out_features = 144
    with pytest.raises(PlacementError, match=r"experts\.weight: mxfp8 weight of tp-local shape \(144, 128\)"):
        plan_single_shard_dims(module, Grid(dp_shard=3), None, "experts")
