"""Stand-ins for TransformerEngine's Triton kernels, which a CPU build of torch cannot import.

Whole packages are replaced because their modules import ``triton`` at the top (``pytorch/triton/*.py``), while
TransformerEngine imports them unconditionally (2.20.2: ``pytorch/distributed.py:33``, ``pytorch/permutation.py:10``,
``pytorch/cross_entropy.py:12``, ``pytorch/module/grouped_linear.py:67``, ``pytorch/ops/basic/grouped_linear.py:62``).
Kernels that are written in PyTorch are called; any other raises by name.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import types
from collections.abc import Callable
from typing import Any

import torch

from te_fsdp.emulation import _triton_cross_entropy, _triton_permutation

_PACKAGES = ("transformer_engine.pytorch.triton", "transformer_engine.common.triton")


def pad_columnwise_scale_inv(inp: torch.Tensor) -> torch.Tensor:
    """Zero-pad a 2-D scale tensor to (multiple of 128, multiple of 4), as ``pytorch/triton/pad.py`` does."""
    rows, columns = inp.shape
    out = inp.new_zeros(rows + -rows % 128, columns + -columns % 4)
    out[:rows, :columns] = inp
    return out


def compute_grouped_dbias(
    dy: torch.Tensor, offsets: torch.Tensor, num_groups: int, dbias: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the fp32 (groups, hidden) sums of the rows ``[offsets[g], offsets[g + 1])`` of ``dy`` (tokens, hidden).

    Adds to ``dbias`` when given (``pytorch/triton/grouped_dbias_dscales.py``).
    """
    if dbias is None:
        dbias = torch.zeros(num_groups, dy.shape[-1], dtype=torch.float32, device=dy.device)
    bounds = offsets.tolist()
    for group in range(num_groups):
        dbias[group] += dy[bounds[group] : bounds[group + 1]].float().sum(0)
    return dbias


_WRITTEN: dict[str, Callable[..., Any]] = {
    "pad_columnwise_scale_inv": pad_columnwise_scale_inv,
    "compute_grouped_dbias": compute_grouped_dbias,
    **{
        name: getattr(module, name)
        for module in (_triton_cross_entropy, _triton_permutation)
        for name in module.__all__
    },
}


class _StubModule(types.ModuleType):
    """Module whose functions are the ones above, and otherwise raise when called."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in _WRITTEN:
            return _WRITTEN[name]
        where = self.__name__

        def missing(*args: Any, **kwargs: Any) -> Any:
            raise NotImplementedError(f"{where}.{name} is a Triton kernel and is not emulated on the CPU")

        missing.__name__ = name
        return missing


class _StubLoader(importlib.abc.Loader):
    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """Return the stub itself."""
        return _StubModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Do nothing."""


def is_stubbed(fullname: str) -> bool:
    """Return whether a module name belongs to TransformerEngine's Triton packages."""
    return fullname in _PACKAGES or fullname.startswith(tuple(package + "." for package in _PACKAGES))


def spec(fullname: str) -> importlib.machinery.ModuleSpec:
    """Import spec of the stub called ``fullname``."""
    return importlib.machinery.ModuleSpec(fullname, _StubLoader(), is_package=fullname in _PACKAGES)


__all__: tuple[str, ...] = ("compute_grouped_dbias", "is_stubbed", "pad_columnwise_scale_inv", "spec")
