"""Record of the machine on which a benchmark runs."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["join", "machine"]


def join() -> torch.device:
    """Start torch.distributed in a rank of a torchrun; returns the rank's device. Collective over the world."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    return device


def machine(device: torch.device) -> dict[str, Any]:
    """Return commit, command, versions and hardware of a benchmark. Local operation."""
    root = Path(__file__).resolve().parents[1]
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=False
    )
    changed = subprocess.run(
        ["git", "status", "--porcelain", "--", "te_fsdp"],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    ranks = os.environ.get("LOCAL_WORLD_SIZE")
    launcher = f"torchrun --nproc-per-node {ranks}" if ranks else "python"
    words = " ".join(Path(word).name for word in sys.argv)  # without the user's folders
    return {
        "commit": (commit.stdout.strip() or archived(root))
        + (" (changed)" if changed.stdout.strip() else ""),
        "command": f"{launcher} benchmarks/{words}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "date": time.strftime("%Y-%m-%d"),
    }


def archived(root: Path) -> str:
    """Return the commit recorded by `git archive`, outside of a repository."""
    words = (root / ".git_archival.txt").read_text(encoding="utf-8").split()
    return words[-1] if "$" not in words[-1] else ""
