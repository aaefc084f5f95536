"""TransformerEngine without a GPU: stock, unmodified ``transformer_engine`` modules on CPU tensors.

    import te_fsdp.emulation
    te_fsdp.emulation.install(arch="10.0")      # before anything imports transformer_engine
    import transformer_engine.pytorch as te
    te.Linear(64, 64, device="cpu")(x)

Importing this package changes nothing; :func:`install` does. It provides ``transformer_engine_torch`` in PyTorch,
prepares TransformerEngine's modules as they are imported, and changes two methods of ``torch.Tensor`` for callers
inside TransformerEngine. Values follow the real kernels (quantization formats bit for bit, products and norms up to
the order of summation); speed, memory and overlap mean nothing here. The package uses nothing of the rest of te_fsdp.
"""

from __future__ import annotations

import importlib.machinery
import logging
import os
import sys

from te_fsdp.emulation import _state
from te_fsdp.emulation._errors import EmulationError

_logger = logging.getLogger("te_fsdp")

#: Environment variable with the architecture to emulate, read by :func:`install_from_env` and the pytest plugin.
ENVIRONMENT_VARIABLE = "TE_FSDP_EMULATION"
DEFAULT_ARCH = "10.0"
_EXTENSION = "transformer_engine_torch"
#: torch.compile is off in TransformerEngine (pytorch/jit.py:40), and so are the attention backends that need kernels.
_ENVIRONMENT = {"NVTE_TORCH_COMPILE": "0", "NVTE_FLASH_ATTN": "0", "NVTE_FUSED_ATTN": "0"}


def active() -> bool:
    """Return whether the emulation is installed in this process."""
    return _state.arch_name() is not None


def arch() -> tuple[int, int]:
    """Return the compute capability that TransformerEngine gets, such as ``(10, 0)``.

    Raises:
        EmulationError: the emulation is not installed.
    """
    return _state.arch()


def _refuse_real_one() -> None:
    import torch

    if torch.cuda.is_available():
        raise EmulationError(
            "CUDA is available: the emulation is for machines without a GPU. Use the real TransformerEngine, "
            "or install(force=True) to compare the two"
        )
    if importlib.machinery.PathFinder.find_spec(_EXTENSION) is not None:
        raise EmulationError(
            f"the real extension {_EXTENSION} is installed: the emulation does not replace it. "
            "Uninstall it, use an environment with TransformerEngine's Python package alone, or "
            "install(force=True)"
        )


def install(arch: str = DEFAULT_ARCH, *, force: bool = False) -> None:
    """Make ``import transformer_engine.pytorch`` give stock TransformerEngine on the CPU, in this process.

    Args:
        arch: emulated architecture, "9.0" (Hopper) or "10.0" (Blackwell). MXFP8 and NVFP4 exist on "10.0" only, and
            the layout of float8 tensors differs, so test on both.
        force: install although CUDA is available or the real extension is installed. Never over an imported
            TransformerEngine.

    Calling it again with the same ``arch`` does nothing.

    Raises:
        EmulationError: unknown architecture; another one is installed; TransformerEngine is already imported, or its
            real extension is loaded; CUDA is available or the real extension importable (without ``force``);
            TransformerEngine is not installed.
    """
    if arch not in _state.ARCHITECTURES:
        raise EmulationError(f"unknown architecture {arch!r}: expected one of {sorted(_state.ARCHITECTURES)}")
    if active():
        if _state.arch_name() != arch:
            raise EmulationError(
                f"the emulation is installed for architecture {_state.arch_name()}, got {arch}. One "
                "process has one architecture (tests may use te_fsdp.emulation.switch_arch)"
            )
        return
    for name in ("transformer_engine", _EXTENSION):
        if name in sys.modules:
            raise EmulationError(
                f"{name} is already imported: call te_fsdp.emulation.install() before anything imports "
                "TransformerEngine"
            )
    if not force:
        _refuse_real_one()
    from te_fsdp.emulation import _loader, _patches, tex

    _patches.te_version()
    extension = tex.build()
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    _state.set_arch(arch)
    sys.modules[_EXTENSION] = extension
    _loader.install()
    _patches.patch_torch()
    _logger.info("TransformerEngine is emulated on the CPU, architecture %s", arch)


def install_from_env(default: str | None = None) -> bool:
    """Install for the architecture in ``TE_FSDP_EMULATION`` (or ``default`` when it is unset).

    Returns:
        Whether the emulation is active afterwards. An unset or empty variable without a default changes nothing.

    Raises:
        EmulationError: as :func:`install`.
    """
    wanted = os.environ.get(ENVIRONMENT_VARIABLE) or default
    if wanted:
        install(wanted)
    return active()


def switch_arch(arch: str) -> None:
    """Switch to a different architecture, for tests that run on both in one process.

    Clears TransformerEngine's cached device properties: cached functions, support flags, the state of its global FP8
    manager. Quantized tensors and modules made before belong to the old architecture and must not be used any more.

    Raises:
        EmulationError: the emulation is not installed, the architecture is unknown, or TransformerEngine is
            inside an FP8 context.
    """
    _state.arch()
    if arch not in _state.ARCHITECTURES:
        raise EmulationError(f"unknown architecture {arch!r}: expected one of {sorted(_state.ARCHITECTURES)}")
    if _state.arch_name() == arch:
        return
    from te_fsdp.emulation import _patches

    _patches.forget_device()
    _state.set_arch(arch)


__all__ = [
    "DEFAULT_ARCH",
    "ENVIRONMENT_VARIABLE",
    "EmulationError",
    "active",
    "arch",
    "install",
    "install_from_env",
    "switch_arch",
]
