"""Test the precision policy in one process: valid fields, effects on units, errors."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

import te_fsdp
from te_fsdp import MixedPrecisionPolicy, precision
from te_fsdp.errors import OrderError, PrecisionError
from te_fsdp.layout import STORAGE
from te_fsdp.plan import plan_storage

FP32, BF16, FP16, FP64 = torch.float32, torch.bfloat16, torch.float16, torch.float64


def plan_precision(model, units, policy):
    """Return the plan of a model with sharded units."""
    rows = plan_storage(model, dict.fromkeys(units, STORAGE["optim_grads_params", "no_shard"]))
    return precision.plan_precision(model, rows, units, policy)


class Model(nn.Module):
    """Two units and a head of the root."""

    def __init__(self, first=BF16, second=BF16, head=BF16) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2, dtype=first)
        self.second = nn.Linear(2, 2, dtype=second)
        self.head = nn.Linear(2, 2, dtype=head)


UNITS = ["", "first", "second"]


def test_policy_is_frozen_comparable_and_hashable():
    policy = MixedPrecisionPolicy()
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.main_params_dtype = None  # type: ignore[misc]
    assert policy == MixedPrecisionPolicy(main_params_dtype=FP32, main_grads_dtype=FP32) and hash(policy)


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("main_params_dtype", FP64, "torch.float64"),
        ("main_grads_dtype", torch.int32, "torch.int32"),
        ("grad_comm_dtype", "bf16", "'bf16'"),
        (
            "grad_reduce_dtype",
            BF16,
            "grad_reduce_dtype: expected None, torch.float32 or the communication dtype",
        ),
        ("param_dtype", torch.float8_e4m3fn, "torch.float8_e4m3fn"),
        ("output_dtype", 16, "got 16"),
        ("cast_forward_inputs", None, "expected True or False, got None"),
    ],
)
def test_policy_error_names_the_wrong_field(field, value, expected):
    with pytest.raises(PrecisionError) as error:
        MixedPrecisionPolicy(**{field: value})
    message = str(error.value)
    assert f"MixedPrecisionPolicy: {field}" in message and expected in message and "Fix:" in message


@pytest.mark.parametrize(
    ("policy", "model", "units"),
    [
        # FSDP2's policy of each unit: param_dtype, reduce_dtype, cast_forward_inputs
        ({}, {}, {"first": (BF16, FP32, False), "": (BF16, FP32, False)}),
        ({"main_grads_dtype": None}, {}, {"first": (BF16, BF16, False)}),
        ({"param_dtype": BF16}, {"first": FP32}, {"first": (BF16, FP32, True)}),
        ({"param_dtype": BF16, "cast_forward_inputs": False}, {}, {"first": (BF16, FP32, False)}),
        (
            {"main_grads_dtype": None},
            {"second": FP32},
            {"first": (BF16, BF16, False), "second": (FP32, FP32, False)},
        ),
        ({"main_params_dtype": None}, {"second": FP64}, {"second": (FP64, FP32, False)}),
    ],
)
def test_fsdp2_policies_of_units_match(policy, model, units):
    plan = plan_precision(Model(**model), UNITS, MixedPrecisionPolicy(**policy))
    for name, expected in units.items():
        told = plan.fsdp2_policy(name)
        assert (told.param_dtype, told.reduce_dtype, told.cast_forward_inputs) == expected, name


def test_widened_main_weights_keep_values_ties_and_attributes():
    model = Model(head=FP32)
    model.second.weight = model.first.weight
    model.first.weight.mine = "kept"
    model.first.bias.requires_grad_(False)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    plan_precision(model, [""], MixedPrecisionPolicy(param_dtype=BF16)).widen(model)
    assert model.second.weight is model.first.weight and model.first.weight.mine == "kept"
    for name, parameter in model.named_parameters():
        assert parameter.dtype == (BF16 if name == "first.bias" else FP32), name  # frozen: nothing updates it
        assert torch.equal(parameter.detach(), before[name].float()), name


@pytest.mark.parametrize("main", [None, FP32])
def test_existing_main_weights_are_not_replaced(main):
    model = Model(first=FP32, second=FP32, head=FP32)
    kept = list(model.parameters())
    plan_precision(model, UNITS, MixedPrecisionPolicy(main_params_dtype=main)).widen(model)
    assert all(a is b for a, b in zip(kept, model.parameters(), strict=True))


@pytest.mark.parametrize(
    ("policy", "model", "words"),
    [
        ({}, {"second": FP64}, ["second.weight: main_params_dtype=torch.float32", "torch.float64"]),
        ({"main_params_dtype": BF16}, {"first": FP16}, ["first.weight", "torch.float16", "less precise"]),
        ({"main_params_dtype": FP16}, {"second": FP32, "head": FP16}, ["second.weight", "of torch.float32"]),
    ],
)
def test_less_precise_main_weights_are_rejected(policy, model, words):
    with pytest.raises(PrecisionError) as error:
        plan_precision(Model(**model), UNITS, MixedPrecisionPolicy(**policy))
    assert all(word in str(error.value) for word in words), error.value


def test_several_dtypes_in_a_unit_are_rejected():
    model = Model(head=FP32)
    model.norm = nn.LayerNorm(2, dtype=BF16)
    with pytest.raises(PrecisionError, match=r"model: parameters of several dtypes.*head\.bias.*norm\.bias"):
        plan_precision(model, UNITS, MixedPrecisionPolicy())
    plan = plan_precision(model, UNITS, MixedPrecisionPolicy(param_dtype=BF16))
    assert plan.fsdp2_policy("").param_dtype == BF16
    te_fsdp.fsdp_no_shard(model.norm)
    assert plan_precision(model, UNITS, MixedPrecisionPolicy()).fsdp2_policy("").param_dtype == FP32


@pytest.mark.parametrize("main", [None, BF16])
def test_quantized_weights_require_fp32_main_weights(te, main):
    from transformer_engine.common.recipe import Float8CurrentScaling

    with te.quantized_model_init(recipe=Float8CurrentScaling()):
        model = te.Linear(32, 32, params_dtype=BF16, device="meta")
    policy = MixedPrecisionPolicy(main_params_dtype=main)
    with pytest.raises(
        PrecisionError, match=f"weight: main_params_dtype={main} for a quantized weight.*main_weights"
    ):
        plan_precision(model, [""], policy)
    model.weight.requires_grad_(False)
    plan_precision(model, [""], policy)
    plan_precision(model, [""], MixedPrecisionPolicy())


def test_grad_comm_requires_a_precision_policy():
    with pytest.raises(OrderError, match="with a precision policy"), te_fsdp.grad_comm(Model(), BF16):
        pass
