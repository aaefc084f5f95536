"""``te-fsdp ckpt``: its commands, and what goes wrong as text and exit code."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import tyro

from te_fsdp.cli import ckpt_convert, ckpt_show
from te_fsdp.cli.main import print_json
from te_fsdp.errors import TeFsdpError

__all__ = ["main"]

_COMMANDS: dict[str, Callable[..., int]] = {
    "inspect": ckpt_show.inspect,
    "verify": ckpt_show.verify,
    "diff": ckpt_show.diff,
    "convert": ckpt_convert.convert,
    "export": ckpt_convert.export,
}


def main(arguments: Sequence[str]) -> int:
    """Run ``te-fsdp ckpt`` with the arguments after it; returns the exit code."""
    try:
        return tyro.extras.subcommand_cli_from_dict(
            _COMMANDS,
            prog="te-fsdp ckpt",
            description="Checkpoints in one process: no model, no GPU, a block of a tensor at a time.",
            args=list(arguments),
            config=(tyro.conf.FlagCreatePairsOff, tyro.conf.PositionalMetavarFromFieldName),
        )
    except SystemExit as stop:  # --help, or what tyro has already said
        return stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 2
    except ckpt_convert.UsageError as error:
        return _fail(arguments, str(error), 2)
    except (TeFsdpError, OSError) as error:  # also a full disk, or a path that is no directory
        return _fail(arguments, str(error), 1)
    except KeyboardInterrupt:
        return _fail(arguments, "interrupted", 130)
    except Exception as error:  # a file that no check knows: the text says what to report
        return _fail(
            arguments, f"unexpected {type(error).__name__}: {error}; please report it with this command", 1
        )


def _fail(arguments: Sequence[str], text: str, code: int) -> int:
    print(f"te-fsdp: error: {text}", file=sys.stderr)
    if "--json" in arguments:
        answer: dict[str, Any] = {"ok": False, "error": text}
        print_json(answer)
    return code
