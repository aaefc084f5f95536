"""``te-fsdp ckpt``: arguments of its commands, and what goes wrong as text and exit code."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from tyro.conf import Positional, arg

from te_fsdp.cli import ckpt_convert, ckpt_show
from te_fsdp.cli.output import print_json
from te_fsdp.errors import TeFsdpError

__all__ = ["main"]

_Json = Annotated[bool, arg(name="json", help="One JSON document on stdout instead of text.")]
_Force = Annotated[bool, arg(help="Replace what lies at the target; it stays until the new one is whole.")]
_Size = Annotated[
    str, arg(help="Largest safetensors file, such as 5GB or 500MiB; more go into shards with an index.")
]
_Key = Annotated[
    str | None, arg(help="Where in a nested torch.save file the model's state dict is, dots between keys.")
]
_Optimizer = Annotated[
    str | None, arg(help="Class of the optimizer in a torch.save file, if its options do not tell it.")
]
_ExtraState = Annotated[
    Literal["read", "drop"],
    arg(help="TransformerEngine's _extra_state: read its delayed-scaling state, or drop it."),
]
_DType = Literal["float32", "bfloat16", "float16"]
_AS_USUAL = ckpt_convert.Model()


def inspect(
    path: Positional[Path],
    /,
    *,
    filter: Annotated[str, arg(help="Show names that match this pattern only, such as '*.mlp.*'.")] = "*",
    key: _Key = None,
    as_json: _Json = False,
) -> int:
    """Show what a checkpoint holds: parameters, buffers, optimizer state, extra, meshes, versions, bytes.

    The path is a checkpoint, a folder of checkpoints (the newest is taken), safetensors, a torch.save file, or a
    plain DCP directory.
    """
    return ckpt_show.inspect(path, pattern=filter, key=key, as_json=as_json)


def verify(path: Positional[Path], /, *, as_json: _Json = False) -> int:
    """Check every byte of a checkpoint against its checksums, and its manifest against DCP's metadata."""
    return ckpt_show.verify(path, as_json=as_json)


def diff(
    a: Positional[Path],
    b: Positional[Path],
    /,
    *,
    rtol: Annotated[float, arg(help="Relative tolerance.")] = 0.0,
    atol: Annotated[float, arg(help="Absolute tolerance.")] = 0.0,
    weights_only: Annotated[bool, arg(help="Leave optimizer, delayed-scaling state and extra.")] = False,
    strict: Annotated[bool, arg(help="Other dtypes and formats count as differences.")] = False,
    as_json: _Json = False,
) -> int:
    """Compare two checkpoints by logical value, whatever mesh, format or kind of file; exit code 1 if they differ.

    Quantized weights are compared by the values that they stand for.
    """
    return ckpt_show.diff(
        a, b, rtol=rtol, atol=atol, weights_only=weights_only, strict=strict, as_json=as_json
    )


def convert(
    source: Positional[Path],
    target: Positional[Path],
    /,
    *,
    to: Annotated[
        Literal["checkpoint", "safetensors", "torch"] | None,
        arg(help="Kind of the target; told by .safetensors, .pt, .pth, .bin or .ckpt."),
    ] = None,
    everything: Annotated[
        bool,
        arg(help="Optimizer, extra and delayed-scaling state into safetensors and torch.save files too."),
    ] = False,
    dtype: Annotated[_DType | None, arg(help="Of floating-point parameters in high precision.")] = None,
    quantized: Annotated[
        Literal["keep", "dequantize"] | None,
        arg(help="Quantized weights: keep their components (default into a checkpoint) or dequantize."),
    ] = None,
    max_shard_size: _Size = "5GB",
    key: _Key = None,
    optimizer_class: _Optimizer = None,
    extra_state: _ExtraState = "read",
    check: Annotated[
        Literal["checksums", "sizes"], arg(help="What of a source checkpoint's files is compared before.")
    ] = "checksums",
    from_: Annotated[
        Literal["huggingface"] | None,
        arg(name="from", help="The source is a Hugging Face model's folder, for a model as --te says."),
    ] = None,
    te: ckpt_convert.Model = _AS_USUAL,
    force: _Force = False,
    as_json: _Json = False,
) -> int:
    """Convert between checkpoints of te_fsdp, safetensors, torch.save files and, as sources, plain DCP directories.

    Canonical names and rows: what the unsharded module's state_dict() holds. --from huggingface: the weights of a
    Hugging Face model onto the names of one built of te.TransformerLayer.
    """
    if from_ is None and te.is_described:
        raise UsageError("--te... describes the model for --from huggingface, which is not given")
    return ckpt_convert.convert(
        source,
        ckpt_convert.Target(target, to, _bytes(max_shard_size), force),
        ckpt_convert.choices(key, optimizer_class, extra_state),
        everything=everything,
        dtype=dtype,
        quantized=quantized,
        checksums=check == "checksums",
        as_json=as_json,
        model=None if from_ is None else te,
    )


def export(
    source: Positional[Path],
    target: Positional[Path],
    /,
    *,
    dtype: Annotated[
        _DType, arg(help="Of floating-point parameters; buffers stay as they are.")
    ] = "bfloat16",
    weights: Annotated[
        Literal["auto", "main", "compute"],
        arg(help="The optimizer's main weights where there are any (auto, main) or never (compute)."),
    ] = "auto",
    max_shard_size: _Size = "5GB",
    check: Annotated[
        Literal["checksums", "sizes"], arg(help="What of a source checkpoint's files is compared before.")
    ] = "checksums",
    like: Annotated[
        Path | None,
        arg(help="Write a Hugging Face model's folder: names, config.json and tokenizer as in this one."),
    ] = None,
    te: ckpt_convert.Model = _AS_USUAL,
    force: _Force = False,
    as_json: _Json = False,
) -> int:
    """Write consolidated weights in one dtype, for inference: from main weights, else dequantized, and say which.

    A folder of safetensors, a .safetensors file, or a torch.save file (.pt, .pth, .bin, .ckpt). --like: a Hugging
    Face model.
    """
    if like is None and te.is_described:
        raise UsageError("--te... describes the model whose weights --like makes a Hugging Face model's")
    place = ckpt_convert.Target(target, None, _bytes(max_shard_size), force, like)
    return ckpt_convert.export(
        source, place, dtype=dtype, weights=weights, checksums=check == "checksums", as_json=as_json, model=te
    )


_COMMANDS: dict[str, Callable[..., int]] = {
    "inspect": inspect,
    "verify": verify,
    "diff": diff,
    "convert": convert,
    "export": export,
}
_UNITS = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
    "ti": 2**40,
}


class UsageError(Exception):
    """The command line is wrong; exit code 2."""


def _bytes(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?", text.strip().lower())
    if found is None or found.group(2) not in _UNITS or not float(found.group(1)):
        raise UsageError(f"--max-shard-size {text}: expected a size such as 5GB or 500MiB")
    return int(float(found.group(1)) * _UNITS[found.group(2)])


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
    except (UsageError, ckpt_convert.UsageError) as error:
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
