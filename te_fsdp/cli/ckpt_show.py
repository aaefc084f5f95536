"""``te-fsdp ckpt inspect``, ``verify`` and ``diff``: commands that write nothing."""

from __future__ import annotations

import datetime
import fnmatch
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional, arg

from te_fsdp.checkpoint.background import bytes_bar
from te_fsdp.checkpoint.contents import CHECKPOINT, Choices, Contents
from te_fsdp.checkpoint.entries import decode
from te_fsdp.checkpoint.manifest import check_files, read_manifest
from te_fsdp.checkpoint.portable.convert import compare_contents, open_any, resolve
from te_fsdp.checkpoint.source import problems_of
from te_fsdp.cli.main import UsageError, human_bytes, print_json, print_lines, print_table
from te_fsdp.errors import CheckpointError
from te_fsdp.modules.semantics import folded

Json = Annotated[bool, arg(name="json", help="One JSON document on stdout instead of text.")]
Key = Annotated[
    str | None, arg(help="Where in a nested torch.save file the model's state dict is, dots between keys.")
]


def show_bar(as_json: bool) -> bool:
    """Whether somebody would see a progress bar."""
    return sys.stderr.isatty() and not as_json


def check_good(contents: Contents, as_json: bool) -> None:
    """Compare a checkpoint's files with their checksums; what else is read is compared as it is read, if it has any.

    Raises:
        CheckpointError: Damaged files.
    """
    if contents.kind != CHECKPOINT:
        return
    manifest, path = contents.manifest, contents.source
    total = sum(listed[0] for listed in manifest.files.values())
    with bytes_bar(f"verifying {path.name}", total, show_bar(as_json)) as tick:
        problems = check_files(path, manifest, sorted(manifest.files), checksums=True, tick=tick)
    if problems:
        raise CheckpointError(
            f"{path}: damaged checkpoint: {'; '.join(problems)}",
            why="Nothing was written",
            fix="take an earlier one, or copy this one again",
        )


# --- inspect


def inspect(
    path: Positional[Path],
    /,
    *,
    filter: Annotated[str, arg(help="Show names that match this pattern only, such as '*.mlp.*'.")] = "*",
    key: Key = None,
    as_json: Json = False,
) -> int:
    """Show what a checkpoint holds: parameters, buffers, optimizer state, extra, meshes, versions, bytes.

    The path is a checkpoint, a folder of checkpoints (the newest is taken), safetensors, a torch.save file, or a
    plain DCP directory.
    """
    contents = open_any(path, Choices(key=key))
    summary = _summary(contents, filter)
    if as_json:
        print_json(summary)
    else:
        _print_summary(summary, filter)
    return 0


def _summary(contents: Contents, pattern: str) -> dict[str, Any]:
    manifest = contents.manifest
    groups = ("model", "optimizer", "delayed", "extra")
    sizes = {g: sum(t.bytes for k, t in contents.tensors.items() if k.startswith(f"{g}.")) for g in groups}
    sizes["extra"] = sum(t.bytes for k, t in contents.tensors.items() if k.startswith("extra"))
    sizes |= {"total": contents.bytes, "files": sum(listed[0] for listed in manifest.files.values())}
    return {
        "ok": True,
        "path": str(contents.source),
        "kind": contents.kind,
        "step": manifest.extra.get("step"),
        "saved_at": manifest.saved_at if contents.kind == CHECKPOINT else None,
        "versions": manifest.versions if contents.kind == CHECKPOINT else {},
        "mesh": manifest.mesh if contents.kind == CHECKPOINT else {},
        "parameters": [_parameter(contents, n) for n in manifest.parameters if fnmatch.fnmatch(n, pattern)],
        "buffers": [_parameter(contents, n) for n in manifest.buffers if fnmatch.fnmatch(n, pattern)],
        "optimizer": _optimizer(contents),
        "delayed": manifest.delayed,
        "semantics": manifest.semantics,
        "extra": manifest.extra,
        "bytes": sizes,
        "notes": contents.notes,
    }


def _parameter(contents: Contents, name: str) -> dict[str, Any]:
    described = contents.manifest.parameters.get(name) or contents.manifest.buffers[name]
    parts = contents.components(name)
    stored = [contents.tensors[f"model.{name}"]] if parts is None else list(parts.values())
    return {
        "name": name,
        "shape": described["shape"],
        "dtype": described["dtype"],
        "format": described.get("format"),
        "layout": described.get("layout"),
        "components": sorted(parts) if parts is not None else None,
        "bytes": sum(tensor.bytes for tensor in stored),
    }


def _optimizer(contents: Contents) -> dict[str, Any] | None:
    described = contents.manifest.optimizer
    if described is None:
        return None
    kinds: dict[tuple[str, str], dict[str, Any]] = {}
    for name, states in described["state"].items():
        for key, value in states.items():
            tensor = contents.tensors.get(f"optimizer.state.{name}.{key}")
            kind = kinds.setdefault((key, value.get("dtype", "plain")), {"tensors": 0, "bytes": 0})
            kind["tensors"] += 1
            kind["bytes"] += tensor.bytes if tensor is not None else 0
    return {
        "class": described["class"],
        "groups": [
            {"parameters": len(g["parameters"]), "options": decode(g["options"], {})}
            for g in described["groups"]
        ],
        "states": [{"name": k, "dtype": d, **counted} for (k, d), counted in kinds.items()],
    }


def _print_summary(summary: dict[str, Any], pattern: str) -> None:
    print_lines(_heading(summary))
    rows = []
    for kind in ("parameters", "buffers"):
        for item in summary[kind]:
            form = item["format"] or item["dtype"]
            form += f" ({item['dtype']})" if item["format"] else ""
            layout = item["layout"] or ("buffer" if kind == "buffers" else "-")
            rows.append((item["name"], _shape(item["shape"]), form, layout, human_bytes(item["bytes"])))
    title = f"{len(rows)} tensors of the model" + (f" that match {pattern}" if pattern != "*" else "")
    print_table(title, ("name", "shape", "format", "layout", "bytes"), rows, right=("bytes",))
    optimizer = summary["optimizer"]
    if optimizer is not None:
        states = [(s["name"], s["dtype"], s["tensors"], human_bytes(s["bytes"])) for s in optimizer["states"]]
        title = f"optimizer {optimizer['class']}"
        print_table(title, ("state", "dtype", "tensors", "bytes"), states, right=("tensors", "bytes"))
        for n, group in enumerate(optimizer["groups"]):
            options = ", ".join(f"{k}={v}" for k, v in group["options"].items())
            print_lines([f"  group {n}: {group['parameters']} parameters, {options}"])
    if summary["delayed"]:
        names = list(summary["delayed"])
        print_lines([f"delayed-scaling state: {len(names)} modules, {', '.join(names[:3])}"])
    if summary["semantics"]:
        print_lines(_semantics(summary["semantics"], pattern))
    if summary["extra"]:
        print_lines(["extra:", *(f"  {k}: {_short(v)}" for k, v in summary["extra"].items())])
    sizes = {kind: count for kind, count in summary["bytes"].items() if count}
    print_lines(["bytes: " + ", ".join(f"{kind} {human_bytes(count)}" for kind, count in sizes.items())])
    print_lines(f"note: {note}" for note in summary["notes"])


def _semantics(recorded: dict[str, Any], pattern: str) -> list[str]:
    """What modules compute, a line for each that is not like another."""
    modules: dict[int, list[str]] = {}
    for name, index in recorded["modules"].items():
        if recorded["kinds"][index]["settings"] and fnmatch.fnmatch(name, pattern):
            modules.setdefault(index, []).append(name)
    lines = [f"settings of {sum(map(len, modules.values()))} modules:"] if modules else []
    for index, names in modules.items():
        one = recorded["kinds"][index]
        values = ", ".join(f"{setting}={value}" for setting, value in one["settings"].items())
        lines.append(f"  {one['library']}.{one['kind']} ({folded(names)}): {values}")
    return lines


def _heading(summary: dict[str, Any]) -> list[str]:
    lines = [f"{summary['path']}: {summary['kind']}"]
    if summary["saved_at"] is not None:
        when = datetime.datetime.fromtimestamp(summary["saved_at"] / 1e9, datetime.timezone.utc)
        lines.append(
            f"saved {when:%Y-%m-%d %H:%M:%S} UTC on {_pairs(summary['mesh'])} by {_pairs(summary['versions'])}"
        )
    if summary["step"] is not None:
        lines.append(f"step {_short(summary['step'])}")
    return lines


def _pairs(values: dict[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in values.items())


def _shape(shape: list[int]) -> str:
    return " x ".join(map(str, shape)) or "scalar"


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 100 else text[:97] + "..."


# --- verify


def verify(path: Positional[Path], /, *, as_json: Json = False) -> int:
    """Check every byte of a checkpoint against its checksums, and its manifest against DCP's metadata."""
    where, kind = resolve(path)
    if kind != CHECKPOINT:
        raise CheckpointError(
            f"{where}: no checksums to verify",
            expected="a checkpoint of te_fsdp",
            got=kind,
            fix="convert it to a checkpoint, or compare it with another copy: te-fsdp ckpt diff",
        )
    files = read_manifest(where).files
    total = sum(listed[0] for listed in files.values())
    with bytes_bar(f"verifying {where.name}", total, show_bar(as_json)) as tick:
        problems = problems_of(where, tick)
    if as_json:
        print_json(
            {
                "ok": not problems,
                "path": str(where),
                "files": len(files),
                "bytes": total,
                "problems": problems,
            }
        )
    elif problems:
        print_lines([f"{where}: damaged", *(f"  {problem}" for problem in problems)])
    else:
        print_lines([f"{where}: good, {len(files)} files, {human_bytes(total)}"])
    return 1 if problems else 0


# --- diff


def diff(
    a: Positional[Path],
    b: Positional[Path],
    /,
    *,
    rtol: Annotated[float, arg(help="Relative tolerance.")] = 0.0,
    atol: Annotated[float, arg(help="Absolute tolerance.")] = 0.0,
    weights_only: Annotated[bool, arg(help="Leave optimizer, delayed-scaling state and extra.")] = False,
    strict: Annotated[bool, arg(help="Other dtypes and formats count as differences.")] = False,
    as_json: Json = False,
) -> int:
    """Compare two checkpoints by logical value, whatever mesh, format or kind of file; exit code 1 if they differ.

    Quantized weights are compared by the values that they stand for.
    """
    if not (rtol >= 0 and atol >= 0):
        raise UsageError(f"--rtol {rtol:g} --atol {atol:g}: expected 0 or more")
    one, other = open_any(a), open_any(b)
    for contents in (one, other):
        check_good(contents, as_json)
    with bytes_bar("comparing", one.bytes, show_bar(as_json)) as tick:
        report = compare_contents(one, other, tick, rtol=rtol, atol=atol, weights_only=weights_only)
    same = report.is_same(strict=strict)
    if as_json:
        answer = {"ok": True, "same": same, "a": str(one.source), "b": str(other.source), **asdict(report)}
        print_json(answer)
        return 0 if same else 1
    rows = [(d.name, d.kind, d.detail) for d in report.differences]
    if rows:
        print_table(f"A {one.source}\nB {other.source}", ("name", "difference", "A / B"), rows)
    print_lines(report.others)
    verdict = "the same" if same else "different"
    print_lines(
        [f"{verdict}: {report.equal} of {report.compared} tensors equal within rtol {rtol:g}, atol {atol:g}"]
    )
    return 0 if same else 1
