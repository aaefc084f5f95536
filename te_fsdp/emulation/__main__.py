"""Run a program with TransformerEngine emulated.

``python -m te_fsdp.emulation [--arch A] script.py ...``, or ``... -m module ...``. Under torchrun: ``torchrun
--nproc-per-node 2 -m te_fsdp.emulation --arch 10.0 script.py ...``.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys

from te_fsdp import emulation
from te_fsdp.emulation import _state


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m te_fsdp.emulation",
        usage="%(prog)s [--arch {9.0,10.0}] (script.py | -m module) [arguments ...]",
        description="Run a program with stock TransformerEngine emulated on the CPU.",
    )
    parser.add_argument(
        "--arch",
        choices=sorted(_state.ARCHITECTURES),
        default=os.environ.get(emulation.ENVIRONMENT_VARIABLE) or emulation.DEFAULT_ARCH,
        help=f"architecture (default: ${emulation.ENVIRONMENT_VARIABLE}, else {emulation.DEFAULT_ARCH})",
    )
    parser.add_argument("-m", dest="module", action="store_true", help="the program is a module name")
    parser.add_argument("program", help="path of the script, or name of the module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the program's own arguments")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Install the emulation, then run the program as ``__main__`` with its own ``sys.argv`` and ``sys.path``.

    Raises:
        SystemExit: wrong usage, or the emulation refuses; otherwise whatever the program raises.
    """
    options = _parse(sys.argv[1:] if arguments is None else arguments)
    try:
        emulation.install(options.arch)
    except emulation.EmulationError as error:
        raise SystemExit(f"te_fsdp.emulation: {error}") from error
    # Programs that read the environment (and processes that they start) find the same architecture.
    os.environ[emulation.ENVIRONMENT_VARIABLE] = options.arch
    sys.argv = [options.program, *options.arguments]
    if options.module:
        runpy.run_module(options.program, run_name="__main__", alter_sys=True)
        return
    if not os.path.exists(options.program):
        raise SystemExit(f"te_fsdp.emulation: no such file: {options.program}")
    # As `python script.py` does, put the script's own folder first.
    sys.path.insert(0, os.path.dirname(os.path.abspath(options.program)))
    runpy.run_path(options.program, run_name="__main__")


if __name__ == "__main__":
    main()
