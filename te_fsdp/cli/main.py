"""Entry point of ``te-fsdp``: finds the command or group of commands, which parses its own arguments."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import sys
from collections.abc import Sequence

__all__ = ["main"]

#: Command, or group of commands -> its module (with ``main(arguments) -> exit code``) and what it is for.
_GROUPS = {
    "ckpt": ("te_fsdp.cli.ckpt", "checkpoints: inspect, verify, diff, convert, export"),
    "env": ("te_fsdp.cli.env", "this environment: versions, GPUs, patches in force, faults and their cures"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: Those after the program's name; ``None``: the process's.

    Returns:
        Exit code: 0 all is well, 1 a problem was found, 2 the command line is wrong.
    """
    if arguments is None:
        _give_freed_memory_back()
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words and words[0] in _GROUPS:
        return importlib.import_module(_GROUPS[words[0]][0]).main(words[1:])
    if words[:1] == ["--version"]:
        import te_fsdp

        print(f"te-fsdp {te_fsdp.__version__}")
        return 0
    asked = bool(words) and words[0] in ("-h", "--help")
    lines = ["usage: te-fsdp COMMAND ...", "       te-fsdp --version", ""]
    lines += [f"  {name:8} {purpose}" for name, (_, purpose) in _GROUPS.items()]
    lines += [
        "",
        "te-fsdp COMMAND --help tells more. Exit codes: 0 good, 1 problem found, 2 wrong usage.",
    ]
    if words and not asked:
        lines = [f"te-fsdp: no command {words[0]!r}", "", *lines]
    print("\n".join(lines), file=sys.stdout if asked else sys.stderr)
    return 0 if asked else 2


def _give_freed_memory_back() -> None:
    """Have the C library return each large block when it is freed. For a process that is ours alone.

    glibc begins to keep blocks as large as those that were freed once. With the small objects that DCP keeps in
    between, a conversion would then take new memory for every block that is computed.
    """
    threshold = -3  # M_MMAP_THRESHOLD in malloc.h
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(threshold, 1 << 20)
