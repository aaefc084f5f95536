"""Compare packed or cached sequences of different lengths with each sequence computed alone."""

import math

import pytest
import torch

from tests.unit.emulation import reference as ref

LENGTHS = [5, 1, 7]
BOUNDS = torch.tensor([0, 5, 6, 13], dtype=torch.int32)


def _packed(causal):
    return {
        "cu_seqlens_q": BOUNDS,
        "cu_seqlens_kv": BOUNDS,
        "max_seqlen_q": 7,
        "max_seqlen_kv": 7,
        "attn_mask_type": "padding_causal" if causal else "padding",
    }


@pytest.mark.parametrize("causal", [False, True])
def test_packed_attention_matches_separate_sequences(te, causal):
    """Output and gradients equal those of separate sequences. No query attends to a different sequence."""
    packed = te.DotProductAttention(4, 16, qkv_format="thd", attention_dropout=0.0)
    alone = te.DotProductAttention(4, 16, qkv_format="bshd", attention_dropout=0.0)
    inputs = [torch.randn(13, 4, 16, requires_grad=True) for _ in range(3)]
    copies = [one.detach().clone().requires_grad_() for one in inputs]
    result = packed(*inputs, **_packed(causal))
    mask = "causal" if causal else "no_mask"
    parts = zip(*(one.split(LENGTHS) for one in copies), strict=True)
    expected = torch.cat(
        [alone(*(item[None].clone() for item in part), attn_mask_type=mask)[0] for part in parts]
    )
    assert ref.distance(result, expected) <= 16 * ref.FP32_UNIT
    weights = torch.randn_like(result)
    (result * weights).sum().backward()
    (expected * weights).sum().backward()
    for actual, other in zip(inputs, copies, strict=True):
        assert ref.distance(actual.grad, other.grad) <= 32 * ref.FP32_UNIT
    whole = alone(*(one[None].clone() for one in copies), attn_mask_type=mask)[0]
    assert ref.distance(whole, expected) > 0.1


def test_packed_sequence_bounds_are_validated(te):
    """Reject fewer tokens than the bounds state, and sequences above the maximum. A GPU would read out of bounds."""
    import transformer_engine_torch as tex

    with pytest.raises(RuntimeError, match="12 packed tokens, but cu_seqlens ends at 13"):
        tex.convert_thd_to_bshd(torch.randn(12, 4, 16), BOUNDS, 3, 7)
    with pytest.raises(RuntimeError, match="a packed sequence of 7 tokens, longer than 6"):
        tex.convert_thd_to_bshd(torch.randn(13, 4, 16), BOUNDS, 3, 6)


@pytest.mark.parametrize("mask", ["padding", "padding_causal"])
@pytest.mark.parametrize("groups", [4, 2])
def test_padding_between_packed_sequences_is_ignored(te, mask, groups):
    """Output and gradients equal those of separate sequences in float64. Padding gets zeros.

    Negative control: bounds without the padding.
    """
    attention = te.DotProductAttention(4, 16, num_gqa_groups=groups, qkv_format="thd", attention_dropout=0.0)
    starts, padded = [0, 8, 12], torch.tensor([0, 8, 12, 20], dtype=torch.int32)
    inputs = [torch.randn(20, heads, 16).bfloat16().requires_grad_() for heads in (4, groups, groups)]
    options = {"cu_seqlens_q": BOUNDS, "cu_seqlens_kv": BOUNDS, "max_seqlen_q": 8, "max_seqlen_kv": 8}
    options |= {"attn_mask_type": mask, "pad_between_seqs": True}
    result = attention(*inputs, cu_seqlens_q_padded=padded, cu_seqlens_kv_padded=padded, **options)
    result = result.view(20, 4, 16)
    exact = [one.detach().double().requires_grad_() for one in inputs]
    expected = torch.zeros(20, 4, 16).double()
    for start, length in zip(starts, LENGTHS, strict=True):
        q, k, v = (one[start : start + length] for one in exact)
        k, v = (one.repeat_interleave(4 // groups, dim=1) for one in (k, v))
        scores = torch.einsum("qhc,khc->hqk", q, k) / 4
        if mask == "padding_causal":
            scores = scores + torch.full_like(scores[0], float("-inf")).triu(1)
        expected[start : start + length] = torch.einsum("hqk,khc->qhc", scores.softmax(-1), v)
    # Values are rounded once, to bf16, and so are the output and its gradient that backward takes.
    assert ref.distance(result, expected) <= 2**-8
    weights = torch.randn(20, 4, 16).bfloat16()
    (result * weights).sum().backward()
    (expected * weights).sum().backward()
    for actual, other in zip(inputs, exact, strict=True):
        assert ref.distance(actual.grad, other.grad) <= 2 * 2**-8
        assert not actual.grad[5:8].any() and not result[9:12].any()
    other = attention(*inputs, cu_seqlens_q_padded=BOUNDS, cu_seqlens_kv_padded=BOUNDS, **options)
    assert ref.distance(other.view(20, 4, 16), expected) > 0.1


@pytest.mark.parametrize("interleaved", [False, True])
def test_packed_rotary_embedding_matches_separate_sequences(te, interleaved):
    """Positions restart at each sequence or follow ``start_positions``. Gradients equal those of separate sequences."""
    from transformer_engine.pytorch.attention.rope import RotaryPositionEmbedding, apply_rotary_pos_emb

    angles = RotaryPositionEmbedding(16, interleaved=interleaved)(32)
    tokens = torch.randn(13, 4, 16, requires_grad=True)
    copy = tokens.detach().clone().requires_grad_()
    starts = torch.tensor([3, 0, 9], dtype=torch.int32)

    def apply(tensor, format, **options):
        return apply_rotary_pos_emb(
            tensor, angles, tensor_format=format, interleaved=interleaved, fused=True, **options
        )

    result = apply(tokens, "thd", cu_seqlens=BOUNDS, start_positions=starts)
    expected = torch.cat(
        [
            apply(part[None], "bshd", start_positions=starts[i : i + 1])[0]
            for i, part in enumerate(copy.split(LENGTHS))
        ]
    )
    assert torch.equal(result, expected)
    assert not torch.equal(result, apply(tokens, "thd", cu_seqlens=BOUNDS))
    weights = torch.randn_like(result)
    (result * weights).sum().backward()
    (expected * weights).sum().backward()
    assert torch.equal(tokens.grad, copy.grad)


@pytest.mark.parametrize("quantized", [False, True])
def test_transformer_layer_on_packed_sequences_matches_separate_sequences(te, quantized):
    """Use a TransformerLayer of the public Llama recipe."""
    from transformer_engine.common.recipe import Float8CurrentScaling
    from transformer_engine.pytorch.attention.rope import RotaryPositionEmbedding

    options = {
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "fuse_qkv_params": True,
        "normalization": "RMSNorm",
        "activation": "swiglu",
        "num_gqa_groups": 2,
        "bias": False,
        "init_method": lambda weight: torch.nn.init.normal_(weight, std=0.2),
        "output_layer_init_method": lambda weight: torch.nn.init.normal_(weight, std=0.2),
        "params_dtype": torch.float32,
        "device": "cpu",
    }
    packed = te.TransformerLayer(
        64, 128, 4, attn_input_format="thd", self_attn_mask_type="padding_causal", **options
    )
    alone = te.TransformerLayer(64, 128, 4, attn_input_format="bshd", self_attn_mask_type="causal", **options)
    alone.load_state_dict(packed.state_dict())
    angles = RotaryPositionEmbedding(16)(64)
    lengths = [16, 48]
    bounds = torch.tensor([0, 16, 64], dtype=torch.int32)
    tokens = torch.randn(64, 64)
    with te.autocast(enabled=quantized, recipe=Float8CurrentScaling()):
        result = packed(
            tokens, rotary_pos_emb=angles, cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=48, max_seqlen_kv=48
        )  # fmt: skip
        expected = torch.cat(
            [alone(item[None].clone(), rotary_pos_emb=angles)[0] for item in tokens.split(lengths)]
        )
        whole = alone(tokens[None], rotary_pos_emb=angles)[0]
    # one scale for all packed tokens, one for each sequence: four chained products round their inputs on two grids
    bound = 2 * math.sqrt(2) * ref.stage(ref.E4M3_EPS, ref.E4M3_EPS) if quantized else 64 * ref.FP32_UNIT
    assert ref.distance(result - tokens, expected - tokens) <= bound
    assert ref.distance(whole - tokens, expected - tokens) > 0.25
    result.square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in packed.parameters())


@pytest.mark.parametrize("paged", [False, True])
def test_generation_with_a_kv_cache_matches_the_full_sequence(te, paged):
    """Generate token by token while sequences end and start. Outputs equal those of the full sequence."""
    from collections import OrderedDict

    from transformer_engine.pytorch import InferenceParams

    attention = te.DotProductAttention(2, 16, qkv_format="bshd", attention_dropout=0.0, layer_number=1).eval()
    alone = te.DotProductAttention(2, 16, qkv_format="bshd", attention_dropout=0.0, layer_number=1).eval()
    pages = {"is_paged": True, "total_num_pages": 12, "page_size": 4} if paged else {"is_paged": False}
    cache = InferenceParams(
        3, 16, num_heads_kv=2, head_dim_k=16, dtype=torch.bfloat16, max_ctx_len=4, qkv_format="bshd", **pages
    )
    cache.allocate_memory(1)
    data = {name: torch.randn(3, 16, 2, 16).bfloat16() for name in range(4)}
    lengths: dict[int, int] = {}
    schedule = [{0: 4, 1: 4, 2: 4}, {0: 1, 1: 1, 2: 1}, {0: 1, 2: 1}, {0: 1, 2: 1, 3: 4}]
    for step in schedule:
        cache.pre_step(OrderedDict(step))
        for name in set(lengths) - set(step):
            del lengths[name]
        width = max(step.values())
        rows = torch.zeros(3, len(step), width, 2, 16).bfloat16()
        for at, (name, new) in enumerate(step.items()):
            start = lengths.get(name, 0)
            rows[:, at, :new] = data[name][:, start : start + new]
            lengths[name] = start + new
        news = torch.tensor([0, *step.values()]).cumsum(0).int()
        with torch.no_grad():
            result = attention(
                *rows, inference_params=cache, attn_mask_type="padding_causal", cu_seqlens_q=news, max_seqlen_q=width
            )  # fmt: skip
            for at, (name, new) in enumerate(step.items()):
                whole = [item[None, : lengths[name]].clone() for item in data[name]]
                expected = alone(*whole, attn_mask_type="causal")[0, -new:]
                assert ref.distance(result.view(len(step), width, -1)[at, :new], expected) <= 2**-7, (
                    step,
                    name,
                )
