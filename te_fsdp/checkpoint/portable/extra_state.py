"""TransformerEngine's ``_extra_state`` entries: delayed scaling's state, a pickle in a tensor, read without TE.

The pickle is read with an unpickler that knows seven names and runs no code of the file: TE's recipe and format
become plain values, the tensors inside are loaded weights-only. Anything else in it is refused.
"""

from __future__ import annotations

import collections
import io
import pickle
import warnings
from typing import Any

import torch

from te_fsdp.errors import CheckpointError, message

__all__ = ["read_extra_state"]

#: Largest forward and backward values of TE's formats (``transformer_engine.common.recipe.Format``).
_FORMATS = {(448.0, 448.0): "E4M3", (57344.0, 57344.0): "E5M2", (448.0, 57344.0): "HYBRID"}
_TENSORS = {
    "scaling_fwd.scale": "scale_fwd",
    "scaling_fwd.amax_history": "amax_history_fwd",
    "scaling_bwd.scale": "scale_bwd",
    "scaling_bwd.amax_history": "amax_history_bwd",
}


class _Recipe:
    """Stands for TE's recipe; its attributes are the pickled ones."""

    fields: dict[str, Any]

    def __new__(cls, *args: Any) -> _Recipe:
        made = super().__new__(cls)
        made.fields = {}
        return made

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.fields.update(state)


class _Largest(tuple):
    """Stands for the format's pair of largest values, a named tuple."""

    def __new__(cls, *values: float) -> _Largest:
        return super().__new__(cls, values)


def _load_from_bytes(data: bytes) -> Any:
    """Stands for torch's own, which would load any pickle."""
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def _rebuild(
    storage: Any, offset: int, size: tuple[int, ...], stride: tuple[int, ...], *rest: Any
) -> torch.Tensor:
    """Stands for torch's function of the same use."""
    with warnings.catch_warnings():
        # The pickle holds storages with a dtype, which torch has deprecated; it reads them still.
        warnings.filterwarnings("ignore", message="TypedStorage is deprecated")
        whole = torch.empty(0, dtype=storage.dtype, device="cpu").set_(storage.untyped())  # type: ignore[no-matching-overload]
    return whole.as_strided(size, stride, offset).clone()


_KNOWN = {
    "transformer_engine.common.recipe.DelayedScaling": _Recipe,
    "transformer_engine.common.recipe.Format": lambda largest: largest,
    "transformer_engine.common.recipe._FormatHelper": _Largest,
    "torch._utils._rebuild_tensor_v2": _rebuild,
    "torch.storage._load_from_bytes": _load_from_bytes,
    "collections.OrderedDict": collections.OrderedDict,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full not in _KNOWN:
            raise pickle.UnpicklingError(f"the name {full}")
        return _KNOWN[full]


def read_extra_state(data: bytes, key: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]] | None:
    """What an ``_extra_state`` entry holds.

    Args:
        data: The tensor's bytes.
        key: Its name in the state dict, for messages.

    Returns:
        The recipe, as :func:`te_fsdp._te.describe_delayed_recipe` describes it, and the tensors by our names;
        ``None`` where there is no state: no bytes, or a recipe without history.

    Raises:
        CheckpointError: Something else than TE 2's delayed-scaling state, or a damaged pickle.
    """
    if not data:
        return None
    try:
        state = _Unpickler(io.BytesIO(data)).load()
        if not isinstance(state, dict) or not isinstance(state.get("recipe"), _Recipe):
            raise pickle.UnpicklingError("no recipe of delayed scaling")
        if "scale_fwd" not in state:
            return None
        return _describe(state), {ours: state[theirs] for ours, theirs in _TENSORS.items()}
    except Exception as error:
        raise CheckpointError(
            message(
                f"{key}: not a state that te_fsdp can read",
                expected="the delayed-scaling state of TransformerEngine 2, or an empty entry",
                got=f"{type(error).__name__}: {error}",
                why="It is a pickle, and nothing in it is run",
                fix="leave these entries out (te-fsdp ckpt convert --extra-state drop); histories then start anew",
            )
        ) from error


def _describe(state: dict[str, Any]) -> dict[str, Any]:
    fields = state["recipe"].fields
    # A dataclass pickles the attributes that differ from the class's own; the rest are TE's defaults.
    algorithm = fields.get("amax_compute_algo", "max")
    return {
        "num_gemms": state["extra_fp8_variables"]["num_gemms"],
        "margin": fields.get("margin", 0),
        "fp8_format": _FORMATS[tuple(fields.get("fp8_format", (448.0, 57344.0)))],
        "amax_history_len": int(state["amax_history_fwd"].shape[0]),
        "amax_compute_algo": algorithm if isinstance(algorithm, str) else "max",
        "reduce_amax": fields.get("reduce_amax", True),
    }
