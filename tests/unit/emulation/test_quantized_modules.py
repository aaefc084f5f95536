"""Compare quantized modules with float64 PyTorch."""

import math

import pytest
import torch
import torch.nn.functional as F

from te_fsdp import emulation
from tests.unit.emulation import reference as ref

H, FFN, TOKENS = 128, 256, 128
RECIPES = [
    "Float8CurrentScaling",
    "DelayedScaling",
    "Float8BlockScaling",
    "MXFP8BlockScaling",
    "NVFP4BlockScaling",
]

# E2M1: in units of a sixth of the block's amax the grid's steps are 0.5 below 2, 1 below 4, 2 up to 6.
# Uniform rounding errors (step^2 / 12) weighted by where 16 normal values with amax 1.8 sigma fall (44, 32,
# 24 %) give an rms of 0.1 of sigma; the E4M3 block scale adds 2^-4 / sqrt(3). Stochastic rounding doubles the
# variance of the first.
NVFP4_NEAREST = math.hypot(0.1, ref.E4M3_EPS / math.sqrt(3))
NVFP4_STOCHASTIC = math.hypot(0.1 * math.sqrt(2), ref.E4M3_EPS / math.sqrt(3))


def stage(recipe, backward):
    """Bound of one quantized product: forward E4M3 x E4M3, backward E5M2 gradients for the hybrid recipes."""
    if recipe == "NVFP4BlockScaling":
        return math.hypot(NVFP4_NEAREST, NVFP4_STOCHASTIC if backward else NVFP4_NEAREST)
    hybrid = recipe in ("Float8CurrentScaling", "DelayedScaling")
    return ref.stage(ref.E4M3_EPS, ref.E5M2_EPS if hybrid and backward else ref.E4M3_EPS)


def make_recipe(name, arch):
    from transformer_engine.common import recipe

    if arch == "9.0" and name in ("MXFP8BlockScaling", "NVFP4BlockScaling"):
        pytest.skip(f"{name} needs architecture 10.0")
    return getattr(recipe, name)()


def run(te, recipe, module, x, steps=1, call=None):
    """Run ``steps`` forwards and backwards; return the last one's output and output gradient."""
    for _ in range(steps):
        module.zero_grad()
        x.grad = None
        with te.autocast(enabled=True, recipe=recipe):
            y = module(x) if call is None else call(module, x)
        grad = torch.randn_like(y)
        y.backward(grad)
    return y, grad


def compare(module, x, y, grad, expected_of, name, forward_stages, backward_stages):
    params, x64 = ref.double(module), x.detach().double().requires_grad_()
    y64 = expected_of(params, x64)
    y64.backward(grad.double())
    forward = forward_stages * stage(name, False) + 4 * ref.BF16_EPS
    backward = forward + backward_stages * stage(name, True)
    assert 1e-4 < ref.distance(y, y64) <= forward  # the lower end: it was quantized at all
    assert 1e-4 < ref.distance(x.grad, x64.grad) <= backward
    for key, param in module.named_parameters():
        assert ref.distance(param.grad, params[key].grad) <= backward, key


def build(te, recipe, primary, make):
    with te.quantized_model_init(enabled=primary, recipe=recipe):
        return make()


@pytest.mark.parametrize("primary", [False, True])
@pytest.mark.parametrize("name", RECIPES)
def test_quantized_linear_matches_float64_within_bound(te, arch, name, primary):
    recipe = make_recipe(name, arch)
    module = build(te, recipe, primary, lambda: te.Linear(H, FFN, params_dtype=torch.bfloat16, device="cpu"))
    x = torch.randn(TOKENS, H, dtype=torch.bfloat16, requires_grad=True)
    y, grad = run(te, recipe, module, x, steps=2)
    compare(module, x, y, grad, lambda p, v: F.linear(v, p["weight"], p["bias"]), name, 1, 1)


@pytest.mark.parametrize("activation,kind", [("gelu", "LayerNorm"), ("swiglu", "RMSNorm")])
@pytest.mark.parametrize("name", RECIPES)
def test_quantized_layernorm_mlp_matches_float64_within_bound(te, arch, name, activation, kind):
    recipe = make_recipe(name, arch)
    module = te.LayerNormMLP(
        H, FFN, activation=activation, normalization=kind, params_dtype=torch.bfloat16, device="cpu"
    )
    x = torch.randn(TOKENS, H, dtype=torch.bfloat16, requires_grad=True)
    y, grad = run(te, recipe, module, x, steps=2)
    # forward: two products, and the activation's slope (at most 1.13) on the first; backward: two more
    # products
    compare(module, x, y, grad, lambda p, v: ref.layernorm_mlp(p, v, activation, kind=kind), name, 2.13, 2)


@pytest.mark.parametrize("name", ["Float8CurrentScaling", "Float8BlockScaling", "MXFP8BlockScaling"])
@pytest.mark.parametrize("activation", [*ref.PLAIN, *ref.GATED, "glu", "clamped_swiglu"])
def test_quantized_mlp_with_every_activation_matches_float64_within_bound(te, arch, name, activation):
    recipe = make_recipe(name, arch)
    module = te.LayerNormMLP(H, FFN, activation=activation, params_dtype=torch.bfloat16, device="cpu")
    x = torch.randn(TOKENS, H, dtype=torch.bfloat16, requires_grad=True)
    y, grad = run(te, recipe, module, x)
    # squaring doubles a relative error; the fc1 outputs here are small, so every other slope is below 1.2
    slope = 2 if activation.startswith("sre") else 1.2
    compare(
        module, x, y, grad, lambda p, v: ref.layernorm_mlp(p, v, activation), name, 1 + 2 * slope, 2 + slope
    )


@pytest.mark.parametrize(
    "name", ["Float8CurrentScaling", "DelayedScaling", "Float8BlockScaling", "MXFP8BlockScaling"]
)
def test_quantized_layernorm_linear_and_grouped_linear_match_float64_within_bound(te, arch, name):
    recipe = make_recipe(name, arch)
    x = torch.randn(TOKENS, H, dtype=torch.bfloat16, requires_grad=True)
    module = te.LayerNormLinear(H, FFN, params_dtype=torch.bfloat16, device="cpu")
    y, grad = run(te, recipe, module, x, steps=2)

    def expected(p, v):
        return F.linear(ref.norm(v, p["layer_norm_weight"], p["layer_norm_bias"]), p["weight"], p["bias"])

    compare(module, x, y, grad, expected, name, 1, 1)
    splits = [32, 96]
    module = te.GroupedLinear(2, H, FFN, params_dtype=torch.bfloat16, device="cpu")
    y, grad = run(te, recipe, module, x, steps=2, call=lambda m, v: m(v, splits))

    def grouped(p, v):
        return torch.cat(
            [F.linear(part, p[f"weight{i}"], p[f"bias{i}"]) for i, part in enumerate(v.split(splits))]
        )

    compare(module, x, y, grad, grouped, name, 1, 1)


@pytest.mark.parametrize("primary", [False, True])
@pytest.mark.parametrize("name", RECIPES)
def test_quantized_transformer_layer_matches_float64_within_bound(te, arch, name, primary):
    recipe, heads, s, b = make_recipe(name, arch), 4, 32, 4
    module = build(
        te,
        recipe,
        primary,
        lambda: te.TransformerLayer(
            H,
            FFN,
            heads,
            num_gqa_groups=2,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            fuse_qkv_params=True,
            params_dtype=torch.bfloat16,
            device="cpu",
        ),
    )
    x = torch.randn(s, b, H, dtype=torch.bfloat16, requires_grad=True)
    y, grad = run(te, recipe, module, x, steps=2)
    params, x64 = ref.double(module), x.detach().double().requires_grad_()
    y64 = ref.transformer_layer(params, x64, heads=heads, groups=2)
    y64.backward(grad.double())
    # Both branches are small relative to the residual stream, which is exact up to bf16; four quantized products
    # all in all.
    bound = 4 * stage(name, False) * ((y64 - x64).norm() / y64.norm()).item() + 4 * ref.BF16_EPS
    assert 1e-4 < ref.distance(y, y64) <= bound
    assert (
        ref.distance(x.grad, x64.grad)
        <= 8 * stage(name, True) * ((x64.grad - grad).norm() / x64.grad.norm()).item()
    )


def test_control_bound_excludes_a_transposed_weight_and_a_wrong_scale(te, arch):
    """Negative control: a transposed weight or a scale that is off by 2 exceeds the bound."""
    recipe = make_recipe("Float8CurrentScaling", arch)
    module = te.Linear(H, H, bias=False, params_dtype=torch.bfloat16, device="cpu")
    x = torch.randn(TOKENS, H, dtype=torch.bfloat16, requires_grad=True)
    y, grad = run(te, recipe, module, x)
    for wrong in (lambda p, v: F.linear(v, p["weight"].t()), lambda p, v: F.linear(v, 2 * p["weight"])):
        with pytest.raises(AssertionError):
            compare(module, x, y, grad, wrong, "Float8CurrentScaling", 1, 1)


def _delayed(te, scale):
    return te.Float8Quantizer(
        scale=torch.tensor([scale]),
        amax=torch.zeros(1),
        fp8_dtype=te.DType.kFloat8E4M3,
        rowwise=True,
        columnwise=True,
    )


def _current(te):
    return te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, device="cpu")


def test_delayed_scaling_quantizes_activations_directly_from_fp32(te):
    import transformer_engine_torch as tex

    x = torch.randn(64, 256).bfloat16()
    value = F.silu(x[:, :128].float()) * x[:, 128:].float()
    quantizer = _delayed(te, 16.0)
    out = tex.swiglu(x, quantizer)
    direct = (value * 16.0).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    through_bf16 = (
        (value.bfloat16().float() * 16.0).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    )
    assert not torch.equal(direct, through_bf16)  # or this test could not distinguish them
    # the kernel's order of multiplication differs from F.silu by an ulp, which may move a value that sits on
    # a tie
    assert (out._data != direct).sum() <= 2
    assert (out._data != through_bf16).sum() > 10
    assert quantizer.amax.item() == pytest.approx(value.abs().max().item(), rel=4 * ref.FP32_UNIT)


def test_current_scaling_uses_the_unrounded_amax_in_activations_only(te):
    import transformer_engine_torch as tex

    weight = torch.ones(128, dtype=torch.bfloat16)
    seen = {"act": 0, "norm": 0}
    for seed in range(8):
        torch.manual_seed(seed)
        x = torch.randn(64, 256).bfloat16()
        value = F.silu(x[:, :128].float()) * x[:, 128:].float()
        got = 448 * tex.swiglu(x, _current(te))._scale_inv.item()
        assert got == pytest.approx(value.abs().max().item(), rel=8 * ref.FP32_UNIT)
        seen["act"] += got != pytest.approx(value.bfloat16().abs().max().item(), rel=8 * ref.FP32_UNIT)
        normed = tex.rmsnorm_fwd(x[:, :128], weight, 1e-5, None, None, te.DType.kFloat32, 0, False)[0]
        out = tex.rmsnorm_fwd(x[:, :128], weight, 1e-5, None, _current(te), te.DType.kBFloat16, 0, False)[0]
        got = 448 * out._scale_inv.item()
        assert got == pytest.approx(normed.bfloat16().abs().max().item(), rel=8 * ref.FP32_UNIT)
        seen["norm"] += got != pytest.approx(normed.abs().max().item(), rel=8 * ref.FP32_UNIT)
    assert (
        seen["act"] > 4 and seen["norm"] > 4
    )  # rounding changed the amax in most draws, so that the two can be distinguished


def test_gemm_reads_only_the_representation_that_the_kernel_reads(te, arch):
    from transformer_engine.pytorch.cpp_extensions import general_gemm

    quantizer = _current(te)
    weight, x = (quantizer(torch.randn(64, 64)) for _ in range(2))
    general_gemm(weight, x, torch.bfloat16, layout="TN")
    if arch == "9.0":
        weight._transpose_invalid = True
        with pytest.raises(emulation.EmulationError, match="_transpose is flagged invalid"):
            general_gemm(weight, x, torch.bfloat16, layout="NN")
    weight._transpose, weight._data = weight._data.t().contiguous(), None
    weight._transpose_invalid = False
    if arch == "9.0":
        general_gemm(weight, x, torch.bfloat16, layout="NN")
        with pytest.raises(emulation.EmulationError, match="_data is missing"):
            general_gemm(weight, x, torch.bfloat16, layout="TN")


def test_gemm_rejects_operands_that_kernels_reject(te):
    from transformer_engine.pytorch.cpp_extensions import general_gemm

    quantizer = _current(te)
    a, b = quantizer(torch.randn(32, 24)), quantizer(torch.randn(32, 24))
    with pytest.raises(
        emulation.EmulationError, match="leading dimension of A is 24, must be a multiple of 16"
    ):
        general_gemm(a, b, torch.bfloat16, layout="TN")
    with pytest.raises(emulation.EmulationError, match="quantized and an unquantized operand"):
        general_gemm(quantizer(torch.randn(32, 32)), torch.randn(32, 32), torch.bfloat16, layout="TN")
    with pytest.raises(emulation.EmulationError, match="Invalid matrix dimensions"):
        general_gemm(torch.randn(8, 4), torch.randn(8, 5), torch.float32, layout="TN")
