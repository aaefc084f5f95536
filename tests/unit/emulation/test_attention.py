"""Compare attention functions, as context parallelism calls them, with plain torch."""

from types import SimpleNamespace

import pytest
import torch

from tests.unit.emulation import reference as ref

# Values are rounded once, to bf16 (2^-9 of each), and so are the output and its gradient that backward takes.
BF16 = 2**-8


def _plain(q, k, v, window, bottom_right):
    """Return attention of (batch, sequence, heads, channels) in float64, and the logarithms of the rows' sums."""
    k, v = (item.repeat_interleave(q.shape[2] // item.shape[2], dim=2) for item in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * 0.3
    shift = k.shape[1] - q.shape[1] if bottom_right else 0
    distance = torch.arange(k.shape[1]) - torch.arange(q.shape[1])[:, None] - shift
    left, right = (side if side >= 0 else 99 for side in window)
    scores = scores.masked_fill((distance > right) | (distance < -left), float("-inf"))
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v), scores.logsumexp(-1, keepdim=True)


@pytest.mark.parametrize(
    "mask, window, keys",
    [
        ("no_mask", (-1, -1), 12),
        ("causal", (-1, 0), 8),
        ("causal_bottom_right", (-1, 0), 12),
        ("no_mask", (2, 1), 8),
    ],
)
@pytest.mark.parametrize("layout", ["bshd", "sbhd"])
def test_fused_attention_matches_plain_torch(te, layout, mask, window, keys):
    from transformer_engine.pytorch.cpp_extensions import fused_attn

    q, grad = (torch.randn(2, 8, 4, 16).bfloat16() for _ in range(2))
    k, v = (torch.randn(2, keys, 2, 16).bfloat16() for _ in range(2))
    expected = [item.double().requires_grad_() for item in (q, k, v)]
    out, sums = _plain(*expected, window, "bottom" in mask)
    out.backward(grad.double())

    def turned(tensor):
        return tensor.transpose(0, 1).contiguous() if layout == "sbhd" else tensor

    options = {
        "fused_attention_backend": fused_attn.FusedAttnBackend["F16_arbitrary_seqlen"],
        "attn_scale": 0.3,
        "qkv_layout": "_".join([layout] * 3),
        "o_format": layout,
        "attn_mask_type": mask,
        "attn_bias_type": "no_bias",
        "window_size": window,
        "bottom_right_diagonal": "bottom" in mask,
    }
    lengths = [torch.arange(3, dtype=torch.int32) * n for n in (8, keys)]
    inputs = [turned(item) for item in (q, k, v)]
    got, (stats, state) = fused_attn.fused_attn_fwd(
        True, 8, keys, *lengths, *inputs, torch.bfloat16, **options
    )
    assert got.dtype == torch.bfloat16 and ref.distance(turned(got), out) <= BF16
    assert ref.distance(stats, sums) <= 32 * ref.FP32_UNIT and stats.shape == (2, 4, 8, 1)
    options |= {"do_format": layout, "dqkv_layout": options["qkv_layout"]}
    grads = fused_attn.fused_attn_bwd(
        8, keys, *lengths, *inputs, got, turned(grad), torch.bfloat16, [stats, state],
        options.pop("fused_attention_backend"), **options,
    )  # fmt: skip
    for name, actual, leaf in zip("qkv", grads, expected, strict=False):
        assert ref.distance(turned(actual), leaf.grad) <= 2 * BF16, name


def test_unsupported_attention_has_no_fused_backend(te):
    import transformer_engine_torch as tex

    good = {
        "qkv_dtype": tex.DType.kBFloat16,
        "qkv_layout": tex.NVTE_QKV_Layout.NVTE_SBHD_SBHD_SBHD,
        "bias_type": tex.NVTE_Bias_Type.NVTE_NO_BIAS,
        "attn_mask_type": tex.NVTE_Mask_Type.NVTE_CAUSAL_MASK,
        "softmax_type": tex.NVTE_Softmax_Type.NVTE_VANILLA_SOFTMAX,
        "dropout": 0.0,
        "head_dim_qk": 16,
        "head_dim_v": 16,
    }
    assert tex.get_fused_attn_backend(SimpleNamespace(**good)) == (1, "")
    for name, value, reason in (
        ("qkv_dtype", tex.DType.kFloat32, "fp16 and bf16"),
        ("qkv_layout", tex.NVTE_QKV_Layout.NVTE_THD_THD_THD, "this layout"),
        ("bias_type", tex.NVTE_Bias_Type.NVTE_ALIBI, "bias, sinks or dropout"),
        ("attn_mask_type", tex.NVTE_Mask_Type.NVTE_PADDING_MASK, "padding"),
        ("dropout", 0.1, "bias, sinks or dropout"),
        ("head_dim_v", 12, "multiple of 8"),
    ):
        backend, got = tex.get_fused_attn_backend(SimpleNamespace(**{**good, name: value}))
        assert backend == -1 and reason in got, name


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_rotary_embedding_of_a_context_parallel_rank_matches_unfused(te, rank):
    from transformer_engine.pytorch.attention.rope import apply_rotary_pos_emb

    x, freqs = torch.randn(2, 4, 3, 16), te.RotaryPositionEmbedding(16)(12)
    plain, fused = (
        apply_rotary_pos_emb(x, freqs, "bshd", fused=fused, cp_size=3, cp_rank=rank)
        for fused in (False, True)
    )
    assert ref.distance(fused, plain) <= 32 * ref.FP32_UNIT
