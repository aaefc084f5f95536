"""Entry point of the command ``te-fsdp``.

Each command has its own file. This package alone parses arguments and imports heavy packages only when they are used.
Tables are printed for people, JSON for programs.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import json
import operator
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Annotated, Any

from te_fsdp.errors import TeFsdpError
from te_fsdp.version import VERSION

#: Command -> function in a file of this package (or functions by name), and its description.
_COMMANDS = {
    "ckpt": ("ckpt:COMMANDS", "work on checkpoints in one process: inspect, verify, diff, convert, export"),
    "env": ("env:show", "show this environment: versions, GPUs, patches, problems and fixes"),
    "plan": (
        "plan:show_plan",
        "estimate memory and traffic of a job, and find meshes that fit; needs no GPU",
    ),
    "report": ("plan:show_report", "show a saved plan, parameter by parameter"),
}

_USAGE = """usage: te-fsdp COMMAND ...
       te-fsdp completion bash|zsh
       te-fsdp --version

{commands}

See te-fsdp COMMAND --help. Exit codes: 0 success, 1 problem found, 2 wrong usage."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command given by the arguments (without the program name); ``None``: ``sys.argv``.

    Returns:
        Exit code: 0 for success, 1 if a problem was found, 2 for wrong usage, 141 if the reader of stdout has exited.
    """
    if arguments is None:
        # By default glibc keeps blocks that are as large as blocks freed before. DCP allocates small objects in
        # between, so a conversion would need new memory for every block. Not set in a process that imports te_fsdp.
        threshold = -3  # M_MMAP_THRESHOLD in malloc.h
        with contextlib.suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL(None).mallopt(threshold, 1 << 20)
    args = list(sys.argv[1:] if arguments is None else arguments)
    first, rest, code = args[0] if args else "", args[1:], 0
    try:
        if first in _COMMANDS:
            code = run(first, rest)
        elif first == "completion":
            code = completion(rest)
        elif first == "--version":
            print(f"te-fsdp {VERSION}")
        else:
            code = 0 if first in ("-h", "--help") else 2
            unknown = f"te-fsdp: unknown command {first!r}\n\n" if args and code else ""
            commands = "\n".join(f"  {name:10} {purpose}" for name, (_, purpose) in _COMMANDS.items())
            print(f"{unknown}{_USAGE.format(commands=commands)}", file=sys.stderr if code else sys.stdout)
        sys.stdout.flush()  # Python would print the error of a closed pipe at exit.
    except BrokenPipeError:
        # The reader of a pipe, such as head, has exited. Python flushes stdout once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # as for a process that SIGPIPE ends
    return code


class UsageError(Exception):
    """Raised if the command line is wrong (exit code 2)."""


def _command(name: str) -> Any:
    """Return the function of a command, or its functions by name."""
    file, _, attribute = _COMMANDS[name][0].partition(":")
    return getattr(importlib.import_module(f"te_fsdp.cli.{file}"), attribute)


def run(name: str, arguments: Sequence[str]) -> int:
    """Run a command. tyro generates its parser from the function's signature.

    Errors are printed on stderr, and with ``--json`` on stdout as well. The exit code is the command's own, 2 for
    wrong usage, 1 for an error of te_fsdp or of the system.
    """
    import tyro

    command = _command(name)
    options: Any = {"prog": f"te-fsdp {name}", "args": list(arguments)}
    options["config"] = (tyro.conf.FlagCreatePairsOff, tyro.conf.PositionalMetavarFromFieldName)
    try:
        if isinstance(command, dict):
            return tyro.extras.subcommand_cli_from_dict(command, **options, description=_COMMANDS[name][1])
        return tyro.cli(command, **options)
    except SystemExit as stop:  # --help, or an error that tyro has printed
        return stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 2
    except UsageError as error:
        return fail(arguments, str(error), 2)
    except BrokenPipeError:
        raise
    # includes a full disk, or a path that is not a directory
    except (TeFsdpError, OSError, ImportError) as error:
        return fail(arguments, str(error), 1)
    except KeyboardInterrupt:
        return fail(arguments, "interrupted", 130)
    except Exception as error:
        if name == "plan":  # the traceback includes the user's own function
            raise
        # An unforeseen error in a file. The text requests a report.
        text = f"unexpected {type(error).__name__}: {error}; please report it with this command"
        return fail(arguments, text, 1)


def fail(arguments: Sequence[str], text: str, code: int) -> int:
    """Print an error and return ``code``."""
    print(f"te-fsdp: error: {text}", file=sys.stderr)
    if "--json" in arguments:
        print_json({"ok": False, "error": text})
    return code


def completion(arguments: Sequence[str]) -> int:
    """Print the shell completion that tyro generates from one parser for all commands.

    The exit code is 0, or 2 if tyro does not support the shell.
    """
    import tyro

    if {"-h", "--help"} & {*arguments}:
        print("usage: te-fsdp completion bash|zsh\n\nprint the completion script of a shell")
        return 0
    if [*arguments] not in (["bash"], ["zsh"]):
        return fail(arguments, "completion: expected bash or zsh", 2)
    conf = tyro.conf
    config: Any = (conf.FlagCreatePairsOff, conf.PositionalMetavarFromFieldName)
    config += (conf.OmitArgPrefixes, conf.OmitSubcommandPrefixes)
    union = _one_of({name: _command(name) for name in _COMMANDS})
    with contextlib.suppress(SystemExit):
        tyro.cli(union, prog="te-fsdp", args=["--tyro-print-completion", arguments[0]], config=config)
    return 0


def _one_of(commands: Mapping[str, Any]) -> Any:
    """Return a union type for tyro with one member per command or group of commands."""
    import tyro

    choices = []
    for name, member in commands.items():

        def group(command: Any) -> None:
            """Group several commands."""

        if isinstance(member, dict):
            group.__annotations__["command"] = _one_of(member)
        function = group if isinstance(member, dict) else member
        choices.append(tyro.conf.subcommand(name, constructor=function))
    return functools.reduce(operator.or_, [Annotated[Any, choice] for choice in choices])


def print_json(value: Any) -> None:
    """Print one JSON document on stdout."""
    # Infinities and NaN, which JSON does not support, become text.
    finite = json.loads(json.dumps(value, default=str), parse_constant=lambda text: str(float(text)))
    print(json.dumps(finite, indent=1))


def print_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]], right: Sequence[str] = ()
) -> None:
    """Print a table on stdout. Columns named in ``right`` are right-aligned."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    for row in rows:
        # Names may contain brackets, which rich would parse as markup.
        table.add_row(*(Text(str(cell)) for cell in row))
    # Without a terminal, rich would assume 80 columns and wrap the names of parameters.
    console = Console(width=None if sys.stdout.isatty() else 200, highlight=False)
    with console.capture() as captured:  # rich itself would exit if the pipe is closed.
        console.print(table)
    sys.stdout.write(captured.get())


def bytes_of(text: str, unit: bool = False) -> int | None:
    """Return the bytes of a size such as ``80GiB``, ``5GB`` or ``1000``; ``None`` if it is not a size.

    ``unit``: return ``None`` for a number without a unit, too.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*((?:([kmgt])(i?))?b?)", text.strip().lower())
    if match is None or (unit and not match[2]):
        return None
    # Decimal, because the product with a binary fraction may be a byte short.
    return int(Decimal(match[1]) * (1024 if match[4] else 1000) ** " kmgt".index(match[3] or " "))


def human_bytes(count: int) -> str:
    """Format a number of bytes, such as ``"1.5 GB"`` for 1500000000."""
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"
