"""``te-fsdp env``: versions, GPUs, what is replaced in other libraries, what is wrong and its cure.

:mod:`te_fsdp.cli.env_facts` looks, :func:`faults` judges what it has seen.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Annotated, Any

import tyro

from te_fsdp import versions
from te_fsdp.cli import human_bytes, print_json, print_lines, print_table
from te_fsdp.cli.env_facts import Facts, gather


def show(
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
        document |= {"faults": list(map(dataclasses.asdict, wrong)), "patches": list(_rows_of_patches())}
        print_json(document | {"ok": not any(fault.breaks for fault in wrong)})
    else:
        _show(facts, wrong)
    return int(any(fault.breaks for fault in wrong))


def _rows_of_patches() -> Iterable[dict[str, Any]]:
    """Rows of the two tables of patches, each with the library that it belongs to."""
    from te_fsdp.upstream import patches as _patches

    for library, rows in (("TransformerEngine", _patches.PATCHES.values()), ("torch", _patches.FSDP2)):
        yield from ({"library": library, **dataclasses.asdict(row)} for row in rows)


def _show(facts: Facts, wrong: Sequence[Fault]) -> None:
    print_table("Versions", ("what", "version"), _versions(facts))
    if facts.gpus:
        gpus = [
            (gpu.name, gpu.capability, human_bytes(gpu.memory), " ".join(gpu.links)) for gpu in facts.gpus
        ]
        rows = [(number, *gpu) for number, gpu in enumerate(gpus)]
        print_table("GPUs", ("number", "name", "capability", "memory", "links"), rows)
    if "recipes" in facts.te_says:
        shown = [(name, reason or "yes") for name, reason in facts.te_says["recipes"].items()]
        where = "emulated" if facts.te_says["emulated"] else "this machine"
        print_table(f"Supported formats ({where})", ("format", "available"), shown)
        _show_attention(facts)
    if facts.variables:
        print_table("Variables that matter", ("name", "value"), sorted(facts.variables.items()))
    rows = [(row["library"], row["owner"], row["attribute"], row["why"]) for row in _rows_of_patches()]
    title = "Replaced by te_fsdp, for its own models, from the first set_device_mesh or fully_shard on"
    # Without the marks of Markdown that the tables have for the docs.
    plain = [tuple(text.replace("`", "") for text in row) for row in rows]
    print_table(title, ("in", "whose", "attribute", "what for"), plain)
    for number, fault in enumerate(wrong, 1):
        kind = "Fault" if fault.breaks else "Note"
        print_lines([f"{kind} {number}: {fault.what}", f"  why:  {fault.why}", f"  cure: {fault.cure}"])
    print_lines([] if wrong else ["No problems found."])


#: Backends of attention: what TE calls them when it says why not.
_BACKENDS = {"flash": "FlashAttention", "fused": "FusedAttention", "unfused": "UnfusedDotProductAttention"}


def _show_attention(facts: Facts) -> None:
    """Which backend TE takes, for a layer of Llama-3-8B, and why not the others, in TE's words."""
    attention = facts.te_says["attention"]
    if facts.te_says["emulated"]:
        text = (
            "Attention: unfused, which is all that the emulation has. On a GPU TransformerEngine takes its fused "
            "kernels (cuDNN) or those of flash-attn where it can; te-fsdp env says there which, and why."
        )
        print_lines([text])
        return
    rows = []
    for name, called in _BACKENDS.items():
        against = [text for text in attention["reasons"] if re.match(f"Disabling {called}", text)]
        if name == attention["backend"]:
            against = ["taken"]
        elif not against and name == "flash" and not facts.flash_attention:
            against = ["flash-attn is not installed (the extra flash)"]
        rows.append((name, "; ".join(map(str.strip, against)) or "not taken: another comes first"))
    if attention["backend"] not in _BACKENDS:  # "none", "unknown": all that was said
        rows.append((attention["backend"], "; ".join(attention["reasons"])))
    shape = ", ".join(f"{name} {size}" for name, size in attention.get("shape", {}).items())
    print_table(f"Attention in bf16, causal, {shape}", ("backend", "taken, or why not"), rows)


def _versions(facts: Facts) -> Iterable[tuple[str, str]]:
    yield "te_fsdp", facts.te_fsdp
    yield "Python", f"{facts.python} ({facts.executable})"
    build = f"built with CUDA {facts.torch_cuda}" if facts.torch_cuda else "without CUDA"
    yield "torch", f"{facts.torch}, {build}"
    for name, found in facts.te.items():
        yield name, " and ".join(found)
    if facts.te_says.get("emulated"):
        architecture = ".".join(map(str, facts.te_says["emulated"]))
        yield "emulation", "on" if facts.emulation else f"off; on with TE_FSDP_EMULATION={architecture}"
    yield "NVIDIA driver", facts.driver or "none"
    yield "cuDNN", facts.cudnn or "none"
    yield "NCCL", facts.nccl or "none"
    yield "nvcc", facts.nvcc or "none"
    yield from facts.flash_attention.items()
    yield "symmetric memory", "this torch has it" if facts.symmetric_memory else "not in this torch"
    copies = f"possible between all {len(facts.gpus)} GPUs"
    if not facts.symmetric_memory or len(facts.gpus) < 2:
        copies = "no: needs symmetric memory and two GPUs"
    elif facts.apart:
        copies = f"no: GPUs {facts.apart} cannot address the memory of all others"
    yield "transport copy_engine", copies


_EXTRAS = {"13": "gpu", "12": "gpu-cu12"}


@dataclass(frozen=True)
class Fault:
    """Something that will not work, or not as meant."""

    what: str  #: The finding, with its numbers
    why: str  #: What comes of it
    cure: str  #: What to do, a command where there is one
    breaks: bool = True  #: False: te_fsdp works, but slower or with less than the machine has


def faults(facts: Facts) -> list[Fault]:
    """Everything that is wrong, what breaks first."""
    looks = (_wrong_versions, _parts_of_te, _builds, _te_itself, _cudnn, _unused_attention)
    return sorted((fault for look in looks for fault in look(facts)), key=lambda fault: not fault.breaks)


def _wrong_versions(facts: Facts) -> Iterator[Fault]:
    te = facts.te.get("transformer_engine", [""])[0]
    for name, package, version, tested in (
        ("Python", "", facts.python, versions.PYTHON),
        ("torch", "torch", facts.torch, versions.TORCH),
        ("TransformerEngine", "transformer-engine", te, versions.TRANSFORMER_ENGINE),
    ):
        low = "{}.{}".format(*tested.first)
        release = versions.release_of(version)
        if version and not tested.first <= release:
            yield Fault(
                f"{name} {version} is older than what te_fsdp supports ({tested})",
                "te_fsdp uses private names that older versions do not have",
                f"pip install '{package}>={low}'" if package else f"make an environment with Python {tested}",
            )
        elif version and release > tested.last:
            yield Fault(
                f"{name} {version} is newer than what te_fsdp was tested with ({tested})",
                "te_fsdp uses private names that may have changed",
                f"if something fails, use {name} {tested} and report it",
                breaks=False,
            )


def _parts_of_te(facts: Facts) -> Iterator[Fault]:
    """Several of them, or another CUDA than torch's."""
    cores = [name for name in facts.te if re.fullmatch(r"transformer_engine_cu\d+", name)]
    releases = {version for found in facts.te.values() for version in found}
    if len(cores) > 1:
        yield Fault(
            f"several cores of TransformerEngine: {', '.join(cores)}",
            "which of them is loaded depends on the order of files, and the bindings fit one of them",
            f"pip uninstall {' '.join(cores)}; then install the one of torch's CUDA: {_install(facts)}",
        )
    if len(releases) > 1:
        listed = ", ".join(f"{name} {' and '.join(found)}" for name, found in facts.te.items())
        yield Fault(
            f"several versions of TransformerEngine: {listed}",
            "its Python part calls functions that another version of its compiled part lacks or has otherwise",
            f"pip uninstall {' '.join(facts.te)} (again until pip finds none); then {_install(facts)}",
        )
    numbers = [core.removeprefix("transformer_engine_cu") for core in cores]
    major = (facts.torch_cuda or "").split(".")[0]
    if len(numbers) == 1 and major and numbers[0] != major:
        yield Fault(
            f"torch was built with CUDA {facts.torch_cuda}, TransformerEngine's core with CUDA {numbers[0]}",
            "two CUDA runtimes in one process do not see each other's streams and memory",
            f"pip uninstall {cores[0]} transformer_engine_torch; {_install(facts)}",
        )


def _install(facts: Facts) -> str:
    extra = _EXTRAS.get((facts.torch_cuda or "13").split(".")[0], "gpu")
    return f"pip install --no-build-isolation 'te-fsdp[{extra}]'"


def _builds(facts: Facts) -> Iterator[Fault]:
    """A torch without GPUs beside a driver."""
    if facts.driver and facts.torch_cuda is None:
        yield Fault(
            f"torch {facts.torch} is a build without CUDA, on a machine with NVIDIA's driver {facts.driver}",
            "nothing will run on the GPUs",
            "pip install --force-reinstall torch from the index of your CUDA version: https://pytorch.org/get-started",
        )
    if facts.cuda_problem and facts.driver:
        yield Fault(
            f"torch sees no GPU: {facts.cuda_problem}",
            "nothing will run on the GPUs",
            "unset CUDA_VISIBLE_DEVICES"
            if "CUDA_VISIBLE_DEVICES" in facts.cuda_problem
            else f"update the driver ({facts.driver}) to one for CUDA {facts.torch_cuda}, or install a torch for it",
        )


def _te_itself(facts: Facts) -> Iterator[Fault]:
    if "transformer_engine" not in facts.te:
        wanted = _install(facts) if facts.gpus else "pip install 'te-fsdp[emulation]'"
        yield Fault("TransformerEngine is not installed", "there are no modules to train", wanted)
        return
    if facts.gpus and not facts.te_bindings:
        nvcc = facts.nvcc or "missing: install a CUDA toolkit of torch's CUDA version and set CUDA_HOME to it"
        yield Fault(
            "TransformerEngine's bindings for PyTorch (transformer_engine_torch) are not installed",
            "its modules cannot be imported on this machine with GPUs",
            f"{_install(facts)} (minutes: it compiles with nvcc, which is {nvcc})",
        )
    elif facts.te_says.get("error"):
        yield _no_import(facts)
    if facts.emulation and facts.gpus:
        yield Fault(
            f"TE_FSDP_EMULATION={facts.emulation} on a machine with GPUs",
            "the emulation refuses to stand in for kernels that are there",
            "unset TE_FSDP_EMULATION",
        )
    if facts.emulation and facts.te_bindings and not facts.gpus:
        yield Fault(
            "TE_FSDP_EMULATION beside TransformerEngine's compiled bindings",
            "the emulation does not replace an installed extension",
            "use an environment with te-fsdp[emulation] alone",
        )


def _no_import(facts: Facts) -> Fault:
    """Why TE's import fails, by what it said; if no better is known, its bindings are suspected."""
    said = str(facts.te_says["error"])
    what = f"TransformerEngine cannot be imported: {said}"
    built, why = "transformer_engine_torch", "there are no modules to train"
    if facts.te_bindings and ("libcuda.so" in said or "no NVIDIA driver" in said):
        return Fault(
            what,
            "its compiled part runs on GPUs alone; only installing it needs none",
            "run it where a driver is (in Docker: --gpus all); here, an environment with te-fsdp[emulation] alone",
        )
    if "undefined symbol" in said:
        of_flash = "flash_attn" in said
        built = "flash-attn" if of_flash else built
        whose = "flash-attn's kernels" if of_flash else "its bindings"
        why = f"{whose} were compiled against another torch than {facts.torch}"
    elif "signal" in said:
        why = "it aborts the process that imports it: mixed libraries, most often"
    cure = "pip install --no-build-isolation --no-cache-dir --force-reinstall --no-deps " + built
    return Fault(what, why, cure if facts.te_bindings else "pip install 'te-fsdp[emulation]'")


def _cudnn(facts: Facts) -> Iterator[Fault]:
    """Another cuDNN that the loader finds for TE's parts while torch has loaded its own."""
    first = facts.variables.get("LD_LIBRARY_PATH", "").split(":")[0]
    own = os.path.join(facts.cudnn_home or "", "lib")
    # 9.14.0 of libcudnn.so.9.14.0; the loader's link ends in 9 alone and was resolved before.
    releases = {path: PurePath(path).name.removeprefix("libcudnn.so.") for path in facts.cudnn_files}
    others = [path for path, release in releases.items() if release != facts.cudnn]
    if facts.cudnn_home and others and os.path.realpath(first) != os.path.realpath(own):
        yield Fault(
            f"two versions of cuDNN: torch's {facts.cudnn} in {own}, and {', '.join(others)}",
            "TransformerEngine loads cuDNN by name and may mix the two (CUDNN_STATUS_SUBLIBRARY_VERSION_MISMATCH)",
            f"export CUDNN_HOME={facts.cudnn_home} LD_LIBRARY_PATH={own}:$LD_LIBRARY_PATH",
        )


def _unused_attention(facts: Facts) -> Iterator[Fault]:
    """FlashAttention that is installed for nothing."""
    taken = facts.te_says.get("attention", {}).get("taken", {})
    for name, version in facts.flash_attention.items():
        if facts.gpus and not taken.get(name.replace("_", "-"), True):
            yield Fault(
                f"TransformerEngine does not take {name} {version}",
                "attention runs without it: its version is not one that this TransformerEngine knows",
                "pip install --no-build-isolation 'te-fsdp[flash]'",
                breaks=False,
            )
