"""Proxy of ``torch`` for TransformerEngine's modules, with an emulated GPU that is the CPU.

A proxy replaces the *global name* ``torch`` inside ``transformer_engine.pytorch`` modules only, so user code keeps the
real torch. Attributes that are not listed here are read from the real module at each access, so later changes of torch
(another default dtype, a test's monkeypatch) are seen. Reasons, TransformerEngine 2.20.2: it queries the capability
(``pytorch/utils.py:154,743,774,844``), allocates with ``device="cuda"`` (``pytorch/quantization.py:427``,
``pytorch/optimizers/fused_adam.py:193``, ``pytorch/cpp_extensions/gemm.py:43,420``,
``pytorch/attention/dot_product_attention/softmax.py:239``) and requires ``torch.cuda.is_available()``
(``pytorch/module/base.py:895``).
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from te_fsdp.emulation import _state

#: Streaming multiprocessors of the emulated GPU: a plausible number, TransformerEngine only sizes launches with it.
MULTIPROCESSORS = 132

_FACTORIES = (
    "empty",
    "zeros",
    "ones",
    "full",
    "tensor",
    "as_tensor",
    "arange",
    "range",
    "rand",
    "randn",
    "randint",
    "randperm",
    "eye",
    "linspace",
    "empty_like",
    "zeros_like",
    "ones_like",
    "full_like",
    "rand_like",
    "randn_like",
    "randint_like",
    "empty_strided",
)


def map_device(device: Any) -> Any:
    """Return the CPU for a CUDA device (string, index, ``torch.device``), anything else as it is."""
    if isinstance(device, str):
        return "cpu" if device.split(":", 1)[0] == "cuda" else device
    if isinstance(device, torch.device):
        return torch.device("cpu") if device.type == "cuda" else device
    if isinstance(device, int) and not isinstance(device, bool):
        return "cpu"
    return device


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("device") is not None:
            kwargs["device"] = map_device(kwargs["device"])
        return factory(*args, **kwargs)

    call.__name__ = factory.__name__
    call.__doc__ = factory.__doc__
    return call


class _DeviceType(type):
    """Makes ``torch.device(...)`` give real devices and ``isinstance(x, torch.device)`` accept them."""

    def __call__(cls, *args: Any, **kwargs: Any) -> torch.device:  # type: ignore[override]
        kind = args[0] if args else kwargs.get("type", kwargs.get("device"))
        if kind is not None and map_device(kind) is not kind:
            return torch.device("cpu")
        return torch.device(*args, **kwargs)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, torch.device)


class _Device(metaclass=_DeviceType):
    """Replaces ``torch.device``."""


class _Autocast(torch.autocast):
    """``torch.autocast`` for "cuda" is the one for the CPU: that is where the tensors are."""

    def __init__(self, device_type: str = "cuda", *args: Any, **kwargs: Any) -> None:
        super().__init__(map_device(device_type), *args, **kwargs)


class ForwardingModule(types.ModuleType):
    """A module whose missing attributes come from another module at the time of access."""

    def __init__(self, target: types.ModuleType, replaced: dict[str, Any]) -> None:
        super().__init__(target.__name__, target.__doc__)
        self.__dict__["_target"] = target
        self.__dict__["__getattr__"] = functools.partial(
            getattr, target
        )  # asked by the interpreter itself (PEP 562)
        self.__dict__.update(replaced)

    def __dir__(self) -> Any:
        return sorted(set(dir(self.__dict__["_target"])) | set(self.__dict__))


class _Stream:
    """A CUDA stream that is always done."""

    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device = torch.device("cpu")

    def synchronize(self) -> None:
        """Do nothing, because all work is complete."""

    wait_stream = wait_event = lambda self, other: None

    def record_event(self, event: _Event | None = None) -> _Event:
        """Return a completed event."""
        return event if event is not None else _Event()

    def query(self) -> bool:
        """Return ``True``: all work is complete."""
        return True

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *details: Any) -> None:
        return None


class _Event:
    """A CUDA event that has happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    record = wait = lambda self, stream=None: None

    def synchronize(self) -> None:
        """Do nothing, because all work is complete."""

    def query(self) -> bool:
        """Return ``True``: the event is complete."""
        return True

    def elapsed_time(self, other: _Event) -> float:
        """Return 0.0. The emulation completes work at once, so no time passes between events."""
        return 0.0


_CURRENT_STREAM = _Stream()


def _properties(device: Any = None) -> types.SimpleNamespace:
    major, minor = _state.arch()
    return types.SimpleNamespace(
        name=f"TransformerEngine emulation {major}.{minor}",
        major=major,
        minor=minor,
        multi_processor_count=MULTIPROCESSORS,
        total_memory=0,
        L2_cache_size=0,
    )


def _cuda_proxy() -> ForwardingModule:
    def nothing(*args: Any, **kwargs: Any) -> None:
        return None

    def constant(value: Any) -> Callable[..., Any]:
        return lambda *args, **kwargs: value

    def null_context(*args: Any, **kwargs: Any) -> Any:
        return contextlib.nullcontext()

    replaced: dict[str, Any] = {
        "is_available": constant(True),
        "is_initialized": constant(True),
        "is_bf16_supported": constant(True),
        "is_current_stream_capturing": constant(False),
        "device_count": constant(1),
        "current_device": constant(0),
        "get_device_capability": lambda device=None: _state.arch(),
        "get_device_properties": _properties,
        "get_device_name": lambda device=None: _properties().name,
        "Stream": _Stream,
        "Event": _Event,
        "current_stream": constant(_CURRENT_STREAM),
        "default_stream": constant(_CURRENT_STREAM),
        "stream": null_context,
        "device": null_context,
        "get_rng_state": lambda device="cuda": torch.get_rng_state(),
        "set_rng_state": lambda state, device="cuda": torch.set_rng_state(state),
        "manual_seed": lambda seed: torch.default_generator.manual_seed(seed),
        "nvtx": types.SimpleNamespace(
            range=null_context, range_push=nothing, range_pop=nothing, mark=nothing
        ),
    }
    for name in (
        "synchronize",
        "set_device",
        "empty_cache",
        "set_stream",
        "init",
        "_lazy_init",
        "manual_seed_all",
    ):
        replaced[name] = nothing
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        replaced[name] = constant(0)
    replaced["mem_get_info"] = constant((0, 0))
    return ForwardingModule(torch.cuda, replaced)


class _Done:
    """Handle of collectives that have finished."""

    def wait(self) -> None:
        """Do nothing, because all work is complete."""


@contextlib.contextmanager
def _eager_collectives(*args: Any, **kwargs: Any) -> Iterator[_Done]:
    """Run each collective of a coalescing block immediately and synchronously.

    Gloo has no coalescing, and a failed attempt leaves the group recording later collectives without running
    them. The blocks (``pytorch/distributed.py:1177,1438,1622``) issue only synchronous collectives, so the
    handle has no work left.
    """
    yield _Done()


def build() -> ForwardingModule:
    """Create a proxy of ``torch``. One per process is sufficient."""

    def autocast_query(name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            return getattr(torch, name)(*(map_device(one) for one in args))

        return call

    def load(*args: Any, **kwargs: Any) -> Any:
        if "map_location" in kwargs:
            kwargs["map_location"] = map_device(kwargs["map_location"])
        return torch.load(*args, **kwargs)

    replaced: dict[str, Any] = {name: _on_cpu(getattr(torch, name)) for name in _FACTORIES}
    replaced["device"] = _Device
    replaced["cuda"] = _cuda_proxy()
    replaced["distributed"] = ForwardingModule(torch.distributed, {"_coalescing_manager": _eager_collectives})
    replaced["autocast"] = _Autocast
    replaced["amp"] = ForwardingModule(torch.amp, {"autocast": _Autocast})
    replaced["get_autocast_dtype"] = autocast_query("get_autocast_dtype")
    replaced["is_autocast_enabled"] = _is_autocast_enabled
    replaced["load"] = load
    # pytorch/quantization.py:157,180 compare the version of CUDA; a CPU build of torch has none.
    replaced["version"] = ForwardingModule(torch.version, {"cuda": "13.0"})
    return ForwardingModule(torch, replaced)


def _is_autocast_enabled(*args: Any) -> bool:
    return torch.is_autocast_enabled(map_device(args[0]) if args else "cpu")


def is_te_frame(name: Any) -> bool:
    """Return whether a frame whose module is called ``name`` belongs to TransformerEngine."""
    return isinstance(name, str) and name.startswith("transformer_engine.")


__all__: tuple[str, ...] = ("MULTIPROCESSORS", "ForwardingModule", "build", "is_te_frame", "map_device")
