"""Sizes that tensor parallelism divides, checked before TE builds anything."""

from __future__ import annotations

import inspect
from typing import Any

from te_fsdp.errors import PlacementError, message

__all__ = ["check_divisible", "check_heads"]

_HEADS = ("num_attention_heads", "num_gqa_groups")
#: Arguments of TE's constructors that are divided by ``tp_size``. Those of linears depend on ``parallel_mode``.
_DIVIDED = {
    "TransformerLayer": (*_HEADS, "ffn_hidden_size"),
    "MultiheadAttention": _HEADS,
    "DotProductAttention": _HEADS,
    "LayerNormMLP": ("ffn_hidden_size",),
}
_BY_MODE = {"column": ("out_features",), "row": ("in_features",)}


def check_divisible(kind: str, stock: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise if ``tp_size`` does not divide what a module of TE would cut by it. Local operation.

    Args:
        kind: Name of the class.
        stock: TE's class.
        args: Positional arguments of its constructor.
        kwargs: Keywords of it; ``tp_group`` decides over ``tp_size``, as in TE.

    Raises:
        PlacementError: Names the argument.
    """
    try:
        given = inspect.signature(stock.__init__).bind_partial(None, *args, **kwargs).arguments
    except TypeError:
        return  # TE says which argument is wrong
    given = {**given, **given.get("kwargs", {})}
    group = given.get("tp_group")
    tp_size = group.size() if group is not None else given.get("tp_size", 1)
    names = _DIVIDED.get(kind, ())
    if kind in ("Linear", "LayerNormLinear", "GroupedLinear"):
        names = _BY_MODE.get(str(given.get("parallel_mode")), ())
    for name in names:
        size = given.get(name)
        if isinstance(size, int) and isinstance(tp_size, int) and tp_size > 1 and size % tp_size:
            raise PlacementError(_indivisible(kind, name, size, tp_size))


def check_heads(module: Any, label: str) -> None:
    """The same of a ``DotProductAttention`` that is there: TE's rounds the number of local heads down in silence.

    Raises:
        PlacementError: Names the module.
    """
    for name in _HEADS:
        size = getattr(module, name)
        if size % module.tp_size:
            raise PlacementError(_indivisible(label, name, size, module.tp_size))


def _indivisible(label: str, name: str, size: int, tp_size: int) -> str:
    fitting = [n for n in range(tp_size - 1, 0, -1) if size % n == 0]
    return message(
        f"{label}: {name}={size} over tp_size={tp_size}",
        expected=f"a multiple of {tp_size}",
        got=size,
        why="Each tensor-parallel rank has as many of them",
        fix=f"tp={fitting[0]}, or {name}={-(-size // tp_size) * tp_size}",
    )
