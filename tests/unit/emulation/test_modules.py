"""Compare each module with float64 PyTorch; ``reference`` derives the tolerances."""

import pytest
import torch
import torch.nn.functional as F

from tests.unit.emulation import reference as ref

H, FFN, TOKENS = 64, 128, 32
ACTIVATIONS = [*ref.PLAIN, *ref.GATED, "glu", "clamped_swiglu"]


def check(module, x, expected_of, products, inner, bound=None):
    """Compare output, input and parameter gradients with those of ``expected_of(params, x)``."""
    bound = ref.fp32_bound(inner, products) if bound is None else bound
    params, x64 = ref.double(module), x.detach().double().requires_grad_()
    y = module(x)
    expected = expected_of(params, x64)
    grad = torch.randn(y.shape, dtype=torch.float64)
    y.backward(grad.to(y.dtype))
    expected.backward(grad)
    assert ref.distance(y, expected) <= bound
    assert ref.distance(x.grad, x64.grad) <= 2 * bound  # the backward passes through the forward's values
    for name, param in module.named_parameters():
        assert param.grad is not None, name
        assert ref.distance(param.grad, params[name].grad) <= 2 * bound, name


def inputs(*shape, dtype=torch.float32):
    return torch.randn(*shape, dtype=dtype).requires_grad_()


@pytest.mark.parametrize("bias", [True, False])
def test_linear_matches_float64(te, bias):
    check(
        te.Linear(H, FFN, bias=bias, device="cpu"),
        inputs(TOKENS, H),
        lambda p, x: F.linear(x, p["weight"], p.get("bias")),
        products=1,
        inner=FFN,
    )


def test_control_comparison_detects_a_scaled_weight(te):
    module = te.Linear(H, FFN, bias=True, device="cpu")
    with pytest.raises(AssertionError):
        check(
            module, inputs(TOKENS, H), lambda p, x: F.linear(x, p["weight"] * (1 + 1e-4), p["bias"]), 1, FFN
        )


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("zero_centered", [False, True])
def test_norms_match_float64(te, kind, zero_centered):
    module = getattr(te, kind)(H, zero_centered_gamma=zero_centered, device="cpu")
    with torch.no_grad():
        for param in module.parameters():
            param.add_(torch.randn_like(param) * 0.1)
    check(
        module,
        inputs(TOKENS, H),
        lambda p, x: ref.norm(x, p["weight"], p.get("bias"), kind=kind, zero_centered=zero_centered),
        products=1,
        inner=H,
    )


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_layernorm_linear_matches_float64(te, kind):
    check(
        te.LayerNormLinear(H, FFN, normalization=kind, device="cpu"),
        inputs(TOKENS, H),
        lambda p, x: F.linear(
            ref.norm(x, p["layer_norm_weight"], p.get("layer_norm_bias"), kind=kind), p["weight"], p["bias"]
        ),
        products=2,
        inner=FFN,
    )


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_layernorm_mlp_matches_float64(te, name):
    check(
        te.LayerNormMLP(H, FFN, activation=name, device="cpu"),
        inputs(TOKENS, H),
        lambda p, x: ref.layernorm_mlp(p, x, name),
        products=3,
        inner=FFN,
    )


def test_layernorm_mlp_without_bias_matches_float64(te):
    module = te.LayerNormMLP(H, FFN, activation="swiglu", normalization="RMSNorm", bias=False)
    assert {name for name, _ in module.named_parameters()} == {
        "layer_norm_weight",
        "fc1_weight",
        "fc2_weight",
    }
    check(module, inputs(TOKENS, H), lambda p, x: ref.layernorm_mlp(p, x, "swiglu", kind="RMSNorm"), 3, FFN)


@pytest.mark.parametrize("bias", [True, False])
def test_grouped_linear_matches_float64(te, bias):
    splits = [8, 0, 24]

    def expected(p, x):
        parts = [F.linear(part, p[f"weight{i}"], p.get(f"bias{i}")) for i, part in enumerate(x.split(splits))]
        return torch.cat(parts)

    module = te.GroupedLinear(3, H, FFN, bias=bias, device="cpu")
    params, x = ref.double(module), inputs(TOKENS, H)
    x64 = x.detach().double().requires_grad_()
    y, y64 = module(x, splits), expected(params, x64)
    grad = torch.randn(y.shape)
    y.backward(grad)
    y64.backward(grad.double())
    bound = ref.fp32_bound(FFN, 1)
    assert ref.distance(y, y64) <= bound
    assert ref.distance(x.grad, x64.grad) <= bound
    for name, param in module.named_parameters():
        if name.endswith("1"):
            assert not param.grad.any(), f"{name}: the empty group has no gradient"
        else:
            assert ref.distance(param.grad, params[name].grad) <= bound, name


@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize("rotary", [False, True])
def test_transformer_layer_matches_float64(te, groups, rotary):
    s, b, heads = 16, 2, 4
    module = te.TransformerLayer(
        H,
        FFN,
        heads,
        num_gqa_groups=groups,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        normalization="RMSNorm",
        activation="swiglu",
        bias=False,
        fuse_qkv_params=True,
        device="cpu",
    )
    angles = te.RotaryPositionEmbedding(H // heads)(s) if rotary else None

    class Bound(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = module

        def forward(self, x):
            return self.layer(x, rotary_pos_emb=angles)

        def named_parameters(self, *args, **kwargs):
            return module.named_parameters(*args, **kwargs)

    check(
        Bound(),
        inputs(s, b, H),
        lambda p, x: ref.transformer_layer(
            p,
            x,
            heads=heads,
            groups=groups,
            activation_name="swiglu",
            kind="RMSNorm",
            angles=None if angles is None else angles.double(),
        ),
        products=8,
        inner=FFN,
    )


@pytest.mark.parametrize("fused", [True, False])
def test_multihead_attention_matches_float64(te, fused):
    s, b, heads = 16, 2, 4
    module = te.MultiheadAttention(H, heads, attention_dropout=0.0, fuse_qkv_params=fused, device="cpu")

    def expected(p, x):
        if fused:
            mixed = F.linear(x, p["qkv.weight"], p["qkv.bias"]).view(s, b, heads, 3, H // heads)
            parts = mixed.unbind(3)
        else:
            parts = [
                F.linear(x, p[f"qkv.{part}_weight"], p[f"qkv.{part}_bias"]).view(s, b, heads, H // heads)
                for part in ("query", "key", "value")
            ]
        out = ref.attention(*parts, mask=ref.causal(s, s))
        return F.linear(out, p["proj.weight"], p["proj.bias"])

    x = inputs(s, b, H)
    params, x64 = ref.double(module), x.detach().double().requires_grad_()
    y, y64 = module(x), expected(params, x64)
    grad = torch.randn(y.shape)
    y.backward(grad)
    y64.backward(grad.double())
    bound = ref.fp32_bound(FFN, 4)
    assert ref.distance(y, y64) <= bound
    assert ref.distance(x.grad, x64.grad) <= 2 * bound
    for name, param in module.named_parameters():
        if name == "qkv.key_bias":
            continue  # softmax ignores what is added to every key's score: the gradient is 0 up to rounding
        assert ref.distance(param.grad, params[name].grad) <= 2 * bound, name


MASKS = ["no_mask", "causal", "causal_bottom_right", "padding", "padding_causal", "arbitrary"]


@pytest.mark.parametrize("softmax_type", ["vanilla", "off-by-one", "learnable"])
@pytest.mark.parametrize("mask_type", MASKS)
def test_dot_product_attention_matches_float64(te, mask_type, softmax_type):
    s, b, heads, d = 16, 2, 4, 16
    module = te.DotProductAttention(
        heads, d, num_gqa_groups=2, attention_dropout=0.0, softmax_type=softmax_type, qkv_format="sbhd"
    )
    if softmax_type == "learnable":
        with torch.no_grad():
            module.softmax_offset.copy_(torch.randn(heads))
    q, k, v = inputs(s, b, heads, d), inputs(s, b, 2, d), inputs(s, b, 2, d)
    arguments, mask = {}, None
    if "causal" in mask_type:
        mask = ref.causal(s, s)
    if "padding" in mask_type:
        hidden = torch.arange(s) >= torch.tensor([12, 16]).reshape(2, 1)
        arguments["attention_mask"] = hidden.reshape(b, 1, 1, s)
        both = hidden.reshape(b, 1, 1, s) | hidden.reshape(b, 1, s, 1)
        mask = both if mask is None else mask | both
    if mask_type == "arbitrary":
        mask = torch.rand(1, 1, s, s) < 0.3
        mask[..., 0] = False
        arguments["attention_mask"] = mask
    y = module(q, k, v, attn_mask_type=mask_type, **arguments)
    doubles = [t.detach().double().requires_grad_() for t in (q, k, v)]
    offset = module.softmax_offset if softmax_type == "learnable" else None
    offset64 = None if offset is None else offset.detach().double().reshape(-1).requires_grad_()
    y64 = ref.attention(*doubles, mask=mask, offset=offset64, extra=softmax_type != "vanilla")
    grad = torch.randn(y.shape)
    if "padding" in mask_type:
        grad = grad * ~hidden.t().unsqueeze(-1)  # the outputs of padded tokens mean nothing
        y64 = y64 * ~hidden.t().unsqueeze(-1)
        y_seen = y * ~hidden.t().unsqueeze(-1)
    else:
        y_seen = y
    y.backward(grad)
    y64.backward(grad.double())
    bound = ref.fp32_bound(64, 2)
    assert ref.distance(y_seen, y64) <= bound
    for got, expected in zip((q, k, v), doubles, strict=True):
        assert ref.distance(got.grad, expected.grad) <= 4 * bound
    if offset is not None:
        assert ref.distance(offset.grad.reshape(-1), offset64.grad) <= 4 * bound


def test_bf16_attention_with_fused_masked_softmax_matches_float64(te):
    s, b, heads, d = 32, 2, 4, 16
    module = te.DotProductAttention(heads, d, attention_dropout=0.0)
    q, k, v = (inputs(s, b, heads, d, dtype=torch.bfloat16) for _ in range(3))
    y = module(q, k, v, attn_mask_type="causal")
    y64 = ref.attention(q.double(), k.double(), v.double(), mask=ref.causal(s, s))
    # scores, probabilities and output are each rounded to bf16; a score of size up to 4 moves its exponential
    # by 4 eps
    assert ref.distance(y, y64) <= 6 * 2 * ref.BF16_EPS


def test_activation_checkpointing_gives_the_same_gradients(te):
    module = te.TransformerLayer(H, FFN, 4, hidden_dropout=0.1, attention_dropout=0.1, device="cpu")
    x = inputs(16, 2, H)
    results = []
    for run in (lambda: module(x), lambda: te.checkpoint(module, x)):
        torch.manual_seed(1)
        module.zero_grad()
        x.grad = None
        run().sum().backward()
        results.append([x.grad.clone(), *(p.grad.clone() for p in module.parameters())])
    for plain, again in zip(*results, strict=True):
        assert torch.equal(
            plain, again
        )  # the recomputation repeats the same operations with the same random numbers


def test_reset_parameters_materializes_meta_modules(te):
    module = te.LayerNormMLP(H, FFN, device="meta")
    assert all(p.is_meta for p in module.parameters())
    module.reset_parameters()
    assert {p.device.type for p in module.parameters()} == {"cpu"}
    check(module, inputs(TOKENS, H), lambda p, x: ref.layernorm_mlp(p, x, "gelu"), 3, FFN)
