"""Parameters that FSDP2 cannot shard together with the rest of their unit, and that are therefore replicated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from torch import nn

from te_fsdp.errors import PlacementError, shorten
from te_fsdp.records import ParamOwner, is_replicated
from te_fsdp.upstream import te as _te, te_modules as _te_modules

if TYPE_CHECKING:
    import torch

#: Most elements of one unit that are replicated on their own.
MOST = 1 << 20


def refuse_quantized_ops(model: nn.Module, stays_replicated: Callable[[nn.Module, str], bool]) -> None:
    """Raise ``PlacementError`` for quantized weights of ``te.ops`` modules that would be sharded. Local operation."""
    for name, module in model.named_modules():
        if _te.kind_of(module) == "unknown" and _te_modules.holds_quantized(module):
            if all(stays_replicated(module, own) for own, p in module._parameters.items() if p is not None):
                continue
            raise PlacementError(
                f"{name or type(module).__name__}: a quantized weight of te.ops.{type(module).__name__}",
                expected="high-precision weights of te.ops modules that are sharded",
                why="Each rank would quantize its shard with a different scale",
                fix="use te.Linear and similar, te.ops modules built outside of quantized_model_init, or "
                "te_fsdp.fsdp_no_shard(module)",
            )


def refuse_sparse_gradients(model: nn.Module) -> None:
    """Raise ``PlacementError`` for a trained embedding with sparse gradients. Local operation."""
    for name, module in model.named_modules():
        if (
            isinstance(module, (nn.Embedding, nn.EmbeddingBag))
            and module.sparse
            and module.weight.requires_grad
        ):
            raise PlacementError(
                f"{name or type(module).__name__}.weight: {type(module).__name__}(sparse=True)",
                expected="dense gradients",
                got="sparse gradients",
                why="Neither FSDP2 nor the reduction of replicated gradients supports sparse tensors",
                fix="build it with sparse=False, or freeze it",
            )


# [Note: odd parameters] FSDP2 gathers and reduces the trained parameters of a unit in one dtype, and cannot reduce
# empty ones (torch 2.11 to 2.14). Examples are TE's ``softmax_offset``, fp32 in a bf16 model, and an fp32 vector of
# the user's. Small ones stay unsharded, as by ``te_fsdp.fsdp_no_shard``. For large ones ``fully_shard`` raises.
def find_unshardable(
    units: Mapping[str, list[ParamOwner]], *, one_dtype: bool, with_frozen: bool = False
) -> set[int]:
    """Return the ``id`` of each parameter to replicate, of the sharded units' places. Local operation.

    With ``one_dtype`` the trained parameters of a unit must have one dtype, ``with_frozen`` the frozen ones too. Raises
    PlacementError if parameters of another dtype than the rest of their unit are too large to replicate.
    """
    odd: set[int] = set()
    for unit, places in units.items():
        odd.update(id(place.parameter) for place in places if not place.parameter.numel())
        if one_dtype:
            trained: dict[torch.dtype, dict[int, ParamOwner]] = {}
            for place in places:
                parameter = place.parameter
                counts = parameter.requires_grad or (with_frozen and parameter.is_floating_point())
                if counts and parameter.numel() and not is_replicated(place.owner, place.name):
                    trained.setdefault(parameter.dtype, {})[id(parameter)] = place
            if len(trained) < 2:
                continue
            sizes = {dtype: sum(p.parameter.numel() for p in own.values()) for dtype, own in trained.items()}
            # The name decides between equal sizes, so that all ranks choose the same dtype.
            main = max(sizes, key=lambda dtype: (sizes[dtype], str(dtype)))
            others = [place for dtype, own in trained.items() if dtype != main for place in own.values()]
            elements = sum(sizes.values()) - sizes[main]
            if elements > MOST:
                found = [f"{place.label} ({place.parameter.dtype})" for place in others]
                raise PlacementError(
                    f"{shorten(found, 3)}: dtype of trained parameters of unit {unit or 'of the root'}",
                    expected=f"{main}, the dtype of most of the unit (up to {MOST:,} elements of other "
                    "dtypes are replicated)",
                    got=f"{elements:,} elements of other dtypes",
                    why="FSDP2 gathers and reduces a unit in one dtype",
                    fix="units=[...] with the modules that have these parameters, te_fsdp.fsdp_no_shard(parameter), or "
                    "precision=te_fsdp.MixedPrecisionPolicy(param_dtype=...)",
                )
            odd |= {id(place.parameter) for place in others}
    # Tied parameters of several units are an error of their own.
    homes = Counter(key for places in units.values() for key in {id(place.parameter) for place in places})
    return {key for key in odd if homes[key] == 1}
