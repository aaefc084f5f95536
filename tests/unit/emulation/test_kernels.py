"""Test functions of the extension one by one: activations, softmax, rotary embedding, amax bookkeeping."""

import pytest
import torch

from tests.unit.emulation import reference as ref

ACTIVATIONS = [*ref.PLAIN, *ref.GATED, "glu", "clamped_swiglu"]
# fp32 evaluation of a smooth function against float64: a few ulps for the function and each product. The gelu
# constants of the kernels carry 8 digits, so 1e-7 of the value comes on top.
ULPS = 32 * ref.FP32_UNIT


@pytest.fixture
def tex(te):
    import transformer_engine_torch

    return transformer_engine_torch


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_and_their_backward_match_float64(tex, name):
    x = torch.randn(16, 64) * 4
    x64 = x.double().requires_grad_()
    expected = ref.activation(name, x64)
    grad = torch.randn(expected.shape)
    expected.backward(grad.double())
    backward = getattr(tex, "clamped_dswiglu" if name == "clamped_swiglu" else f"d{name}")
    assert ref.distance(getattr(tex, name)(x, None), expected) <= ULPS
    assert ref.distance(backward(grad, x, None), x64.grad) <= ULPS
    half = getattr(tex, name)(x.bfloat16(), None)
    assert half.dtype == torch.bfloat16
    assert torch.equal(
        half, getattr(tex, name)(x.bfloat16().float(), None).bfloat16()
    )  # fp32 inside, rounded once


def test_clamped_swiglu_respects_its_arguments(tex):
    x = torch.randn(16, 64) * 4
    x64, grad = x.double().requires_grad_(), torch.randn(16, 32)
    expected = ref.activation("clamped_swiglu", x64, limit=2.0, alpha=1.3, offset=0.5)
    expected.backward(grad.double())
    assert ref.distance(tex.clamped_swiglu(x, None, 2.0, 1.3, 0.5), expected) <= ULPS
    assert ref.distance(tex.clamped_dswiglu(grad, x, None, 2.0, 1.3, 0.5), x64.grad) <= ULPS


@pytest.mark.parametrize("name", ["gelu", "silu", "relu", "qgelu", "srelu"])
def test_activation_backward_with_bias_gradient_matches_separate_calls(tex, name):
    x, grad = torch.randn(16, 32), torch.randn(16, 32)
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Quantizer

    makers = [Float8Quantizer(torch.ones(1), torch.zeros(1), tex.DType.kFloat8E4M3) for _ in range(2)]
    dbias, dx = getattr(tex, f"dbias_d{name}")(grad, x, makers[0])
    exact = getattr(tex, f"d{name}")(grad, x, None)
    assert torch.equal(dx._data, makers[1](exact)._data)
    assert ref.distance(dbias, exact.double().sum(0)) <= 16 * ref.FP32_UNIT
    with pytest.raises(RuntimeError, match="without a quantizer"):
        getattr(tex, f"dbias_d{name}")(grad, x, None)


def test_relu_of_nan_is_zero_as_on_the_gpu(tex):
    assert tex.relu(torch.tensor([[float("nan"), -1.0, 2.0]]), None).tolist() == [[0.0, 0.0, 2.0]]


SOFTMAXES = ["scaled_softmax", "scaled_masked_softmax", "scaled_aligned_causal_masked_softmax"]


@pytest.mark.parametrize("name", [*SOFTMAXES, "scaled_upper_triang_masked_softmax"])
def test_softmax_forward_and_backward_match_float64(tex, name):
    queries, keys = (12, 12) if "upper" in name else (8, 12)
    x = torch.randn(6, queries, keys) if "upper" in name else torch.randn(2, 3, queries, keys)
    x64, extra, hidden = x.double().requires_grad_(), (), torch.zeros(queries, keys, dtype=torch.bool)
    if name == "scaled_masked_softmax":
        hidden = torch.rand(2, 1, queries, keys) < 0.4
        hidden[0, 0, 3] = True  # a row without any key
        extra = (hidden,)
    elif name != "scaled_softmax":
        hidden = ref.causal(queries, keys)
    expected = torch.softmax((0.3 * x64).masked_fill(hidden, float("-inf")), -1).nan_to_num(0.0)
    grad = torch.randn_like(x)
    expected.backward(grad.double())
    result = getattr(tex, f"{name}_forward")(x, *extra, 0.3)
    assert ref.distance(result, expected) <= ULPS
    assert not result.masked_select(hidden.expand_as(result)).any()
    got = getattr(tex, f"{name}_backward")(grad, result, 0.3)
    assert ref.distance(got, x64.grad.nan_to_num(0.0)) <= ULPS


def test_aligned_causal_softmax_of_rows_without_keys_is_zero(tex):
    result = tex.scaled_aligned_causal_masked_softmax_forward(torch.randn(1, 1, 6, 4), 1.0)
    assert not result[0, 0, :2].any() and torch.allclose(result[0, 0, 2:].sum(-1), torch.ones(4))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
def test_fused_rotary_embedding_matches_te_unfused(te, layout, interleaved):
    from transformer_engine.pytorch.attention.rope import apply_rotary_pos_emb

    x = torch.randn(10, 2, 3, 16) if layout == "sbhd" else torch.randn(2, 10, 3, 16)
    freqs = te.RotaryPositionEmbedding(8, interleaved=interleaved)(10)  # only half of the channels turn
    starts = torch.tensor([0, 0], dtype=torch.int32)
    results = []
    for fused in (False, True):
        leaf = x.clone().requires_grad_()
        options = {"start_positions": starts} if fused else {}
        y = apply_rotary_pos_emb(leaf, freqs, layout, fused=fused, interleaved=interleaved, **options)
        y.backward(torch.arange(y.numel()).reshape(y.shape) / y.numel())
        results.append((y, leaf.grad))
    for plain, fused in zip(*results, strict=True):
        assert ref.distance(fused, plain) <= ULPS


def test_rotary_embedding_respects_start_positions(te, tex):
    x, freqs = torch.randn(4, 2, 1, 8), te.RotaryPositionEmbedding(8)(10)
    got = tex.fused_rope_forward(x, freqs, torch.tensor([0, 5]), 0, False, None, 1, 0)
    late = tex.fused_rope_forward(
        torch.cat([torch.zeros(5, 1, 1, 8), x[:, 1:]]), freqs, None, 0, False, None, 1, 0
    )
    assert torch.equal(got[:, 1:], late[5:])
    with pytest.raises(RuntimeError, match="has 10 positions, but position 11 is used"):
        tex.fused_rope_forward(x, freqs, torch.tensor([0, 8]), 0, False, None, 1, 0)
    with pytest.raises(NotImplementedError, match="of format 5"):
        tex.fused_rope_forward(x, freqs, None, 5, False, None, 1, 0)


def test_row_padding_and_unpadding_are_inverse(tex):
    x, padded, back = torch.randn(5, 3), torch.full((8, 3), 7.0), torch.empty(5, 3)
    tex.fused_multi_row_padding(x, padded, [2, 3], [4, 4])
    assert torch.equal(padded, torch.cat([x[:2], torch.zeros(2, 3), x[2:], torch.zeros(1, 3)]))
    tex.fused_multi_row_unpadding(padded, back, [4, 4], [2, 3])
    assert torch.equal(back, x)
    with pytest.raises(RuntimeError, match="row counts"):
        tex.fused_multi_row_padding(x, padded, [2, 2], [4, 4])


@pytest.mark.parametrize("algo", ["max", "most_recent"])
def test_fused_amax_and_scale_update_matches_te_python(te, tex, algo):
    from transformer_engine.common.recipe import DelayedScaling
    from transformer_engine.pytorch.quantization import _amax_and_scale_update

    history = torch.rand(4, 3)
    history[0] = torch.tensor([0.5, 0.0, float("inf")])
    history[1:, 1] = 0.0
    scale = torch.tensor([1.0, 2.0, 4.0])
    recipe = DelayedScaling(amax_compute_algo=algo, amax_history_len=4, margin=1)
    expected_history, expected_scale = history.clone(), scale.clone()
    _amax_and_scale_update(expected_history, expected_scale, 448.0, recipe)
    reduced = history[0].clone()
    tex.fused_amax_and_scale_update_after_reduction(
        reduced, [history], [scale], algo, te.DType.kFloat8E4M3, 1
    )
    assert torch.equal(scale, expected_scale)
    assert torch.equal(history, expected_history)
    assert not history[0].any()


def test_amax_and_scale_update_handles_subnormals_and_rejects_unknown_algorithms(te, tex):
    history, scale = torch.zeros(2, 2), torch.tensor([3.0, 3.0])
    tex.fused_amax_and_scale_update_after_reduction(
        torch.tensor([1e-44, 2.0]), [history], [scale], "most_recent", te.DType.kFloat8E5M2, 0
    )
    assert scale.tolist() == [torch.finfo(torch.float32).max, 57344.0 / 2]
    with pytest.raises(RuntimeError, match="unknown amax_compute_algo"):
        tex.fused_amax_and_scale_update_after_reduction(
            history[0], [history], [scale], "mean", te.DType.kFloat8E5M2, 0
        )


def test_missing_functions_raise_with_their_name(te, tex):
    assert callable(tex.fa_prepare_fwd)
    with pytest.raises(NotImplementedError, match="transformer_engine_torch.fa_prepare_fwd is not emulated"):
        tex.fa_prepare_fwd(1, 2)
    for name in ("flash_attention", "get_attention_backend", "__wrapped__", "_private"):
        assert not hasattr(tex, name)
    with pytest.raises(NotImplementedError, match="CommOverlapP2P is not emulated"):
        tex.CommOverlapP2P()
    from transformer_engine.pytorch.triton import mhc

    with pytest.raises(NotImplementedError, match="Triton kernel"):
        mhc(1)
    with pytest.raises(NotImplementedError, match="comm_overlap"):
        tex.generic_gemm(*[torch.ones(2, 2)] * 16, comm_overlap=object())


def test_enums_are_pickled_under_the_extension_module(tex):
    import pickle

    stream = pickle.dumps(tex.DType.kFloat8E4M3)
    assert b"transformer_engine_torch" in stream and b"te_fsdp" not in stream
    assert pickle.loads(stream) is tex.DType.kFloat8E4M3


def test_gemm_into_bf16_rounds_the_product_before_it_accumulates(te):
    from transformer_engine.pytorch.cpp_extensions import general_gemm

    x, dy, main = (torch.randn(shape).bfloat16() for shape in ((64, 16), (64, 32), (32, 16)))
    product, before = dy.float().t() @ x.float(), main.clone()
    general_gemm(x, dy, torch.bfloat16, layout="NT", grad=True, out=main, accumulate=True)
    assert torch.equal(main, (product.bfloat16().float() + before.float()).bfloat16())
    assert not torch.equal(main, (product + before.float()).bfloat16())
    with pytest.raises(RuntimeError, match=r"GEMM of torch.float32 into torch.bfloat16"):
        general_gemm(x.float(), dy.float(), torch.bfloat16, layout="NT")


def test_gemm_with_bias_and_gelu_matches_float64(te):
    from transformer_engine.pytorch.cpp_extensions import general_gemm

    weight, x, bias = torch.randn(32, 16), torch.randn(8, 16), torch.randn(32)
    expected = x.double() @ weight.double().t() + bias.double()
    y, _, pre, _ = general_gemm(weight, x, torch.float32, layout="TN", bias=bias, gelu=True)
    assert ref.distance(pre, expected) <= ref.fp32_bound(16, 1)
    assert ref.distance(y, ref.PLAIN["gelu"](expected)) <= ref.fp32_bound(16, 1) + ULPS
    # backward: D = (dy @ W) * gelu'(pre), and the bias gradient is the sum of D's rows
    dy, before = torch.randn(8, 32), torch.randn(8, 16).double().requires_grad_()
    ref.PLAIN["gelu"](before).backward(dy.double() @ weight.double())
    dx, dbias, _, _ = general_gemm(
        weight,
        dy,
        torch.float32,
        layout="NN",
        grad=True,
        gelu=True,
        gelu_in=before.detach().float(),
        bias=bias[:16],
    )
    assert ref.distance(dx, before.grad) <= ref.fp32_bound(32, 1) + ULPS
    assert ref.distance(dbias, before.grad.sum(0)) <= ref.fp32_bound(32, 2) + ULPS
    # weight gradient: accumulated, with the bias gradient as the sum of dy's rows
    main = torch.ones(32, 16)
    _, dbias, _, _ = general_gemm(
        x, dy, torch.float32, layout="NT", grad=True, out=main, accumulate=True, bias=bias
    )
    assert ref.distance(main, 1 + dy.double().t() @ x.double()) <= ref.fp32_bound(9, 1)
    assert ref.distance(dbias, dy.double().sum(0)) <= ref.fp32_bound(8, 1)
