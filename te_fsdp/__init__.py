"""te_fsdp: train stock TransformerEngine models with PyTorch's FSDP2.

Importing this package runs nothing: no TE, no CUDA, no patching. Names are loaded when first used. The file
``__init__.pyi`` lists them for type checkers and for this module.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

from te_fsdp.version import VERSION as __version__

#: Module of each public name.
_HOMES = {
    name: module
    for module, names in re.findall(
        r"(?m)^from (te_fsdp\S*) import (\([^)]*\)|.*)", Path(__file__).with_suffix(".pyi").read_text("utf-8")
    )
    for name in re.findall(r" as ([^_]\w*)", names)
}
_MODULES = tuple(name for name, module in _HOMES.items() if module == "te_fsdp.modules.classes")

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'te_fsdp' has no attribute {name!r}")
    if _HOMES[name] == "te_fsdp":  # a subpackage
        return importlib.import_module(f"te_fsdp.{name}")
    if name in _MODULES:
        value = importlib.import_module("te_fsdp.bind_device_mesh").mesh_class(name)
    else:
        value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
