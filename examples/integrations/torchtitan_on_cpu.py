"""Run torchtitan's trainer on a CPU, by replacing the functions of `torch.cuda` that it calls.

For the examples and tests of te_fsdp under emulation. It is not used with GPUs.
"""

from __future__ import annotations

import importlib
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

#: Modules of torchtitan that store the device module at import.
_USERS = (
    "tools.utils",
    "components.metrics",
    "distributed.parallel_dims",
    "distributed.utils",
    "tools.profiler",
)


class _Cpu(ModuleType):
    """The part of `torch.cuda` that torchtitan uses, for one CPU."""

    def __init__(self) -> None:
        super().__init__("cpu")

    @staticmethod
    def device_count() -> int:
        return 1

    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    def get_device_name(device: Any = None) -> str:
        return "CPU"

    @staticmethod
    def get_device_properties(device: Any = None) -> SimpleNamespace:
        return SimpleNamespace(total_memory=2**30)

    @staticmethod
    def memory_stats(device: Any = None) -> dict[str, int]:
        return {}

    @staticmethod
    def nothing(*given: Any, **others: Any) -> None:
        """There is nothing to be set, emptied or waited for."""

    set_device = empty_cache = reset_peak_memory_stats = synchronize = nothing


def install() -> None:
    """Give torchtitan the CPU for its device, unless there is a GPU. Before its trainer is built."""
    if torch.cuda.is_available():
        return
    for name in _USERS:
        module = importlib.import_module(f"torchtitan.{name}")
        for attribute, value in (("device_type", "cpu"), ("device_module", _Cpu())):
            if hasattr(module, attribute):
                setattr(module, attribute, value)
    # gloo has no barrier on a device, before which the trainer sets the timeouts of its groups.
    importlib.import_module("torchtitan.distributed.utils").set_pg_timeouts = _Cpu.nothing
