"""Optimizer states of TE's ``FusedAdam`` in the class of their parameters."""

# [Note: states of FusedAdam] ``torch.optim`` creates states with ``zeros_like``, which keeps the class
# (:mod:`te_fsdp.boxed_dtensor`). ``FusedAdam`` wraps local tensors with ``DTensor.from_local``, for its
# states and again for its state dicts.

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch

from te_fsdp.boxed_dtensor import boxed_like
from te_fsdp.modules.state_loading import with_own_states
from te_fsdp.records import checks_of, get_record
from te_fsdp.upstream import te as _te, torch_dtensor as _torch
from te_fsdp.upstream.patches import Replacements, wrapping


def _initializing(stock: Callable[..., None]) -> Callable[..., None]:
    @_torch.runs_eagerly
    @functools.wraps(stock)
    def initialize(self: Any, param: torch.Tensor, state_name: str, *args: Any, **kwargs: Any) -> None:
        # A state that FusedAdam does not have was loaded from an optimizer of a different class.
        if state_name not in self.name_to_dtype_map and get_record(param) is not None:
            for check in checks_of(param).states:
                check(self, param, state_name)
        stock(self, param, state_name, *args, **kwargs)
        boxed_like(self.state[param][state_name], param)

    return initialize


@wrapping
def state_dict(self: Any, *args: Any, stock: Callable[..., dict[str, Any]], **kwargs: Any) -> dict[str, Any]:
    """Return FusedAdam's state dict with tensors in the class of their parameters. Local operation."""
    result = stock(self, *args, **kwargs)
    # The keys of a state dict number the parameters in the order of the groups.
    keys = chain.from_iterable(group["params"] for group in result["param_groups"])
    parameters = chain.from_iterable(group["params"] for group in self.param_groups)
    for key, parameter in zip(keys, parameters, strict=False):
        entries, local = result["state"].get(key, {}), _torch.local_of(parameter)
        # Steps do not update the main weights of FP32 weights. Low-precision models load them as their own.
        is_fp32 = parameter.dtype == torch.float32 and not _te.is_quantized(local)
        if "master_param" in entries and is_fp32 and get_record(parameter) is not None:
            entries["master_param"] = parameter.detach().clone()
        for value in entries.values():
            boxed_like(value, parameter)
    return result


@wrapping
def load_state_dict(self: Any, state_dict: dict[str, Any], *, stock: Callable[..., None]) -> None:
    """Load a copy of a state dict, because FusedAdam changes its argument. Collective as torch's method is."""
    stock(self, with_own_states(state_dict))


#: The methods of ``FusedAdam`` that create or load state tensors
PATCHES: Replacements = (
    (None, "states", _initializing),
    (None, "states of dicts", state_dict),
    (None, "loads of dicts", load_state_dict),
)
