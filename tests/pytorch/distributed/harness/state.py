"""Per-process state that is restored between two runs.

The private torch names used here are those of caches that outlive a process group. They are looked up, never
required, so that a torch version without one of them still works.
"""

from __future__ import annotations

import functools
import gc
import importlib
import os
import pkgutil
import random
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy
import torch
import torch.distributed as dist

from . import decisions, devices

GROUP_TIMEOUT = timedelta(minutes=10)
"""Longer than any run: the pool, which knows all ranks, is the one to notice a hang."""


def preload(te: bool, arch: str = "10.0") -> None:
    """Import what every body needs.

    Args:
        te: load TransformerEngine; on the CPU through the emulation.
        arch: compute capability that the emulation simulates at first; unused on GPUs.
    """
    torch.set_num_threads(1)
    if devices.device_type() == "cuda":
        torch.cuda.set_device(
            devices.device()
        )  # before TE is imported, or every rank would take memory of GPU 0
    # torch._dynamo: loaded by the first process group anyway
    for name in (
        "torch._dynamo",
        "torch.distributed.checkpoint",
        "torch.distributed.fsdp",
        "torch.distributed.tensor",
    ):
        importlib.import_module(name)
    with suppress(ImportError):
        importlib.import_module("pytest")  # test modules import it; here its import time is spent once
    if devices.device_type() == "cpu":
        decisions.install()
        decisions.remember_layouts()
        _seed_no_absent_devices()
    if not te:
        return
    if devices.device_type() == "cpu":
        _foreach_as_on_gpus()
        importlib.import_module("te_fsdp.emulation").install(arch=arch)
    importlib.import_module("transformer_engine.pytorch")


def preload_library() -> None:
    """Import te_fsdp and the bodies next to `harness`: 250 files, which each worker would otherwise import."""
    package, here = importlib.import_module("te_fsdp"), Path(__file__).parents[1]
    beside = ("te_fsdp.cli", "te_fsdp.emulation", "te_fsdp.integrations", "harness", "test_", "conftest")
    beside += ("bridge.script",)  # runs at its import if megatron-fsdp is installed
    for folders, prefix in ((package.__path__, "te_fsdp."), ([str(here)], "")):
        for result in pkgutil.walk_packages(folders, prefix):
            if not result.name.startswith(beside):
                with suppress(
                    ImportError
                ):  # of packages that are not installed: tests that need them report it
                    importlib.import_module(result.name)


def pretend(arch: str) -> None:
    """Let the emulation, if it is installed, simulate an architecture from now on."""
    emulation = sys.modules.get("te_fsdp.emulation")
    if emulation is not None and emulation.active():
        emulation.switch_arch(arch)


def _seed_no_absent_devices() -> None:
    """Let `torch.manual_seed` seed the CPU alone.

    For each kind of GPU torch records a deferred call with a stack trace: 2 ms per seed.
    """
    for module in (torch.cuda, torch.xpu, torch.mtia):
        if not module.is_available():
            module.manual_seed_all = lambda seed: None


def _foreach_as_on_gpus() -> None:
    """Let torch's optimizers use their foreach kernels by default, as on GPUs, where these may refuse mixed tensors."""
    from torch.optim import optimizer
    from torch.utils import _foreach_utils

    devices_with_kernels = _foreach_utils._get_foreach_kernels_supported_devices()
    for module in (optimizer, _foreach_utils):
        module._get_foreach_kernels_supported_devices = lambda: [*devices_with_kernels, "cpu"]


def seed_everything(seed: int = 0) -> None:
    """Seed torch (all devices), numpy and random with the same seed on every rank."""
    torch.manual_seed(seed)
    numpy.random.seed(seed)
    random.seed(seed)


def join_group(generation: int, store_file: str | None = None) -> None:
    """Create the default process group. Collective over WORLD_SIZE ranks.

    Args:
        generation: number of this group in the pool, for group names.
        store_file: file of the rendezvous; None for MASTER_ADDR and MASTER_PORT, as under torchrun.
    """
    if devices.device_type() == "cuda":
        torch.cuda.set_device(devices.device())
    if store_file is None:
        dist.init_process_group(devices.backend(), timeout=GROUP_TIMEOUT)
    else:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        store = dist.FileStore(store_file, size)
        dist.init_process_group(
            devices.backend(), store=store, rank=rank, world_size=size, timeout=GROUP_TIMEOUT
        )
    # torch numbers groups from 0 again after each destroy. A mesh left in some cache would then find a
    # *different* group under its old name and silently talk to the wrong ranks; distinct numbers turn that
    # into an error.
    world = getattr(dist.distributed_c10d, "_world", None)
    if world is not None and hasattr(world, "group_count"):
        world.group_count = 10_000 * (generation + 1)


def leave_group() -> None:
    """Destroy every process group of this process. Call when no rank has a collective in flight."""
    if dist.is_initialized():
        dist.destroy_process_group()


def reset() -> None:
    """Return to the state before the first run: no group, no cached mesh, fresh TE and torch globals."""
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    torch.use_deterministic_algorithms(False)
    gc.collect()
    leave_group()
    _clear_dtensor_caches()
    _clear_te_caches()
    quantization = sys.modules.get("transformer_engine.pytorch.quantization")
    if quantization is not None:
        quantization.FP8GlobalStateManager.reset()
    graph = sys.modules.get("transformer_engine.pytorch.graph")
    if graph is not None:
        graph.set_capture_end()  # an exception in make_graphed_callables leaves it set
    gc.collect()
    _remove_handlers()
    _empty_lost_meshes()
    # The remaining objects are modules and caches, which stay: later collections need not scan them each time.
    gc.freeze()
    if devices.device_type() == "cuda" and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def restore_environment(saved: dict[str, str], updates: dict[str, str]) -> None:
    """Make `os.environ` equal to `saved` plus `updates`."""
    wanted = {**saved, **updates}
    for name in set(os.environ) - set(wanted):
        del os.environ[name]
    os.environ.update(wanted)


def _remove_handlers() -> None:
    """Remove handlers of operators that te_fsdp installed in this run, which would hide faults of the next.

    te_fsdp itself removes those of `torch._foreach_` functions in the first call after the last model.
    """
    mixed_lists = sys.modules.get("te_fsdp.upstream.torch_mixed_lists")
    if mixed_lists is not None:
        writes = mixed_lists.foreach_writes()
        writes._owners.clear()
        writes._restore()
    functions = sys.modules.get("te_fsdp.upstream.torch_functions")
    dispatch: Any = importlib.import_module("torch.distributed.tensor._dispatch")
    scaler = getattr(dispatch, "found_inf_reduce_handler", None)
    if functions is not None and scaler is not None:
        functions.unscale_over_all_meshes.cache_clear()
        dispatch.dtensor.DTensor._op_dispatcher._custom_op_handlers[functions._UNSCALE] = scaler


def _clear_te_caches() -> None:
    """Forget sizes and ranks of groups by group: TE's cache keeps the groups, and gloo two threads for each."""
    distributed = sys.modules.get("transformer_engine.pytorch.distributed")
    for value in list(getattr(distributed, "__dict__", {}).values()):
        if isinstance(value, functools._lru_cache_wrapper):
            value.cache_clear()


def _empty_lost_meshes() -> None:
    """Release the groups of remaining meshes: gloo keeps three threads for each.

    torch 2.11 and 2.12 never free the arguments of operations that take lists of DTensors (`foreach`), so a mesh is
    lost with each such call.
    """
    for result in gc.get_objects():
        if type(result) is dist.device_mesh.DeviceMesh:
            getattr(result, "_pg_registry", {}).clear()


def _clear_dtensor_caches() -> None:
    """Forget cached sharding decisions: they hold meshes, and those of dead groups equal new ones.

    The caches are per thread, and on GPUs backward runs in its own thread: clear them there too.
    """
    _clear_dtensor_caches_of_thread()
    if devices.device_type() == "cuda" and torch.cuda.is_initialized():
        leaf = torch.zeros((), device=devices.device(), requires_grad=True)
        product = leaf * 1
        product.register_hook(lambda grad: _clear_dtensor_caches_of_thread())
        product.backward()


def _clear_dtensor_caches_of_thread() -> None:
    clear = getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None)
    if clear is not None:
        clear()
    for module in _dtensor_modules(len(sys.modules)):
        if hasattr(module, "_rng_tracker"):
            module._rng_tracker = None
    for clear in _dtensor_caches(len(sys.modules)):
        clear()


@functools.lru_cache(maxsize=1)
def _dtensor_modules(imported: int) -> list[ModuleType]:
    """Return the modules of DTensor among the given ones."""
    return [module for name, module in sys.modules.items() if name.startswith("torch.distributed.tensor")]


@functools.lru_cache(maxsize=1)
def _dtensor_caches(imported: int) -> list[Callable[[], None]]:
    """Return functions that clear the caches of the present modules, and the dispatcher's."""
    dispatcher = getattr(torch.distributed.tensor.DTensor, "_op_dispatcher", None)
    results: list[Callable[[], None]] = []
    for owner in (getattr(dispatcher, "sharding_propagator", None), *_dtensor_modules(imported)):
        for name, value in list(getattr(owner, "__dict__", {}).items()):
            if name == "clear_redistribute_planner_cache":
                results.append(value)
            elif callable(getattr(value, "cache_clear", None)) and not isinstance(value, type):
                results.append(value.cache_clear)
    return results
