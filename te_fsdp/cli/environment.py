"""Record of this process's environment (:class:`Environment`). Collecting it changes nothing."""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import te_fsdp

#: Environment variables that affect training. Others are not shown.
_VARIABLES = re.compile(
    r"NVTE_|NCCL_|TE_FSDP_|TORCH_NCCL_|TORCH_SYMM|TORCHINDUCTOR|PYTORCH_|CUDA_|CUDNN_|LD_LIBRARY_PATH$|OMP_NUM_THREADS$"
)
_PARTS = re.compile(r"transformer[-_.]engine([-_.].*)?$", re.IGNORECASE)
#: A layer of Llama-3-8B with one sequence of 4096 tokens. TE selects the attention backend by shape.
_ATTENTION = {"heads": 32, "groups": 8, "head_dim": 128, "sequence": 4096}
_LIMIT = 120
"""Timeout in seconds of a command that collects data."""


@dataclass(frozen=True)
class Gpu:
    """A GPU of this machine."""

    name: str  #: Model name
    capability: str  #: Compute capability, "9.0" for Hopper
    memory: int  #: Memory in bytes
    #: Link to each GPU of the machine in the notation of ``nvidia-smi topo``: "NV18", "PIX", "SYS", "X" for itself.
    links: list[str] = field(default_factory=list)
    #: Ordinals of GPUs whose memory it can access, as the copy engine transport and symmetric memory require.
    peers: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Environment:
    """This machine and its Python environment."""

    python: str  #: Version
    executable: str  #: Path of the interpreter
    te_fsdp: str  #: Version
    torch: str  #: Version
    torch_cuda: str | None = None  #: CUDA version of the torch build; ``None`` for a CPU build
    #: Reason why torch sees no GPU although its build supports GPUs; empty without a problem.
    cuda_problem: str = ""
    driver: str | None = None  #: Version of the NVIDIA kernel module
    nccl: str | None = None  #: Version loaded by torch; ``None`` in a CPU build
    cudnn: str | None = None  #: Version loaded by torch; ``None`` in a CPU build
    cudnn_home: str | None = None  #: Folder of the cuDNN installed with torch
    #: Other copies of cuDNN's main library that the loader could find: real paths in search order.
    cudnn_files: list[str] = field(default_factory=list)
    #: Installed TransformerEngine distributions, such as "transformer_engine_cu13" -> versions found on the path.
    te: dict[str, list[str]] = field(default_factory=dict)
    te_bindings: bool = False  #: Whether its compiled package for PyTorch is installed
    #: Output of :func:`describe_te`, or ``{"error": ...}``.
    te_says: dict[str, Any] = field(default_factory=dict)
    flash_attention: dict[str, str] = field(default_factory=dict)  #: Versions by distribution
    nvcc: str | None = None  #: Path of the compiler that builds TE's bindings
    symmetric_memory: bool = False  #: Whether this torch supports it
    gpus: list[Gpu] = field(default_factory=list)  #: In torch's order
    emulation: str = ""  #: ``TE_FSDP_EMULATION``
    variables: dict[str, str] = field(default_factory=dict)  #: Environment variables that affect training

    @property
    def unreachable_gpus(self) -> str:
        """Return the ordinals of GPUs that cannot access the memory of all other GPUs, as a string."""
        return ", ".join(str(n) for n, gpu in enumerate(self.gpus) if len(gpu.peers) < len(self.gpus) - 1)


def gather() -> Environment:
    """Collect the environment of this process. It imports torch, initializes CUDA and runs TE in a subprocess."""
    parts = te_distributions()
    # TE loads its compiled module from its own folder, where an import does not find it. So check the distribution,
    # too.
    bindings = (
        "transformer_engine_torch" in parts
        # util.find_spec raises if the emulation's module, which has no spec, is already imported.
        or importlib.machinery.PathFinder.find_spec("transformer_engine_torch") is not None
    )
    flash = {}
    # pip and the distributions' own metadata spell the third one in two ways.
    for name in ("flash-attn", "flash-attn-3", "flash_attn_3", "flash-attn-4"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            flash[name] = importlib.metadata.version(name)
    driver, problem, nccl = None, "", None
    # Some containers lack the file, but nvidia-smi still reports the version.
    with contextlib.suppress(OSError):
        match = re.search(r"Module\s+([\d.]+)", Path("/proc/driver/nvidia/version").read_text())
        driver = match and match[1]
    if driver is None:
        driver = next(
            iter(_run("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")[1].split()), None
        )
    if torch.version.cuda is not None and not torch.cuda.is_available():
        if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
            problem = "CUDA_VISIBLE_DEVICES hides all GPUs"
        else:
            # is_available() hides the reason, which initializing raises.
            try:
                torch.cuda.init()
            except Exception as error:  # torch raises RuntimeError, AssertionError and further types
                problem = (str(error).splitlines() or ["unknown"])[0]
    with contextlib.suppress(Exception):  # a build without NCCL lacks the function, or it raises
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
    homes = [os.environ.get(variable) or "/nonexistent" for variable in ("CUDA_HOME", "CUDA_PATH")]
    compilers = [os.path.join(home, "bin", "nvcc") for home in homes]
    compilers += [shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"]
    return Environment(
        python=platform.python_version(),
        executable=sys.executable,
        te_fsdp=te_fsdp.__version__,
        torch=torch.__version__,
        te=parts,
        te_bindings=bindings,
        te_says=te_capabilities(parts, bindings),
        flash_attention=flash,
        symmetric_memory=importlib.util.find_spec("torch.distributed._symmetric_memory") is not None,
        gpus=_gpus(),
        emulation=os.environ.get("TE_FSDP_EMULATION", ""),
        variables={name: value for name, value in sorted(os.environ.items()) if _VARIABLES.match(name)},
        torch_cuda=torch.version.cuda,
        cuda_problem=problem,
        driver=driver,
        nccl=nccl,
        nvcc=next((path for path in compilers if os.path.isfile(path)), None),
        **_cudnn(),
    )


def _run(*command: str, environment: dict[str, str] | None = None) -> tuple[int, str, str]:
    """Run a command and return its exit code, stdout and stderr. The code is 127 if it cannot be started."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_LIMIT, check=False, env=environment
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return 127, "", str(error)
    return done.returncode, done.stdout, done.stderr


def te_distributions() -> dict[str, list[str]]:
    """Return TransformerEngine's distributions, with one version per folder of the path that contains it."""
    by_name: dict[str, list[str]] = {}
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"] or ""
        if _PARTS.match(name):
            versions = by_name.setdefault(re.sub(r"[-.]", "_", name.lower()), [])
            if distribution.version not in versions:
                versions.append(distribution.version)
    return dict(sorted(by_name.items()))


def te_capabilities(parts: dict[str, list[str]], bindings: bool) -> dict[str, Any]:
    """Run :func:`describe_te` in a subprocess, under emulation if the bindings are not installed."""
    if "transformer_engine" not in parts:
        return {"error": "not installed"}
    environment = dict(os.environ)
    if not bindings:
        environment["TE_FSDP_EMULATION"] = environment.get("TE_FSDP_EMULATION") or "10.0"
    code, out, errors = _run(sys.executable, "-m", "te_fsdp.cli.environment", environment=environment)
    lines = [line for line in out.splitlines() if line.startswith("{")]
    if code == 0 and lines:
        return json.loads(lines[-1])
    messages = [line for line in errors.splitlines() if line.strip()]
    ended = f"ended by signal {-code}" if code < 0 else f"exit code {code}"
    return {"error": messages[-1].strip() if messages else ended}


def _cudnn() -> dict[str, Any]:
    """Return the fields of :class:`Environment` about cuDNN: torch's own, and other copies of it."""
    version = torch.backends.cudnn.version() if torch.version.cuda else None
    home = None
    with contextlib.suppress(ImportError, AttributeError, ValueError):
        spec = importlib.util.find_spec("nvidia.cudnn")
        if spec is not None and spec.submodule_search_locations:
            home = str(next(iter(spec.submodule_search_locations)))
    # The loader's order: LD_LIBRARY_PATH, then its cache.
    folders = [folder for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":") if folder]
    libraries = [str(path) for folder in folders for path in sorted(Path(folder).glob("libcudnn.so.*"))]
    _, cache, _ = _run("ldconfig", "-p")
    libraries += re.findall(r"libcudnn\.so\.\S+ .*=> (\S+)", cache)
    # Links are resolved, because only the file that they point to has the full version in its name.
    real = dict.fromkeys(os.path.realpath(path) for path in libraries)
    outside = [path for path in real if home is None or not path.startswith(os.path.realpath(home) + os.sep)]
    return {
        # 91900 of 9.19.0
        "cudnn": f"{version // 10000}.{version // 100 % 100}.{version % 100}" if version else None,
        "cudnn_home": home,
        "cudnn_files": outside,
    }


def _gpus() -> list[Gpu]:
    if not torch.cuda.is_available():
        return []
    ordinals, links, gpus = range(torch.cuda.device_count()), gpu_links(), []
    for gpu in ordinals:
        properties = torch.cuda.get_device_properties(gpu)
        other_gpus = [peer for peer in ordinals if peer != gpu]
        peers = [peer for peer in other_gpus if torch.cuda.can_device_access_peer(gpu, peer)]
        row = links[gpu] if gpu < len(links) else []
        capability = f"{properties.major}.{properties.minor}"
        gpus.append(Gpu(properties.name, capability, properties.total_memory, row, peers))
    return gpus


def gpu_links() -> list[list[str]]:
    """Return the rows of ``nvidia-smi topo -m``, reduced to the columns of GPUs."""
    _, out, _ = _run("nvidia-smi", "topo", "-m")
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).split() for line in out.splitlines()]
    # The heading starts with GPU0 as well. Only rows contain an X, the entry of the GPU itself.
    rows = [line for line in lines if line and re.fullmatch(r"GPU\d+", line[0]) and "X" in line]
    return [row[1 : 1 + len(rows)] for row in rows]


def describe_te() -> int:
    """Import TE (emulated if ``TE_FSDP_EMULATION`` is set) and print its capabilities as one line of JSON.

    It runs in a subprocess (``python -m te_fsdp.cli.environment``). Mixed libraries can abort the importing process.
    """
    import te_fsdp.emulation

    emulated = te_fsdp.emulation.install_from_env()
    from te_fsdp.upstream import te as _te, te_modules as _te_modules
    from te_fsdp.upstream.te_formats import FORMATS

    te = _te.te()
    recipes, functions = dict[str, str](), set[str]()
    for row in FORMATS.values():
        # Two kinds of weights may have one recipe, which has the name of the first.
        if row.available and row.available not in functions:
            functions.add(row.available)
            available, reason = getattr(te, row.available)(return_reason=True)
            recipes[row.name] = "" if available else str(reason)
    attention: dict[str, Any]
    try:
        attention = _te_modules.attention_backend_for(**_ATTENTION)
    except Exception as error:  # TE may query device features that an emulation or a different version lacks
        attention = {"backend": "unknown", "reasons": [f"{type(error).__name__}: {error}"]}
    described = {
        "version": importlib.metadata.version("transformer_engine"),
        "emulated": te_fsdp.emulation.arch() if emulated else None,
        "recipes": recipes,
        "attention": {**attention, "shape": _ATTENTION},
    }
    print(json.dumps(described))
    return 0


if __name__ == "__main__":
    sys.exit(describe_te())
