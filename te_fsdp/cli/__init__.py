"""The command ``te-fsdp``: finds the command or group of commands, whose file has its arguments, and runs it.

Argument parsing lives in this package alone; nothing heavy is imported before it is used. What commands print: tables
are for people on a terminal or in a log, JSON is for machines.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import json
import math
import operator
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Annotated, Any

from te_fsdp.errors import TeFsdpError

#: Command -> its function in a file of this package, or its functions by name, and what it is for.
_COMMANDS = {
    "ckpt": ("ckpt:COMMANDS", "checkpoints in one process: inspect, verify, diff, convert, export"),
    "env": ("env:show", "this environment: versions, GPUs, patches in force, faults and their cures"),
    "plan": ("plan:show_plan", "a job on any number of GPUs: memory, traffic, meshes that fit; needs no GPU"),
    "report": ("plan:show_report", "show a saved plan, parameter by parameter"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command, of the arguments after the program's name; ``None``: the process's.

    Returns:
        Exit code: 0 all is well, 1 a problem was found, 2 the command line is wrong.
    """
    if arguments is None:
        _give_freed_memory_back()
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words and words[0] in _COMMANDS:
        return run(words[0], words[1:])
    if words[:1] == ["completion"]:
        return completion(words[1:])
    if words[:1] == ["--version"]:
        import te_fsdp

        print(f"te-fsdp {te_fsdp.__version__}")
        return 0
    asked = bool(words) and words[0] in ("-h", "--help")
    lines = [
        "usage: te-fsdp COMMAND ...",
        "       te-fsdp completion bash|zsh",
        "       te-fsdp --version",
        "",
    ]
    lines += [f"  {name:10} {purpose}" for name, (_, purpose) in _COMMANDS.items()]
    lines += ["", "te-fsdp COMMAND --help tells more. Exit codes: 0 good, 1 problem found, 2 wrong usage."]
    if words and not asked:
        lines = [f"te-fsdp: no command {words[0]!r}", "", *lines]
    print("\n".join(lines), file=sys.stdout if asked else sys.stderr)
    return 0 if asked else 2


class UsageError(Exception):
    """The command line is wrong; exit code 2."""


def _command(name: str) -> Any:
    """The function of a command, or its functions by name."""
    file, _, attribute = _COMMANDS[name][0].partition(":")
    return getattr(importlib.import_module(f"te_fsdp.cli.{file}"), attribute)


def run(name: str, arguments: Sequence[str]) -> int:
    """Run one of the commands; tyro makes its parser of the function's signature.

    What goes wrong is said on stderr, and as JSON on stdout where that is asked for.

    Returns:
        Exit code: the command's, 2 for a wrong command line, 1 for what te_fsdp or the system refuses.
    """
    import tyro

    command = _command(name)
    options: Any = {"prog": f"te-fsdp {name}", "args": list(arguments)}
    options["config"] = (tyro.conf.FlagCreatePairsOff, tyro.conf.PositionalMetavarFromFieldName)
    try:
        if isinstance(command, dict):
            return tyro.extras.subcommand_cli_from_dict(command, **options, description=_COMMANDS[name][1])
        return tyro.cli(command, **options)
    except SystemExit as stop:  # --help, or what tyro has already said
        return stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 2
    except UsageError as error:
        return fail(arguments, str(error), 2)
    except (TeFsdpError, OSError, ImportError) as error:  # also a full disk, or a path that is no directory
        return fail(arguments, str(error), 1)
    except KeyboardInterrupt:
        return fail(arguments, "interrupted", 130)
    except Exception as error:
        if name == "plan":  # its traceback tells of the user's own function
            raise
        # A file that no check knows: the text says what to report.
        text = f"unexpected {type(error).__name__}: {error}; please report it with this command"
        return fail(arguments, text, 1)


def fail(arguments: Sequence[str], text: str, code: int) -> int:
    """Say what is wrong; gives ``code`` back."""
    print(f"te-fsdp: error: {text}", file=sys.stderr)
    if "--json" in arguments:
        print_json({"ok": False, "error": text})
    return code


def completion(arguments: Sequence[str]) -> int:
    """Run ``te-fsdp completion SHELL``: print what the shell needs, as tyro makes it of one parser for all commands.

    Returns:
        Exit code: 0, or 2 where the shell is none that tyro knows.
    """
    import tyro

    if [*arguments] not in (["bash"], ["zsh"]):
        return fail(arguments, "completion: expected bash or zsh", 2)
    conf = tyro.conf
    config = (
        conf.FlagCreatePairsOff,
        conf.PositionalMetavarFromFieldName,
        conf.OmitArgPrefixes,
        conf.OmitSubcommandPrefixes,
    )
    every, asked = _one_of({name: _command(name) for name in _COMMANDS}), "--tyro-print-completion"
    with contextlib.suppress(SystemExit):
        tyro.cli(every, prog="te-fsdp", args=[asked, arguments[0]], config=config)
    return 0


def _one_of(commands: Mapping[str, Any]) -> Any:
    """A type for tyro that stands for one of some commands, or groups of commands."""
    import tyro

    choices = []
    for name, found in commands.items():

        def group(command: Any) -> None:
            """Several commands."""

        if isinstance(found, dict):
            group.__annotations__["command"] = _one_of(found)
        function = group if isinstance(found, dict) else found
        choices.append(tyro.conf.subcommand(name, constructor=function))
    return functools.reduce(operator.or_, [Annotated[Any, choice] for choice in choices])


def _give_freed_memory_back() -> None:
    """Have the C library return each large block when it is freed. For a process that is ours alone.

    glibc begins to keep blocks as large as those that were freed once. With the small objects that DCP keeps in
    between, a conversion would then take new memory for every block that is computed.
    """
    threshold = -3  # M_MMAP_THRESHOLD in malloc.h
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(threshold, 1 << 20)


def print_json(value: Any) -> None:
    """One JSON document on stdout."""
    json.dump(_finite(value), sys.stdout, indent=1, allow_nan=False, default=str)
    sys.stdout.write("\n")


def _finite(value: Any) -> Any:
    """Infinities and NaN, which JSON lacks, as text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


def print_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]], right: Sequence[str] = ()
) -> None:
    """A table on stdout; ``right`` are headings of columns that are aligned to the right."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    for row in rows:
        # Text: names may hold brackets, which rich would take for markup.
        table.add_row(*(Text(str(cell)) for cell in row))
    # In a pipe rich would assume 80 columns, and fold the names of parameters.
    Console(width=None if sys.stdout.isatty() else 200, highlight=False).print(table)


def print_lines(lines: Iterable[str]) -> None:
    """Plain lines on stdout."""
    for line in lines:
        print(line)


def bytes_of(text: str, unit: bool = False) -> int | None:
    """Return the bytes of a size such as ``80GiB``, ``5GB`` or ``1000``; ``None`` if it is not a size.

    ``unit``: return ``None`` for a number without a unit, too.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*((?:([kmgt])(i?))?b?)", text.strip().lower())
    if match is None or (unit and not match[2]):
        return None
    return int(Decimal(match[1]) * (1024 if match[4] else 1000) ** " kmgt".index(match[3] or " "))


def human_bytes(count: int) -> str:
    """``"1.5 GB"`` of 1500000000."""
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"
