"""Test FusedAdam, FusedSGD, their multi-tensor kernels."""

import pytest
import torch

from tests.unit.emulation import reference as ref

STEPS = 5
# Each step rounds a handful of fp32 operations on each of parameter and moments; the update enters with
# factor lr.
ADAM_BOUND = 16 * STEPS * ref.FP32_UNIT


@pytest.fixture
def tex(te):
    import transformer_engine_torch

    return transformer_engine_torch


def parameters(dtype=torch.float32):
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(7, 5).to(dtype)), torch.nn.Parameter(torch.randn(33).to(dtype))]


def train(optimizer, params, dtype=None):
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        for param in params:
            grad = torch.randn(param.shape, generator=generator)
            param.grad = grad.to(dtype or param.dtype)
        optimizer.step()


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("capturable", [True, False])
def test_fused_adam_fp32_matches_torch_adam(te, decoupled, capturable):
    ours, theirs = parameters(), parameters()
    options = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    train(te.optimizers.FusedAdam(ours, adam_w_mode=decoupled, capturable=capturable, **options), ours)
    train((torch.optim.AdamW if decoupled else torch.optim.Adam)(theirs, **options), theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert ref.distance(a, b.detach()) <= ADAM_BOUND


def test_control_adam_comparison_detects_coupled_weight_decay(te):
    actual, expected = parameters(), parameters()
    train(te.optimizers.FusedAdam(actual, lr=1e-2, weight_decay=0.1, adam_w_mode=False), actual)
    train(torch.optim.AdamW(expected, lr=1e-2, weight_decay=0.1), expected)
    assert ref.distance(actual[0], expected[0].detach()) > 100 * ADAM_BOUND


def test_master_weights_match_fp32_adam_and_parameters_are_rounded_copies(te):
    ours, theirs = (
        parameters(torch.bfloat16),
        [torch.nn.Parameter(p.detach().float()) for p in parameters(torch.bfloat16)],
    )
    optimizer = te.optimizers.FusedAdam(ours, lr=1e-2, master_weights=True)
    train(optimizer, ours)
    reference = te.optimizers.FusedAdam(theirs, lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        for param in theirs:
            param.grad = torch.randn(param.shape, generator=generator).bfloat16().float()
        reference.step()
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(optimizer.state[a]["master_param"], b.detach())
        assert torch.equal(a, b.bfloat16())


def test_parameter_remainders_reconstruct_fp32_master_weights(te):
    ours, theirs = parameters(torch.bfloat16), parameters(torch.bfloat16)
    optimizer = te.optimizers.FusedAdam(ours, lr=1e-2, master_weights=True, store_param_remainders=True)
    plain = te.optimizers.FusedAdam(theirs, lr=1e-2, master_weights=True)
    train(optimizer, ours)
    train(plain, theirs)
    for a, b in zip(ours, theirs, strict=True):
        low = optimizer.state[a]["master_param"].to(torch.int32)
        high = a.detach().view(torch.int16).to(torch.int32) - (low < 0).to(torch.int32)
        master = ((high << 16) | (low & 0xFFFF)).view(torch.float32)
        assert torch.equal(master, plain.state[b]["master_param"])


def test_fused_adam_updates_delayed_scaling_weights(te):
    from transformer_engine.common.recipe import DelayedScaling

    with te.quantized_model_init(enabled=True, recipe=DelayedScaling()):
        module = te.Linear(64, 32, bias=False, params_dtype=torch.bfloat16, device="cpu")
    weight = module.weight
    optimizer = te.optimizers.FusedAdam([weight], lr=1e-2, master_weights=True)
    before = weight.dequantize().float()
    weight.grad = torch.randn(32, 64, dtype=torch.bfloat16)
    grad = weight.grad.float()
    optimizer.step()
    expected = torch.nn.Parameter(before.clone())
    expected.grad = grad
    te.optimizers.FusedAdam([expected], lr=1e-2).step()
    master = optimizer.state[weight]["master_param"]
    assert torch.equal(master, expected.detach())
    scale = weight._quantizer.scale
    data = (master * scale).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(weight._data, data)
    assert weight._quantizer.amax.item() == master.abs().max().item()
    assert weight._scale_inv.item() == scale.reciprocal().item()


@pytest.mark.parametrize("name", ["Float8CurrentScaling", "Float8BlockScaling", "MXFP8BlockScaling"])
def test_quantized_weights_are_requantized_from_master_weights(te, arch, name):
    from transformer_engine.common import recipe as recipes

    if name == "MXFP8BlockScaling" and arch == "9.0":
        pytest.skip("MXFP8 needs architecture 10.0")
    with te.quantized_model_init(enabled=True, recipe=getattr(recipes, name)()):
        module = te.Linear(128, 128, bias=False, params_dtype=torch.bfloat16, device="cpu")
    optimizer = te.optimizers.FusedAdam(module.parameters(), lr=1e-2, master_weights=True)
    module.weight.grad = torch.randn(128, 128, dtype=torch.bfloat16)
    before = module.weight.dequantize(dtype=torch.float32)
    optimizer.step()
    master = optimizer.state[module.weight]["master_param"]
    again = module.weight._quantizer(master).dequantize(dtype=torch.float32)
    assert torch.equal(module.weight.dequantize(dtype=torch.float32), again)
    assert not torch.equal(again, before)


def test_fused_sgd_matches_torch_sgd(te):
    ours, theirs = parameters(), parameters()
    options = {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True}
    train(te.optimizers.FusedSGD(ours, **options), ours)
    train(torch.optim.SGD(theirs, **options), theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert ref.distance(a, b.detach()) <= ADAM_BOUND


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan"), None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_multi_tensor_scale_flags_overflow(tex, bad, dtype):
    source, target, flag = torch.randn(100).to(dtype), torch.empty(100), torch.zeros(1, dtype=torch.int)
    if bad is not None:
        source[99] = bad
    tex.multi_tensor_scale(2048, flag, [[source], [target]], 4.0)
    assert flag.item() == (0 if bad is None else 1)
    assert torch.equal(target.nan_to_num(0, 1, 2), (source.float() * 4.0).nan_to_num(0, 1, 2))
    flag.zero_()
    tex.multi_tensor_scale_tensor(2048, flag, [[source], [target]], torch.tensor([4.0]))
    assert flag.item() == (0 if bad is None else 1)


def test_multi_tensor_l2norm_matches_float64(tex):
    tensors, flag = [torch.randn(100), torch.randn(7, 3).bfloat16()], torch.zeros(1, dtype=torch.int)
    expected = torch.stack([t.double().norm() for t in tensors])
    total, each = tex.multi_tensor_l2norm(2048, flag, [tensors], True)
    assert ref.distance(total, expected.norm().reshape(1)) <= 100 * ref.FP32_UNIT
    assert ref.distance(each, expected) <= 100 * ref.FP32_UNIT
    halved, none = tex.multi_tensor_unscale_l2norm(2048, flag, [tensors], torch.tensor([0.5]), False)
    assert ref.distance(halved, 0.5 * expected.norm().reshape(1)) <= 100 * ref.FP32_UNIT
    assert none.numel() == 0 and flag.item() == 0
    tex.multi_tensor_l2norm(2048, flag, [[torch.tensor([float("inf")])]], False)
    assert flag.item() == 1


def test_multi_tensor_scales_are_computed_from_amaxes(tex):
    amaxes = [torch.tensor([2.0]), torch.tensor([0.0]), torch.tensor([float("inf")]), torch.tensor([3.0])]
    scales, inverses = [torch.empty(1) for _ in amaxes], [torch.empty(1) for _ in amaxes]
    tex.multi_tensor_compute_scale_and_scale_inv(
        2048, torch.zeros(1, dtype=torch.int), [amaxes, scales, inverses], 448.0, True, 0.0
    )
    assert [s.item() for s in scales] == [128.0, 1.0, 1.0, 128.0]
    assert [s.item() for s in inverses] == [1 / 128, 1.0, 1.0, 1 / 128]


def test_capturable_adam_skips_updates_on_overflow(tex):
    lists = [[torch.ones(3)] for _ in range(4)]
    args = (1e-3, 0.9, 0.999, 1e-8, torch.tensor([1]), 1, 1, 0.0, torch.tensor([0.5]))
    tex.multi_tensor_adam_capturable(2048, torch.ones(1, dtype=torch.int), lists, *args)
    assert all(item[0].tolist() == [1.0] * 3 for item in lists)
    tex.multi_tensor_adam_capturable(2048, torch.zeros(1, dtype=torch.int), lists, *args)
    assert lists[0][0].tolist() == [0.5] * 3  # the gradient is unscaled in place
    assert lists[1][0][0] < 1.0
