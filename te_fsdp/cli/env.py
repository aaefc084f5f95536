"""The command ``te-fsdp env``.

It shows versions, GPUs, patches of other libraries, and problems with their fixes.
:mod:`te_fsdp.cli.environment` collects the data and :func:`faults` evaluates it.
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
from te_fsdp.cli import human_bytes, print_json, print_table
from te_fsdp.cli.environment import Environment, gather


def show(
    *,
    as_json: Annotated[
        bool, tyro.conf.arg(name="json", help="One JSON document on stdout instead of text.")
    ] = False,
) -> int:
    """Show versions, GPUs and their links, patches of other libraries, and a fix for each problem."""
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
    """Yield the rows of both patch tables, each with the patched library."""
    from te_fsdp.upstream import patches as _patches

    for library, rows in (("TransformerEngine", _patches.PATCHES.values()), ("torch", _patches.FSDP2)):
        yield from ({"library": library, **dataclasses.asdict(row)} for row in rows)


def _show(facts: Environment, wrong: Sequence[Fault]) -> None:
    print_table("Versions", ("what", "version"), _versions(facts))
    if facts.gpus:
        gpus = [(g.name, g.capability, human_bytes(g.memory), " ".join(g.links)) for g in facts.gpus]
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
    title = "Patched by te_fsdp at the first set_device_mesh or fully_shard, for its own models only"
    # The tables contain Markdown for the docs.
    plain = [tuple(text.replace("`", "") for text in row) for row in rows]
    print_table(title, ("in", "owner", "attribute", "reason"), plain)
    for number, fault in enumerate(wrong, 1):
        kind = "Fault" if fault.breaks else "Note"
        print(f"{kind} {number}: {fault.what}\n  why:  {fault.why}\n  fix:  {fault.cure}")
    if not wrong:
        print("No problems found.")


def _show_attention(facts: Environment) -> None:
    """Print the attention backend that TE selects, with the reasons against the others."""
    if facts.te_says["emulated"]:
        print(
            "Attention: unfused, the only backend of the emulation. On a GPU TransformerEngine selects its fused "
            "kernels (cuDNN) or flash-attn if possible; run te-fsdp env on a GPU to see which and why."
        )
        return
    attention, rows = facts.te_says["attention"], []
    for name, called in _BACKENDS.items():
        against = [text for text in attention["reasons"] if re.match(f"Disabling {called}", text)]
        if name == attention["backend"]:
            against = ["taken"]
        elif not against and name == "flash" and not facts.flash_attention:
            against = ["flash-attn is not installed (the extra flash)"]
        why = "; ".join(map(str.strip, against)) or "not selected: a preferred backend is available"
        rows.append((name, why))
    if attention["backend"] not in _BACKENDS:  # "none", "unknown": only the reasons are available
        rows.append((attention["backend"], "; ".join(attention["reasons"])))
    shape = ", ".join(f"{name} {size}" for name, size in attention.get("shape", {}).items())
    columns = ("backend", "selected, or the reason against it")
    print_table(f"Attention in bf16, causal, {shape}", columns, rows)


#: Attention backend -> its name in TE's log.
_BACKENDS = {"flash": "FlashAttention", "fused": "FusedAttention", "unfused": "UnfusedDotProductAttention"}


def _versions(facts: Environment) -> Iterable[tuple[str, str]]:
    yield "te_fsdp", facts.te_fsdp
    yield "Python", f"{facts.python} ({facts.executable})"
    build = f"built with CUDA {facts.torch_cuda}" if facts.torch_cuda else "without CUDA"
    yield "torch", f"{facts.torch}, {build}"
    for name, of_name in facts.te.items():
        yield name, " and ".join(of_name)
    if facts.te_says.get("emulated"):
        architecture = ".".join(map(str, facts.te_says["emulated"]))
        yield "emulation", "on" if facts.emulation else f"off; on with TE_FSDP_EMULATION={architecture}"
    yield "NVIDIA driver", facts.driver or "none"
    yield "cuDNN", facts.cudnn or "none"
    yield "NCCL", facts.nccl or "none"
    yield "nvcc", facts.nvcc or "none"
    yield from facts.flash_attention.items()
    yield "symmetric memory", "available" if facts.symmetric_memory else "not available in this torch"
    copies = f"possible between all {len(facts.gpus)} GPUs"
    if not facts.symmetric_memory or len(facts.gpus) < 2:
        copies = "no: it needs symmetric memory and two GPUs"
    elif facts.unreachable_gpus:
        copies = f"no: GPUs {facts.unreachable_gpus} cannot address the memory of all others"
    yield "transport copy_engine", copies


_EXTRAS = {"13": "gpu", "12": "gpu-cu12"}


@dataclass(frozen=True)
class Fault:
    """A problem of the environment."""

    what: str  #: Finding, with its numbers
    why: str  #: Consequence
    cure: str  #: Fix, as a command if possible
    breaks: bool = True  #: False: te_fsdp works, but slower or with fewer features


def faults(facts: Environment) -> list[Fault]:
    """Return all problems of an environment, breaking ones first."""
    searches = (_wrong_versions, _parts_of_te, _libraries, _te_itself)
    return sorted((f for search in searches for f in search(facts)), key=lambda f: not f.breaks)


def _wrong_versions(facts: Environment) -> Iterator[Fault]:
    """Yield Python, torch and TransformerEngine versions outside of the tested ranges."""
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
                f"{name} {version} is older than the supported versions ({tested})",
                "te_fsdp uses private names that older versions lack",
                f"pip install '{package}>={low}'" if package else f"make an environment with Python {tested}",
            )
        elif version and release > tested.last:
            yield Fault(
                f"{name} {version} is newer than the tested versions ({tested})",
                "te_fsdp uses private names that may have changed",
                f"if something fails, use {name} {tested} and report it",
                breaks=False,
            )


def _parts_of_te(facts: Environment) -> Iterator[Fault]:
    """Yield problems of installed TE packages: several of them, or a different CUDA version from torch's."""
    cores = [name for name in facts.te if re.fullmatch(r"transformer_engine_cu\d+", name)]
    releases = {version for of_name in facts.te.values() for version in of_name}
    if len(cores) > 1:
        yield Fault(
            f"several cores of TransformerEngine: {', '.join(cores)}",
            "the one that is loaded depends on the file order, and the bindings match only one of them",
            f"pip uninstall {' '.join(cores)}; then install the one for torch's CUDA version: "
            f"{_install(facts)}",
        )
    if len(releases) > 1:
        listed = ", ".join(f"{name} {' and '.join(of_name)}" for name, of_name in facts.te.items())
        yield Fault(
            f"several versions of TransformerEngine: {listed}",
            "its Python package calls functions that a different version of its compiled package lacks "
            "or has changed",
            f"pip uninstall {' '.join(facts.te)} (again until pip finds none); then {_install(facts)}",
        )
    # With several cores the first problem covers this one, too.
    numbers = [core.removeprefix("transformer_engine_cu") for core in cores]
    major = (facts.torch_cuda or "").split(".")[0]
    if len(numbers) == 1 and major and numbers[0] != major:
        yield Fault(
            f"torch was built with CUDA {facts.torch_cuda}, TransformerEngine's core with CUDA {numbers[0]}",
            "two CUDA runtimes in one process do not see each other's streams and memory",
            f"pip uninstall {cores[0]} transformer_engine_torch; {_install(facts)}",
        )


def _install(facts: Environment) -> str:
    extra = _EXTRAS.get((facts.torch_cuda or "13").split(".")[0], "gpu")
    return f"pip install --no-build-isolation 'te-fsdp[{extra}]'"


def _libraries(facts: Environment) -> Iterator[Fault]:
    """Yield problems of torch's CUDA build, of cuDNN and of FlashAttention."""
    if facts.driver and facts.torch_cuda is None:
        yield Fault(
            f"torch {facts.torch} is a build without CUDA, but the machine has the NVIDIA driver "
            f"{facts.driver}",
            "nothing will run on the GPUs",
            "pip install --force-reinstall torch from the index of your CUDA version: "
            "https://pytorch.org/get-started",
        )
    # Without a driver torch cannot see a GPU, and emulation is the intended use.
    if facts.cuda_problem and facts.driver:
        yield Fault(
            f"torch sees no GPU: {facts.cuda_problem}",
            "nothing will run on the GPUs",
            "unset CUDA_VISIBLE_DEVICES"
            if "CUDA_VISIBLE_DEVICES" in facts.cuda_problem
            else (
                f"update the driver ({facts.driver}) to one for CUDA {facts.torch_cuda}, or install a "
                "torch build that matches it"
            ),
        )
    # The loader may find a different cuDNN for TE than the one that torch has loaded.
    first = facts.variables.get("LD_LIBRARY_PATH", "").split(":")[0]
    torch_lib = os.path.join(facts.cudnn_home or "", "lib")
    # libcudnn.so.9.14.0 -> 9.14.0. The link libcudnn.so.9 was resolved before.
    releases = {path: PurePath(path).name.removeprefix("libcudnn.so.") for path in facts.cudnn_files}
    others = [path for path, release in releases.items() if release != facts.cudnn]
    if facts.cudnn_home and others and os.path.realpath(first) != os.path.realpath(torch_lib):
        yield Fault(
            f"two versions of cuDNN: torch's {facts.cudnn} in {torch_lib}, and {', '.join(others)}",
            "TransformerEngine loads cuDNN by name and may mix the two "
            "(CUDNN_STATUS_SUBLIBRARY_VERSION_MISMATCH)",
            f"export CUDNN_HOME={facts.cudnn_home} LD_LIBRARY_PATH={torch_lib}:$LD_LIBRARY_PATH",
        )
    taken = facts.te_says.get("attention", {}).get("taken", {})
    for name, version in facts.flash_attention.items():
        if facts.gpus and not taken.get(name.replace("_", "-"), True):
            yield Fault(
                f"TransformerEngine does not use {name} {version}",
                "attention runs without it, because this TransformerEngine does not support its version",
                "pip install --no-build-isolation 'te-fsdp[flash]'",
                breaks=False,
            )


def _te_itself(facts: Environment) -> Iterator[Fault]:
    """Yield problems of TransformerEngine's installation, import and emulation."""
    if "transformer_engine" not in facts.te:
        command = _install(facts) if facts.gpus else "pip install 'te-fsdp[emulation]'"
        yield Fault("TransformerEngine is not installed", "there are no modules to train", command)
        return
    if facts.gpus and not facts.te_bindings:
        install_toolkit = (
            "nvcc, which is missing: install a CUDA toolkit of torch's CUDA version and set CUDA_HOME"
        )
        nvcc = f"nvcc: {facts.nvcc}" if facts.nvcc else install_toolkit
        yield Fault(
            "TransformerEngine's bindings for PyTorch (transformer_engine_torch) are not installed",
            "its modules cannot be imported",
            f"{_install(facts)} (takes minutes; compiles with {nvcc})",
        )
    # Missing bindings explain a failed import, so only one of both is reported.
    elif facts.te_says.get("error"):
        error = str(facts.te_says["error"])
        package, why = "transformer_engine_torch", "there are no modules to train"
        cure = "pip install --no-build-isolation --no-cache-dir --force-reinstall --no-deps "
        if "undefined symbol" in error:
            package = "flash-attn" if "flash_attn" in error else package
            part = "flash-attn's kernels" if "flash_attn" in error else "its bindings"
            why = f"{part} were compiled against a different torch than {facts.torch}"
        elif "signal" in error:
            why = "it aborts the importing process, most often because of mixed library versions"
        fix = cure + package if facts.te_bindings else "pip install 'te-fsdp[emulation]'"
        if facts.te_bindings and ("libcuda.so" in error or "no NVIDIA driver" in error):
            why = "its compiled package runs on GPUs only, although it can be installed without one"
            fix = (
                "run it on a machine with a driver (in Docker: --gpus all); here, use an environment with "
                "te-fsdp[emulation] only"
            )
        yield Fault(f"TransformerEngine cannot be imported: {error}", why, fix)
    if facts.emulation and facts.gpus:
        yield Fault(
            f"TE_FSDP_EMULATION={facts.emulation} on a machine with GPUs",
            "the emulation does not replace real GPU kernels",
            "unset TE_FSDP_EMULATION",
        )
    if facts.emulation and facts.te_bindings and not facts.gpus:
        yield Fault(
            "TE_FSDP_EMULATION is set although TransformerEngine's compiled bindings are installed",
            "the emulation does not replace an installed extension",
            "use an environment with te-fsdp[emulation] only",
        )
