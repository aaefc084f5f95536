"""What stands beside every number of a benchmark."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

__all__ = ["machine"]


def machine(device: torch.device) -> dict[str, Any]:
    """What a benchmark ran on: commit, command, versions and hardware. Local operation."""
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
    words = " ".join(Path(word).name for word in sys.argv)  # whose folders these were is nobody's business
    return {
        "commit": commit.stdout.strip() + (" (changed)" if changed.stdout.strip() else ""),
        "command": f"torchrun --nproc-per-node {os.environ.get('LOCAL_WORLD_SIZE', '1')} benchmarks/{words}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "date": time.strftime("%Y-%m-%d"),
    }
