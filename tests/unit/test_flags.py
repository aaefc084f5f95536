"""Check that flags of public calls accept bools only: Python treats "false" as true."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import te_fsdp
from te_fsdp.compat import megatron_fsdp
from te_fsdp.compat.megatron_fsdp import experimental
from te_fsdp.errors import require_flags

MODEL: Any = nn.Linear(2, 2)
OPTIMIZER: Any = torch.optim.SGD(MODEL.parameters(), lr=0.1)
NOBODY: Any = None

# call -> (its flag, the call with a value of it); other arguments are checked later
CALLS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "fully_shard: average_gradients": ("average_gradients", lambda v: _sharded(average_gradients=v)),
    "fully_shard: check_inputs": ("check_inputs", lambda v: _sharded(check_inputs=v)),
    "set_device_mesh": ("check_inputs", lambda v: te_fsdp.set_device_mesh(MODEL, check_inputs=v)),
    "context_parallel_shard": (
        "check_inputs",
        lambda v: te_fsdp.context_parallel_shard(torch.ones(2), NOBODY, check_inputs=v),
    ),
    "clip_grad_norm_": (
        "error_if_nonfinite",
        lambda v: te_fsdp.clip_grad_norm_(MODEL, 1.0, error_if_nonfinite=v),
    ),
    "clip_grad_norm_: pp_mesh": ("pp_mesh", lambda v: te_fsdp.clip_grad_norm_(MODEL, 1.0, pp_mesh=v)),
    "zero_grad": ("set_to_none", lambda v: te_fsdp.zero_grad(MODEL, set_to_none=v)),
    "microbatch": ("is_last", lambda v: te_fsdp.microbatch(MODEL, is_last=v)),
    "set_auto_sync": ("enabled", lambda v: te_fsdp.set_auto_sync(MODEL, v)),
    "Muon": ("split_fused", lambda v: te_fsdp.Muon(MODEL, split_fused=v)),
    "save": ("asynchronous", lambda v: te_fsdp.checkpoint.save("/nowhere/1", MODEL, asynchronous=v)),
    "load: strict": ("strict", lambda v: te_fsdp.checkpoint.load("/nowhere/1", MODEL, strict=v)),
    "load: convert": ("convert", lambda v: te_fsdp.checkpoint.load("/nowhere/1", MODEL, convert=v)),
    "load: verify": ("verify", lambda v: te_fsdp.checkpoint.load("/nowhere/1", MODEL, verify=v)),
    "MixedPrecisionPolicy": (
        "cast_forward_inputs",
        lambda v: te_fsdp.MixedPrecisionPolicy(cast_forward_inputs=v),
    ),
    "fully_shard_model": (
        "calculate_per_token_loss",
        lambda v: megatron_fsdp.fully_shard_model(MODEL, calculate_per_token_loss=v),
    ),
    "DistributedDataParallelConfig": (
        "check_for_nan_in_grad",
        lambda v: megatron_fsdp.DistributedDataParallelConfig(check_for_nan_in_grad=v),
    ),
    "experimental.fully_shard": (
        "use_symm_mem",
        lambda v: experimental.fully_shard(MODEL, NOBODY, NOBODY, use_symm_mem=v),
    ),
}


def _sharded(**options: Any) -> Any:
    meshes: Any = object.__new__(te_fsdp.Meshes)  # its attributes are read only after the check
    return te_fsdp.fully_shard(MODEL, meshes, **options)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("value", ["false", "0", 2, None], ids=repr)
def test_flags_reject_values_that_are_not_bool(call, value):
    flag, make = CALLS[call]
    if call == "fully_shard: check_inputs" and value is None:
        pytest.skip("None is the default of a deprecated flag")
    with pytest.raises(te_fsdp.TeFsdpError) as raised:
        make(value)
    message = str(raised.value)
    assert (
        f"{call.split(':')[0]}: {flag}: expected True or False, got {value!r}" in message
        and "Fix: " in message
    )


@pytest.mark.parametrize(
    ("given", "near"),
    [
        ("none", "off"),
        ("FULL", "full"),
        ("first-steps", "first_steps"),
        (False, "off"),
        (3, None),
        ("x", None),
    ],
)
def test_unknown_level_of_checks_raises_with_a_suggestion(given, near):
    """The error lists the levels and suggests the most similar one."""
    with pytest.raises(te_fsdp.PlacementError) as raised:
        _sharded(checks=given)
    message = str(raised.value)
    expected = "fully_shard: checks: expected one of ('off', 'setup', 'first_steps', 'full'), got "
    assert message.startswith(f"{expected}{given!r}"), message
    assert f"Fix: checks={near or 'first_steps'!r}" in message
    with pytest.raises(te_fsdp.PlacementError, match="check_inputs and checks: expected only one of them"):
        _sharded(checks="off", check_inputs=False)


def test_flags_accept_bool_values():
    """Valid values and defaults are accepted."""
    require_flags("call", one=True, other=False, numpys=np.arange(2)[0] == 0)
    for value in (0, 1, 1.0, torch.tensor(True), np.float64(1)):
        with pytest.raises(te_fsdp.PlacementError, match="call: one: expected True or False"):
            require_flags("call", one=value)
    megatron_fsdp.DistributedDataParallelConfig()
    te_fsdp.MixedPrecisionPolicy()
