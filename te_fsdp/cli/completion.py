"""``te-fsdp completion``: what a shell needs to complete all commands, as tyro makes it of one parser for all."""

from __future__ import annotations

import contextlib
import functools
import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import tyro

from te_fsdp.cli import ckpt, env, plan


def main(arguments: Sequence[str]) -> int:
    """Run ``te-fsdp completion SHELL``: print tyro's completion of all commands.

    Args:
        arguments: The shell's name.

    Returns:
        Exit code: 0, or 2 where the shell is none that tyro knows.
    """
    shells = ("bash", "zsh")
    if len(arguments) != 1 or arguments[0] not in shells:
        print(
            f"usage: te-fsdp completion {'|'.join(shells)}    (expected {' or '.join(shells)})",
            file=sys.stderr,
        )
        return 2

    def checkpoints(command: Any) -> None:
        """Checkpoints."""

    checkpoints.__annotations__["command"] = _one_of(ckpt.COMMANDS)
    every: Any = _one_of({"ckpt": checkpoints, "env": env.show, **plan.COMMANDS})
    config = (
        tyro.conf.FlagCreatePairsOff,
        tyro.conf.PositionalMetavarFromFieldName,
        tyro.conf.OmitArgPrefixes,
        tyro.conf.OmitSubcommandPrefixes,
    )
    with contextlib.suppress(SystemExit):
        tyro.cli(every, prog="te-fsdp", args=["--tyro-print-completion", arguments[0]], config=config)
    return 0


def _one_of(commands: Mapping[str, Callable[..., Any]]) -> Any:
    """A type for tyro that stands for one of some commands."""
    choices = []
    for name, function in commands.items():
        one = tyro.conf.subcommand(name, constructor=function)
        choices.append(Annotated[Any, one])
    return functools.reduce(operator.or_, choices)
