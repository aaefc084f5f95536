"""Layouts of a model's original parameters, which the manifest describes."""

from __future__ import annotations

from typing import Any

from torch import nn

from te_fsdp.layout import PLAIN, Layout, mlp_rules
from te_fsdp.modules.plan import fused_layouts
from te_fsdp.upstream import te as _te


def original_layouts(root: nn.Module) -> dict[int, dict[str, Layout]]:
    """Return the layouts of TE modules' direct parameters by ``id`` of the module, for any mesh. Local operation.

    The rows of a fused projection are query, key and value on top of each other, or interleaved by heads. This
    does not depend on the mesh. Rules contain it only if tp shards the rows.
    """
    fused: dict[int, Layout] = {}
    by_module: dict[int, dict[str, Layout]] = {}
    modules: list[Any] = list(root.modules())
    for module in modules:
        kind = _te.kind_of(module)
        if kind == "MultiheadAttention":
            fused.update(fused_layouts(module))
        if kind not in (None, "unknown"):
            # Everything else of a module, such as the weight of a norm, is one matrix or vector.
            layouts = by_module[id(module)] = dict.fromkeys(module._parameters, PLAIN)
            if kind in ("Linear", "LayerNormLinear"):
                names = (*module.weight_names, *module.bias_names)
                layouts.update(dict.fromkeys(names, fused.get(id(module), PLAIN)))
            elif kind == "LayerNormMLP":
                layouts.update({name: rule.layout for name, rule in mlp_rules(module.activation).items()})
    return by_module
