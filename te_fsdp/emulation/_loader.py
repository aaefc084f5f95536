"""Import hook that prepares TransformerEngine's own modules after they have executed unchanged.

Only modules under ``transformer_engine.`` are touched. For each the hook does, in this order: execute the stock
source; replace its global name ``torch`` by the proxy (framework modules only); apply the entries of
``_patches.PATCHES`` for it. Preparing a module before any other module imports from it matters, since
TransformerEngine copies names between modules.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import os
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from te_fsdp.emulation import _patches, _torch_proxy, _triton_stubs

_COMMON = "transformer_engine.common"
_FRAMEWORK_PREFIXES = ("transformer_engine.pytorch", "transformer_engine.debug")


@contextlib.contextmanager
def _without_libraries() -> Iterator[None]:
    """Let ``transformer_engine.common`` execute without loading CUDA libraries.

    The module skips that when ``NVTE_PROJECT_BUILDING`` is set and no release is built (``common/__init__.py:488``);
    it reads both variables only while it is imported, so they are put back right after.
    """
    saved = {name: os.environ.get(name) for name in ("NVTE_PROJECT_BUILDING", "NVTE_RELEASE_BUILD")}
    os.environ["NVTE_PROJECT_BUILDING"] = "1"
    os.environ.pop("NVTE_RELEASE_BUILD", None)
    try:
        yield
    finally:
        for name, value in saved.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


class _Loader(importlib.abc.Loader):
    """The stock loader of one TransformerEngine module, plus the preparation afterwards."""

    def __init__(self, stock: Any, proxy: types.ModuleType) -> None:
        self.stock = stock
        self.proxy = proxy

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        """Leave module creation to the stock loader."""
        return self.stock.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        """Execute the stock source, then prepare the module."""
        name = module.__name__
        # The module must look as if the stock loader had loaded it (inspect and linecache read its source).
        module.__loader__ = self.stock
        if module.__spec__ is not None:
            module.__spec__.loader = self.stock
        with _without_libraries() if name == _COMMON else contextlib.nullcontext():
            self.stock.exec_module(module)
        if name.startswith(_FRAMEWORK_PREFIXES) and module.__dict__.get("torch") is torch:
            module.__dict__["torch"] = self.proxy
        _patches.apply(module)


class Finder(importlib.abc.MetaPathFinder):
    """Finds TransformerEngine's modules through the other finders, and wraps their loaders."""

    def __init__(self) -> None:
        self.proxy = _torch_proxy.build()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of a TransformerEngine module; ``None`` for every other name."""
        if not fullname.startswith("transformer_engine."):
            return None
        if _triton_stubs.is_stubbed(fullname):
            return _triton_stubs.spec(fullname)
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None and hasattr(spec.loader, "exec_module"):
                    spec.loader = _Loader(spec.loader, self.proxy)
                return spec
        return None


def install() -> None:
    """Put the finder in front of ``sys.meta_path`` (once)."""
    if not any(isinstance(finder, Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, Finder())


__all__ = ["Finder", "install"]
