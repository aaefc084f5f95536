"""The emulated GPU architecture. Process-wide: TransformerEngine asks one device for its capability."""

from __future__ import annotations

from te_fsdp.emulation._errors import EmulationError

#: Values of ``install(arch=...)``, with the compute capability that TransformerEngine gets.
ARCHITECTURES = {"9.0": (9, 0), "10.0": (10, 0)}

_arch: tuple[int, int] | None = None


def arch() -> tuple[int, int]:
    """Compute capability of the emulated GPU, such as ``(10, 0)``.

    Raises:
        EmulationError: no architecture has been set, so the emulation is not installed.
    """
    if _arch is None:
        raise EmulationError(
            "the emulation backend is not installed: call te_fsdp.emulation.install() before importing "
            "transformer_engine"
        )
    return _arch


def set_arch(name: str | None) -> None:
    """Set the emulated architecture, one of :data:`ARCHITECTURES`; ``None`` forgets it.

    Raises:
        EmulationError: unknown architecture.
    """
    global _arch
    if name is not None and name not in ARCHITECTURES:
        raise EmulationError(f"unknown architecture {name!r}: expected one of {sorted(ARCHITECTURES)}")
    _arch = None if name is None else ARCHITECTURES[name]


def arch_name() -> str | None:
    """Return the name of the emulated architecture as given to :func:`set_arch`, or ``None``."""
    return None if _arch is None else f"{_arch[0]}.{_arch[1]}"


__all__ = ["ARCHITECTURES", "arch", "arch_name", "set_arch"]
