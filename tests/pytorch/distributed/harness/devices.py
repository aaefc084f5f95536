"""The device that the tests run on."""

from __future__ import annotations

import importlib.metadata
import os

import torch

DEVICE_VARIABLE = "TE_FSDP_TEST_DEVICE"
"""Environment variable "cpu", "cuda" or "auto"; the pytest option --device goes first."""
NODES_VARIABLE = "TE_FSDP_TEST_NODES"
"""Environment variable, a number; the pytest option --nodes goes first."""


def choose(wanted: str | None = None) -> str:
    """Resolve "auto" to "cuda" (a GPU is visible and the real TE is installed) or "cpu".

    Args:
        wanted: "cpu", "cuda", "auto", or None for the value of the environment variable (default "auto").

    Raises:
        ValueError: unknown value, or "cuda" without a GPU.
    """
    wanted = wanted or os.environ.get(DEVICE_VARIABLE) or "auto"
    if wanted == "cpu":
        return "cpu"
    gpus = torch.cuda.device_count()
    if wanted == "cuda":
        if not gpus:
            raise ValueError("the tests were asked to run on cuda, but torch sees no GPU")
        return "cuda"
    if wanted == "auto":
        return "cuda" if gpus and _real_te_is_installed() else "cpu"
    raise ValueError(f"unknown test device {wanted!r}: expected cpu, cuda or auto")


def device_type() -> str:
    """Return `"cpu"` or `"cuda"`: the first argument of `init_device_mesh` in a body."""
    return choose()


def device() -> torch.device:
    """Return the device of this rank: `cpu`, or `cuda:<LOCAL_RANK>`."""
    if device_type() == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def gpu_ranks() -> int:
    """Return the number of ranks that this machine supports: one per GPU and simulated node."""
    return torch.cuda.device_count() * int(os.environ.get(NODES_VARIABLE) or "1")


def node_environment(rank: int) -> dict[str, str]:
    """Return the environment of a rank: on the CPU one node, all of whose ranks share the machine.

    On GPUs every simulated node has all GPUs of the machine. NCCL refuses two ranks on one GPU of a host. It treats a
    host with a different name as a different machine, and uses sockets: slow, but with its own algorithms.
    """
    if device_type() == "cpu":
        return {"LOCAL_RANK": str(rank)}
    node, local = divmod(rank, torch.cuda.device_count())
    pretended = {"NCCL_HOSTID": f"node{node}"} if gpu_ranks() > torch.cuda.device_count() else {}
    return {"LOCAL_RANK": str(local), **pretended}


def backend() -> str:
    """Return the process-group backend: gloo on the CPU, NCCL with gloo on GPUs (DCP needs the CPU backend)."""
    return "gloo" if device_type() == "cpu" else "cpu:gloo,cuda:nccl"


def _real_te_is_installed() -> bool:
    # by distribution, because TE loads its compiled module from its own folder
    try:
        importlib.metadata.version("transformer_engine_torch")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
