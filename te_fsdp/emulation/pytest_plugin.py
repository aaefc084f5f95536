"""Pytest plugin: ``pytest -p te_fsdp.emulation.pytest_plugin [--te-fsdp-emulation 9.0|10.0]``.

Installs the emulation before test modules are imported. The architecture comes from the option, else from
``TE_FSDP_EMULATION``, else it is 10.0; ``off`` installs nothing.
"""

from __future__ import annotations

import os

import pytest

from te_fsdp import emulation
from te_fsdp.emulation import _state

_OFF = "off"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare ``--te-fsdp-emulation``."""
    parser.getgroup("te_fsdp").addoption(
        "--te-fsdp-emulation",
        choices=[*sorted(_state.ARCHITECTURES), _OFF],
        default=None,
        help=f"emulated architecture, or off (default: ${emulation.ENVIRONMENT_VARIABLE}, else 10.0)",
    )


def _wanted(config: pytest.Config) -> str:
    chosen = config.getoption("--te-fsdp-emulation")
    return chosen or os.environ.get(emulation.ENVIRONMENT_VARIABLE) or emulation.DEFAULT_ARCH


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Install, or stop with a usage error that says why not."""
    wanted = _wanted(config)
    if wanted == _OFF:
        return
    try:
        emulation.install(wanted)
    except emulation.EmulationError as error:
        raise pytest.UsageError(f"te_fsdp.emulation: {error}") from error


def pytest_report_header(config: pytest.Config) -> str:
    """Return a line that labels the results as emulated."""
    if not emulation.active():
        return "TransformerEngine: real (te_fsdp.emulation is off)"
    return f"TransformerEngine: emulated on the CPU, architecture {_state.arch_name()}"
