"""Patches that TransformerEngine's modules need on a CPU in addition to the extension.

Every entry names the place of TransformerEngine 2.20.2 that forces it, holds for a stated version range, and is
refused when what it replaces is not there: a new TransformerEngine must not lose a patch silently.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import re
import sys
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from te_fsdp.emulation._errors import EmulationError
from te_fsdp.emulation._torch_proxy import is_te_frame, map_device

Version = tuple[int, int]


class Patch(NamedTuple):
    """One change of one TransformerEngine module, applied right after it executed."""

    module: str
    #: Attributes that the change replaces or relies on; each must exist.
    targets: tuple[str, ...]
    #: First version and first version no longer covered, (major, minor).
    versions: tuple[Version, Version]
    #: Place and reason, TransformerEngine 2.20.2.
    reason: str
    change: Callable[[types.ModuleType], None]


_ALL: tuple[Version, Version] = ((2, 16), (3, 0))


def _no_library(module: types.ModuleType) -> None:
    module.load_framework_extension = lambda framework: None  # type: ignore[attr-defined]


def _tensors_on_cpu(module: types.ModuleType) -> None:
    stock = module.QuantizedTensor.__new__  # type: ignore[attr-defined]

    def new(cls: type, *args: Any, device: Any = None, **kwargs: Any) -> Any:
        return stock(cls, *args, device="cpu" if device is None else device, **kwargs)

    module.QuantizedTensor.__new__ = staticmethod(new)  # type: ignore[attr-defined]


def _autocast_on_cpu(module: types.ModuleType) -> None:
    module.gpu_autocast_ctx = functools.partial(torch.amp.autocast, device_type="cpu")  # type: ignore[attr-defined]


def _cpu_rng(module: types.ModuleType) -> None:
    def get_state(device: Any = "cuda", clone: bool = False, graph_safe: bool = True) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(new_state: torch.Tensor, device: Any = -1, graph_safe: bool = True) -> None:
        torch.set_rng_state(new_state)

    module._get_cuda_rng_state = get_state  # type: ignore[attr-defined]
    module._set_cuda_rng_state = set_state  # type: ignore[attr-defined]
    module.graph_safe_rng_available = lambda: False  # type: ignore[attr-defined]


def _dequantize_in_place(class_name: str, columnwise: bool) -> Callable[[types.ModuleType], None]:
    """Let a dequantizing autograd function work in place instead of moving the tensor to a GPU."""

    def change(module: types.ModuleType) -> None:
        def forward(ctx: Any, tensor: Any, dtype: torch.dtype) -> torch.Tensor:
            del ctx
            parts = (tensor._rowwise_data, tensor._columnwise_data)
            if parts[0] is None and parts[1] is None:
                raise ValueError("Cannot dequantize a tensor with no data")
            if any(part is not None and part.numel() == 0 for part in parts):
                return torch.empty(tensor.size(), dtype=dtype, device=tensor.device)
            if parts[0] is None and not columnwise:
                raise NotImplementedError(
                    "Dequantizing column-wise NVFP4 data is not implemented in TransformerEngine"
                )
            return module.tex.dequantize(tensor, dtype)  # type: ignore[attr-defined]

        getattr(module, class_name).forward = staticmethod(forward)

    return change


class _Splits(torch.Tensor):
    """Token counts on the emulated GPU."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Return the emulated GPU."""
        return torch.device("cuda")


def _splits_on_device(module: types.ModuleType) -> None:
    stock = module.GroupedLinear.forward  # type: ignore[attr-defined]

    @functools.wraps(stock)
    def forward(self: Any, inp: Any, m_splits: Any, *args: Any, **kwargs: Any) -> Any:
        # A list stays one: on a GPU it becomes a host tensor, which the grouped path refuses.
        if isinstance(m_splits, torch.Tensor):
            m_splits = m_splits.as_subclass(_Splits)
        return stock(self, inp, m_splits, *args, **kwargs)

    module.GroupedLinear.forward = forward  # type: ignore[attr-defined]


class _Once:
    """A gloo message that, like NCCL's, can be waited for repeatedly (gloo allows only one wait)."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self) -> None:
        """Wait for the message, any number of times."""
        work, self._work = self._work, None
        if work is not None:
            work.wait()


def _wait_again(module: types.ModuleType) -> None:
    stock = module.flash_attn_p2p_communicate  # type: ignore[attr-defined]

    @functools.wraps(stock)
    def flash_attn_p2p_communicate(*args: Any, **kwargs: Any) -> list[_Once]:
        return [_Once(work) for work in stock(*args, **kwargs)]

    module.flash_attn_p2p_communicate = flash_attn_p2p_communicate  # type: ignore[attr-defined]


def _fused_where_needed(module: types.ModuleType) -> None:
    stock = module.get_attention_backend  # type: ignore[attr-defined]

    @functools.wraps(stock)
    def get_attention_backend(attention_params: Any = None) -> Any:
        is_packed = "thd" in attention_params.qkv_layout
        needed = attention_params.pad_between_seqs if is_packed else attention_params.context_parallel
        if not needed or (is_packed and attention_params.context_parallel):
            return stock(attention_params)
        saved = os.environ.get("NVTE_FUSED_ATTN")
        os.environ["NVTE_FUSED_ATTN"] = "1"
        try:
            return stock(attention_params)
        finally:
            if saved is None:
                del os.environ["NVTE_FUSED_ATTN"]
            else:
                os.environ["NVTE_FUSED_ATTN"] = saved

    module.get_attention_backend = get_attention_backend  # type: ignore[attr-defined]


def _attention_ops_on_cpu(module: types.ModuleType) -> None:
    for name in ("copy_to_kv_cache", "convert_bshd_to_thd", "convert_thd_to_bshd"):
        operator = getattr(module, name)
        operator.register_kernel("cpu")(operator._init_fn)


PATCHES: list[Patch] = [
    Patch(
        "transformer_engine.pytorch.attention.custom_ops",
        ("copy_to_kv_cache", "convert_bshd_to_thd", "convert_thd_to_bshd"),
        ((2, 19), (3, 0)),
        "pytorch/attention/custom_ops.py:18 registers operators for CUDA alone",
        _attention_ops_on_cpu,
    ),
    Patch(
        "transformer_engine.pytorch.attention.dot_product_attention.utils",
        ("get_attention_backend",),
        _ALL,
        "pytorch/attention/dot_product_attention/utils.py:1186,1269 have no unfused attention with padding between "
        "sequences and over a context-parallel axis",
        _fused_where_needed,
    ),
    Patch(
        "transformer_engine.pytorch.attention.dot_product_attention.context_parallel",
        ("flash_attn_p2p_communicate",),
        _ALL,
        "pytorch/attention/dot_product_attention/context_parallel.py:2697 waits again for messages that have come",
        _wait_again,
    ),
    Patch(
        "transformer_engine.pytorch.module.grouped_linear",
        ("GroupedLinear.forward",),
        _ALL,
        "pytorch/module/grouped_linear.py:785 wants the token counts of grouped tensors on a GPU",
        _splits_on_device,
    ),
    Patch(
        "transformer_engine.common",
        ("load_framework_extension",),
        _ALL,
        "pytorch/__init__.py:18, common/__init__.py:173 load the compiled extension; it is there already",
        _no_library,
    ),
    Patch(
        "transformer_engine.pytorch.quantized_tensor",
        ("QuantizedTensor.__new__",),
        _ALL,
        "pytorch/quantized_tensor.py:735 uses the current GPU by default; tensor/hybrid_tensor.py:226 relies on it",
        _tensors_on_cpu,
    ),
    Patch(
        "transformer_engine.pytorch.utils",
        ("gpu_autocast_ctx",),
        _ALL,
        "pytorch/utils.py:972 binds autocast to 'cuda' as the module executes, before the proxy is in place",
        _autocast_on_cpu,
    ),
    Patch(
        "transformer_engine.pytorch.distributed",
        ("_get_cuda_rng_state", "_set_cuda_rng_state", "graph_safe_rng_available"),
        _ALL,
        "pytorch/distributed.py:97-150 initialize CUDA through names taken from torch.cuda (checkpoint, RNG)",
        _cpu_rng,
    ),
    Patch(
        "transformer_engine.pytorch.tensor.storage.mxfp8_tensor_storage",
        ("_FromMXFP8Func.forward", "tex"),
        _ALL,
        "pytorch/tensor/storage/mxfp8_tensor_storage.py:47 moves to 'cuda' with .to, which storages lack",
        _dequantize_in_place("_FromMXFP8Func", columnwise=True),
    ),
    Patch(
        "transformer_engine.pytorch.tensor.storage.nvfp4_tensor_storage",
        ("_FromNVFP4Func.forward", "tex"),
        _ALL,
        "pytorch/tensor/storage/nvfp4_tensor_storage.py:57, as for MXFP8",
        _dequantize_in_place("_FromNVFP4Func", columnwise=False),
    ),
]


def te_version() -> Version:
    """Return (major, minor) of the installed TransformerEngine.

    Raises:
        EmulationError: it is not installed, or its version is unreadable.
    """
    try:
        text = importlib.metadata.version("transformer_engine")
    except importlib.metadata.PackageNotFoundError as error:
        raise EmulationError(
            "transformer-engine is not installed: pip install --no-deps transformer-engine"
        ) from error
    match = re.match(r"(\d+)\.(\d+)", text)
    if match is None:
        raise EmulationError(f"unreadable transformer-engine version {text!r}")
    return int(match.group(1)), int(match.group(2))


def _by_module() -> dict[str, list[Patch]]:
    table: dict[str, list[Patch]] = {}
    for patch in PATCHES:
        table.setdefault(patch.module, []).append(patch)
    return table


_TABLE = _by_module()


def apply(module: types.ModuleType) -> None:
    """Apply the entries for ``module``, which has just executed.

    Raises:
        EmulationError: a target does not exist in this version of TransformerEngine.
    """
    for patch in _TABLE.get(module.__name__, ()):
        if not patch.versions[0] <= te_version() < patch.versions[1]:
            continue
        for target in patch.targets:
            owner: Any = module
            for part in target.split("."):
                if not hasattr(owner, part):
                    raise EmulationError(
                        f"{module.__name__} has no {target}, which the emulation replaces ({patch.reason}); "
                        f"TransformerEngine {te_version()} is not supported"
                    )
                owner = getattr(owner, part)
        patch.change(module)


def forget_device() -> None:
    """Clear cached device properties in TransformerEngine's modules, and its global FP8 state.

    Raises:
        EmulationError: TransformerEngine is inside an FP8 context, whose quantizers belong to the old device.
    """
    quantization = sys.modules.get("transformer_engine.pytorch.quantization")
    if quantization is not None:
        manager = quantization.FP8GlobalStateManager
        if manager.is_fp8_enabled() or manager.with_fp8_parameters():
            raise EmulationError(
                "cannot switch the architecture inside an autocast or quantized_model_init context"
            )
        manager.reset()
        for name in ("_FP8_SUPPORT", "_MXFP8_SUPPORT", "_NVFP4_SUPPORT", "_FP8_BLOCK_SCALING_SUPPORT"):
            if hasattr(quantization, name):
                setattr(quantization, name, None)
    for name, module in list(sys.modules.items()):
        if is_te_frame(name):
            for value in list(vars(module).values()):
                if isinstance(value, _CACHED):
                    value.cache_clear()


_CACHED = type(functools.lru_cache(maxsize=None)(lambda: None))


# --- torch itself

_STOCK_IS_CUDA = torch._C.TensorBase.is_cuda
_STOCK_TO = torch._C.TensorBase.to
_STOCK_CUDA = torch._C.TensorBase.cuda


def _is_cuda(self: torch.Tensor) -> bool:
    frame = sys._getframe(1)
    # TransformerEngine's tensor classes forward the attribute, so their caller decides.
    while frame.f_code.co_name == "is_cuda" and is_te_frame(frame.f_globals.get("__name__")) and frame.f_back:
        frame = frame.f_back
    if is_te_frame(frame.f_globals.get("__name__")):
        return self.device.type in ("cpu", "cuda")
    return _STOCK_IS_CUDA.__get__(self)


def _to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    if len(args) == 1 and not kwargs and isinstance(args[0], torch.dtype):  # most calls: no device among them
        return _STOCK_TO(self, *args, **kwargs)
    names_cuda = "device" in kwargs or (args and map_device(args[0]) is not args[0])
    if names_cuda and is_te_frame(sys._getframe(1).f_globals.get("__name__")):
        args = tuple(map_device(one) if index == 0 else one for index, one in enumerate(args))
        if "device" in kwargs:
            kwargs["device"] = map_device(kwargs["device"])
    return _STOCK_TO(self, *args, **kwargs)


def _cuda(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    if is_te_frame(sys._getframe(1).f_globals.get("__name__")):
        return self
    return _STOCK_CUDA(self, *args, **kwargs)


_cuda.__name__ = _cuda.__qualname__ = "cuda"
_cuda.__doc__ = _STOCK_CUDA.__doc__
_to.__name__ = _to.__qualname__ = "to"
_to.__doc__ = _STOCK_TO.__doc__


def patch_torch() -> None:
    """Patch tensor methods that cannot be scoped to a module. All check their caller.

    ``Tensor.is_cuda``: ``pytorch/module/base.py:1605`` refuses inputs without it, and the ``data`` setters of
    the tensor classes (``pytorch/tensor/float8_tensor.py:1142``, ``mxfp8_tensor.py:826``,
    ``float8_blockwise_tensor.py:541``, ``nvfp4_tensor.py:934``) decide by it. True for a caller inside
    TransformerEngine, the real value for others.

    ``Tensor.to``: ``pytorch/module/layernorm_mlp.py:2133`` and
    ``pytorch/attention/dot_product_attention/utils.py:1964,2188,2223,2292`` move tensors to "cuda". The CPU for a
    caller inside TransformerEngine, the stock method (and its error) for other callers.

    ``Tensor.cuda``: ``pytorch/utils.py:125`` and ``debug/features/utils/stats_buffer.py:44,51``. The same.
    """
    torch.Tensor.cuda = _cuda  # type: ignore[assignment]
    torch.Tensor.is_cuda = property(_is_cuda, doc="Is True if the tensor is stored on the GPU.")  # type: ignore[assignment]
    torch.Tensor.to = _to  # type: ignore[assignment]


__all__ = ["PATCHES", "Patch", "apply", "patch_torch", "te_version"]
