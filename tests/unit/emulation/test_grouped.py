"""Compare GroupedLinear's single grouped parameter with one parameter per expert."""

import contextlib
import inspect
import warnings

import pytest
import torch

from te_fsdp.emulation import EmulationError
from te_fsdp.emulation.tex import grouped

IN, OUT, EXPERTS = 128, 256, 3
SPLITS = (128, 0, 256)  # an expert without tokens in the middle
#: Inputs of TE's grouped path on each architecture (``is_module_grouped_tensor_path_supported``).
RECIPES = {"9.0": ("none", "current", "block"), "10.0": ("none", "current", "mxfp8", "nvfp4")}
CASES = [(arch, recipe) for arch, recipes in RECIPES.items() for recipe in recipes]


def recipe_of(name):
    from transformer_engine.common import recipe

    classes = {
        "current": recipe.Float8CurrentScaling,
        "block": recipe.Float8BlockScaling,
        "mxfp8": recipe.MXFP8BlockScaling,
        "nvfp4": recipe.NVFP4BlockScaling,
        "delayed": recipe.DelayedScaling,
    }
    return classes[name]() if name != "none" else None


@pytest.fixture
def te_on(monkeypatch):
    """Return a function that returns TE on an architecture, with single grouped parameters enabled."""
    from te_fsdp import emulation

    monkeypatch.setenv("NVTE_GROUPED_LINEAR_SINGLE_PARAM", "1")

    def switch(arch):
        emulation.switch_arch(arch)
        import transformer_engine.pytorch as te

        if "use_grouped_tensor" not in inspect.signature(te.GroupedLinear.__init__).parameters:
            pytest.skip("this TransformerEngine has no use_grouped_tensor")
        return te

    return switch


def build(te, recipe, *, single, native=True, bias=True, quantized=False):
    torch.manual_seed(0)
    init = te.quantized_model_init(enabled=True, recipe=recipe) if quantized else contextlib.nullcontext()
    with init, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # experimental according to TE
        options = {"single_grouped_weight": single, "single_grouped_bias": single and bias}
        options |= {
            "use_grouped_tensor": native,
            "params_dtype": torch.bfloat16,
            "device": "cpu",
            "bias": bias,
        }
        module = te.GroupedLinear(EXPERTS, IN, OUT, **options)
    with torch.no_grad():  # zero biases would hide where they are added
        values = torch.randn(EXPERTS, OUT, generator=torch.Generator().manual_seed(3)).bfloat16()
        if bias and single:
            module.bias.rowwise_data.copy_(values.view(-1))
        elif bias:
            for index in range(EXPERTS):
                getattr(module, f"bias{index}").copy_(values[index])
    return module


def step(te, recipe, module):
    """Return output, input gradient, weight gradients (E, out, in), bias gradients (E, out)."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(sum(SPLITS), IN, generator=generator).bfloat16().requires_grad_()
    torch.manual_seed(2)  # stochastic rounding of NVFP4
    context = te.autocast(enabled=True, recipe=recipe) if recipe is not None else contextlib.nullcontext()
    with context:
        y = module(x, torch.tensor(SPLITS))
    y.backward(torch.randn(y.shape, generator=generator).bfloat16())
    results = {"output": y.detach(), "input gradient": x.grad}
    for name in ("weight", "bias"):
        whole = getattr(module, name, None)
        one = [getattr(module, f"{name}{i}", None) for i in range(EXPERTS)]
        if whole is not None:
            results[f"{name} gradient"] = whole.grad
        elif isinstance(one[0], torch.nn.Parameter):
            results[f"{name} gradient"] = torch.stack([p.grad for p in one])
    return results


@pytest.mark.parametrize(("arch", "name"), CASES)
@pytest.mark.parametrize("quantized", [False, True])
def test_single_grouped_parameter_equals_one_parameter_per_expert(te_on, arch, name, quantized):
    te, recipe = te_on(arch), recipe_of(name)
    if quantized and recipe is None:
        pytest.skip("nothing to quantize")
    single = step(te, recipe, build(te, recipe, single=True, quantized=quantized))
    discrete = step(te, recipe, build(te, recipe, single=False, quantized=quantized))
    assert single.keys() == discrete.keys() and len(single) == 4
    for key, value in single.items():
        assert torch.equal(value, discrete[key]), key
    assert bool((single["weight gradient"][1] == 0).all()), "no tokens, no gradient"
    assert bool((single["weight gradient"][2] != 0).any())


@pytest.mark.parametrize(("arch", "name"), CASES)
def test_grouped_gemms_equal_separate_gemms(te_on, arch, name):
    """Results without bias are bitwise equal. The grouped path adds the bias after rounding the product."""
    te, recipe = te_on(arch), recipe_of(name)
    native = step(te, recipe, build(te, recipe, single=True, bias=False))
    split = step(te, recipe, build(te, recipe, single=False, native=False, bias=False))
    for key, value in native.items():
        assert torch.equal(value, split[key]), key
    with_bias = step(te, recipe, build(te, recipe, single=True))["output"].float()
    expected = step(te, recipe, build(te, recipe, single=False, native=False))["output"].float()
    # The product is rounded to bf16 before the sum is: half a unit, 2^-8, of the product and of either sum.
    bound = 2**-8 * (native["output"].float().abs() + with_bias.abs() + expected.abs())
    assert bool(((with_bias - expected).abs() <= bound).all())


@pytest.mark.parametrize(("arch", "name"), [case for case in CASES if case[1] != "none"])
def test_grouped_weight_members_have_the_buffers_of_separate_experts(te_on, arch, name):
    """Each member has the buffers of the same expert quantized alone. A different expert's buffers differ."""
    te, recipe = te_on(arch), recipe_of(name)
    single = build(te, recipe, single=True, quantized=True).weight
    discrete = build(te, recipe, single=False, quantized=True)
    members = single.split_into_quantized_tensors()

    def buffers(tensor):
        return {k: v for k, v in tensor.get_metadata().items() if isinstance(v, torch.Tensor)}

    for index, member in enumerate(members):
        expert = buffers(getattr(discrete, f"weight{index}"))
        mine = buffers(member)
        assert mine.keys() == expert.keys() and mine
        for key, value in mine.items():
            assert torch.equal(value, expert[key]), (index, key)
    other = buffers(discrete.weight2)
    assert any(not torch.equal(value, other[key]) for key, value in buffers(members[0]).items())


def test_grouped_linear_rejects_unsupported_arguments(te_on):
    te = te_on("10.0")
    module = build(te, None, single=True)
    x = torch.randn(sum(SPLITS), IN).bfloat16()
    with pytest.raises(ValueError, match="CUDA m_splits"):  # a list becomes a host tensor
        module(x, list(SPLITS))
    with (
        pytest.raises(RuntimeError, match="Single grouped parameters require"),
        te.autocast(enabled=True, recipe=recipe_of("delayed")),
    ):
        module(x, torch.tensor(SPLITS))
    quantizer = build(te, recipe_of("mxfp8"), single=True, quantized=True).weight.quantizer
    rows = torch.randn(64, IN).bfloat16()
    with pytest.raises(EmulationError, match="divisible by 128"):
        grouped.group_quantize(rows, quantizer, 2, torch.tensor([32, 32]))
    with pytest.raises(NotImplementedError, match="last_dims"):
        grouped.group_quantize(rows, quantizer, 2, None, torch.tensor([64, 64]))
    with pytest.raises(EmulationError, match="do not fit"):
        grouped.group_quantize(rows, quantizer, 2, torch.tensor([128, 128]))
    block = te_on("9.0") and build(te, recipe_of("block"), single=True, quantized=True).weight.quantizer
    te_on("10.0")
    with pytest.raises(EmulationError, match=r"9\.0 only"):
        grouped.group_quantize(rows, block, 2, torch.tensor([32, 32]))


def test_quantized_workspace_is_refreshed_by_the_next_first_microbatch(te_on):
    """``is_first_microbatch=True`` quantizes the weight. Later microbatches reuse it until the next first one."""
    te, recipe = te_on("10.0"), recipe_of("mxfp8")
    module = build(te, recipe, single=True, bias=False)
    x, splits = torch.randn(sum(SPLITS), IN).bfloat16(), torch.tensor(SPLITS)

    def run(first):
        with torch.no_grad(), te.autocast(enabled=True, recipe=recipe):
            return module(x, splits, is_first_microbatch=first)

    before = run(True)
    with torch.no_grad():
        module.weight.rowwise_data.mul_(2)
    assert torch.equal(run(False), before)
    assert torch.equal(run(True), 2 * before)
