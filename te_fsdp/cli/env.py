"""``te-fsdp env``: versions, GPUs, what is replaced in other libraries, what is wrong and its cure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import tyro

from te_fsdp.cli.env_facts import Facts, gather
from te_fsdp.cli.env_faults import Fault, faults
from te_fsdp.cli.output import human_bytes, print_json, print_lines, print_table

__all__ = ["main"]


def main(arguments: Sequence[str]) -> int:
    """Run the command.

    Args:
        arguments: Those after ``env``.

    Returns:
        0: nothing is wrong that breaks te_fsdp; 1: something is; 2: the command line is wrong.
    """
    try:
        return tyro.cli(
            _env, prog="te-fsdp env", args=list(arguments), config=(tyro.conf.FlagCreatePairsOff,)
        )
    except SystemExit as stop:  # --help, or what tyro has already said
        return stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 2


def _env(
    *,
    as_json: Annotated[
        bool, tyro.conf.arg(name="json", help="One JSON document on stdout instead of text.")
    ] = False,
) -> int:
    """Versions, GPUs and their links, what te_fsdp replaces in other libraries, and a cure for each fault."""
    facts = gather()
    wrong = faults(facts)
    if as_json:
        document = dataclasses.asdict(facts)
        document |= {"faults": list(map(dataclasses.asdict, wrong)), "patches": list(_patches())}
        print_json(document | {"ok": not any(fault.breaks for fault in wrong)})
    else:
        _show(facts, wrong)
    return int(any(fault.breaks for fault in wrong))


def _patches() -> Iterable[dict[str, Any]]:
    """Rows of the two tables of patches, each with the library that it belongs to."""
    from te_fsdp import _fsdp2_patches, _te_patches

    for library, rows in (
        ("TransformerEngine", _te_patches.PATCHES.values()),
        ("torch", _fsdp2_patches.PATCHES),
    ):
        for row in rows:
            yield {"library": library, **dataclasses.asdict(row)}


def _show(facts: Facts, wrong: Sequence[Fault]) -> None:
    print_table("Versions", ("what", "version"), _versions(facts))
    if facts.gpus:
        rows = [
            (at, gpu.name, gpu.capability, human_bytes(gpu.memory), " ".join(gpu.links))
            for at, gpu in enumerate(facts.gpus)
        ]
        print_table("GPUs", ("number", "name", "capability", "memory", "links"), rows)
    if "recipes" in facts.te_says:
        shown = [(name, reason or "yes") for name, reason in facts.te_says["recipes"].items()]
        attention = facts.te_says["attention"]
        because = "; ".join(attention["reasons"][:-2]) or "nothing speaks against it"
        shown.append((f"attention: {attention['backend']}", because))
        where = "under emulation" if facts.te_says["emulated"] else "here"
        print_table(f"What TransformerEngine can do {where}", ("format", "available"), shown)
    if facts.variables:
        print_table("Variables that matter", ("name", "value"), sorted(facts.variables.items()))
    rows = [(row["library"], row["owner"], row["attribute"], row["why"]) for row in _patches()]
    title = "Replaced by te_fsdp, for its own models, from the first set_device_mesh or fully_shard on"
    print_table(title, ("in", "whose", "attribute", "what for"), [tuple(map(_plain, row)) for row in rows])
    for number, fault in enumerate(wrong, 1):
        kind = "Fault" if fault.breaks else "Note"
        print_lines([f"{kind} {number}: {fault.what}", f"  why:  {fault.why}", f"  cure: {fault.cure}"])
    if not wrong:
        print_lines(["Nothing is wrong."])


def _plain(text: str) -> str:
    """Without the marks of Markdown that the tables have for the docs."""
    return text.replace("`", "")


def _versions(facts: Facts) -> Iterable[tuple[str, str]]:
    yield "te_fsdp", facts.te_fsdp
    yield "Python", f"{facts.python} ({facts.executable})"
    build = f"built with CUDA {facts.torch_cuda}" if facts.torch_cuda else "without CUDA"
    yield "torch", f"{facts.torch}, {build}"
    for name, versions in facts.te.items():
        yield name, " and ".join(versions)
    if facts.te_says.get("emulated"):
        architecture = ".".join(map(str, facts.te_says["emulated"]))
        yield "emulation", "on" if facts.emulation else f"off; on with TE_FSDP_EMULATION={architecture}"
    for name, value in (
        ("NVIDIA driver", facts.driver),
        ("cuDNN", facts.cudnn),
        ("NCCL", facts.nccl),
        ("nvcc", facts.nvcc),
    ):
        yield name, value or "none"
    for name, version in facts.flash_attention.items():
        yield name, version
    yield "symmetric memory", "this torch has it" if facts.symmetric_memory else "not in this torch"
