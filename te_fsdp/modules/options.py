"""Checks that the options of a TE module fit its meshes."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from te_fsdp.errors import MeshError, PlacementError
from te_fsdp.upstream import te as _te

#: Kinds whose constructors divide sizes by ``tp_size``.
_LINEARS = ("Linear", "LayerNormLinear", "GroupedLinear")
PARALLEL = (*_LINEARS, "LayerNormMLP", "DotProductAttention", "MultiheadAttention")
HEADS = ("num_attention_heads", "num_gqa_groups")


def check_tp_size(module: Any, kind: str, label: str, tp_size: int) -> None:
    """Check that the module was built for this tp size; raise MeshError otherwise."""
    # Unsharded linears may be replicated.
    built_for = int(module.tp_size)
    unsplit = kind in _LINEARS and module.parallel_mode is None
    if built_for == tp_size or (unsplit and built_for == 1):
        return
    got = f"tp_mesh=None or of size 1, but tp_size={built_for}"
    fix = "pass the tensor-parallel mesh as tp_mesh"
    if tp_size > 1:
        got = f"tp_size={built_for}"
        fix = f"build the module with tp_size={tp_size} (or tp_group of that size) and its parallel mode"
    raise MeshError(
        f"{label} ({kind}): tp_mesh of size {tp_size}",
        expected=f"a module built with tp_size={tp_size}",
        got=got,
        why="Sizes were divided by tp_size when the module was built",
        fix=fix,
    )


def check_options(module: Any, kind: str, label: str, tp_size: int) -> None:
    """Check that gradients and outputs are correct under the module's options; raise PlacementError otherwise."""
    for name, parameter in module._parameters.items():
        if getattr(parameter, "is_distributed_weight", False):
            raise PlacementError(
                f"{label}.{name} ({kind}): a DistributedWeight (TransformerEngine 2.19)",
                expected="an ordinary parameter",
                why="TE's code all-gathers the weight and reduces its gradient, and FSDP2 would do so again",
                fix="build this module with ordinary parameters",
            )
    problem = why = ""
    unsplit = kind == "GroupedLinear" or (kind in _LINEARS and module.parallel_mode is None)
    if getattr(module, "fuse_wgrad_accumulation", False):
        problem = "fuse_wgrad_accumulation=True"
        why = "TE then adds weight gradients to main_grad and returns none, so FSDP2 reduces nothing"
    elif _te.delays_weight_gradients(module):
        problem = "delay_wgrad_compute=True"
        why = "TE then writes .grad itself after FSDP2 has reduced"
    elif tp_size > 1 and unsplit and module.sequence_parallel:
        problem = "sequence_parallel=True"
        why = "This module does not communicate over tp. It neither all-gathers its input nor sums weight gradients"
    elif tp_size > 1 and kind == "LayerNormMLP" and not module.set_parallel_mode:
        problem = f"set_parallel_mode=False with tp_size={tp_size}"
        why = "TE shards the weights but never sums the partial outputs"
    elif tp_size > 1 and kind == "MultiheadAttention" and module.proj.parallel_mode is None:
        problem = f"set_parallel_mode=False with tp_size={tp_size}"
        why = "TE divides the heads but not the projections"
    if problem:
        fix = "set_parallel_mode=True" if "parallel_mode" in problem else f"leave {problem.split('=')[0]} off"
        raise PlacementError(f"{label} ({kind}): {problem} is not supported", why=why, fix=fix)
    if tp_size > 1 and torch.nn.utils.parametrize.is_parametrized(module):
        raise PlacementError(
            f"{label}: a parametrization of {', '.join(module.parametrizations)} with tensor parallelism",
            expected="TransformerEngine modules without parametrizations",
            got=f"tp_size={tp_size}",
            why="Norms and other functions of the unsharded weight would read one rank's shard",
            fix="remove the parametrization, or shard the model over dp_shard without tp",
        )


def check_multiple(label: str, name: str, size: int, tp_size: int) -> None:
    """Check that ``tp_size`` divides ``size`` of the argument ``name``; raise PlacementError otherwise."""
    if size % tp_size:
        # The largest smaller size that divides; 1 always does.
        fitting = next(n for n in range(tp_size - 1, 0, -1) if size % n == 0)
        raise PlacementError(
            f"{label}: {name}={size} over tp_size={tp_size}",
            expected=f"a multiple of {tp_size}",
            got=size,
            why="Every tensor-parallel rank needs the same number",
            fix=f"tp={fitting}, or {name}={-(-size // tp_size) * tp_size}",
        )


#: Arguments of TE's constructors that are divided by ``tp_size``. Those of linears depend on ``parallel_mode``.
_DIVIDED = {
    "TransformerLayer": (*HEADS, "ffn_hidden_size"),
    "MultiheadAttention": HEADS,
    "DotProductAttention": HEADS,
    "LayerNormMLP": ("ffn_hidden_size",),
}
_BY_MODE = {"column": ("out_features",), "row": ("in_features",)}


def check_divisible(kind: str, stock: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise if ``tp_size`` does not divide a size in a constructor's arguments that TE divides by it."""
    try:
        arguments = inspect.signature(stock.__init__).bind_partial(None, *args, **kwargs).arguments
    except TypeError:
        return  # TE's error names the wrong argument
    arguments = {**arguments, **arguments.get("kwargs", {})}
    group = arguments.get("tp_group")  # decides over tp_size, as in TE
    tp_size = group.size() if group is not None else arguments.get("tp_size", 1)
    names = _DIVIDED.get(kind, ())
    if kind in _LINEARS:
        names = _BY_MODE.get(str(arguments.get("parallel_mode")), ())
    for name in names:
        size = arguments.get(name)
        if isinstance(size, int) and isinstance(tp_size, int) and tp_size > 1:
            check_multiple(kind, name, size, tp_size)
