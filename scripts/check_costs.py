"""Measure what each level of `fully_shard(..., checks=...)` costs a step: `python scripts/check_costs.py [--write]`.

Counts te_fsdp's own calls of Python functions, and the collectives and bytes that checks send, in the first and in the
fourth step of two TransformerLayers on two emulated ranks. `--write` updates the table of docs/checks.md, which
`tests/pytorch/distributed/test_check_levels.py` compares with a new measurement.
"""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "checks.md"
MESHES: dict[str, dict[str, int]] = {"`dp_shard=2`": {"dp_shard": 2}, "`tp=2`": {"dp_shard": 1, "tp": 2}}
LEVELS = ("off", "first_steps", "full")  # "setup" runs its checks before the first step
HEADER = (
    "| mesh | `checks` | first step: calls | collectives | bytes | later steps: calls | collectives | bytes |\n"
    "| --- | --- | --- | --- | --- | --- | --- | --- |"
)
#: Methods of a process group that send data. Every collective of Python calls one of them.
SENDING = (
    "allreduce",
    "allreduce_coalesced",
    "broadcast",
    "allgather",
    "_allgather_base",
    "allgather_into_tensor_coalesced",
    "_reduce_scatter_base",
    "reduce_scatter_tensor_coalesced",
    "alltoall_base",
    "alltoall",
    # torch 2.15
    "all_gather_single",
    "all_gather_single_coalesced",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
)
STEPS = 4

#: Calls, collectives, bytes of a step.
Cost = tuple[int, int, int]


@contextlib.contextmanager
def count(cost: list[int]) -> Iterator[None]:
    """Add to `cost` te_fsdp's calls, this thread's collectives and the bytes that this rank passes to them."""
    import te_fsdp

    root = os.path.dirname(te_fsdp.__file__) + os.sep

    def profile(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(root) and "emulation" not in code.co_filename:
            # Comprehensions are calls in Python 3.10 and 3.11 only.
            cost[0] += code.co_name not in ("<listcomp>", "<dictcomp>", "<setcomp>")

    # From the class's dict: what getattr returns would not bind `self` when it is put back.
    stock = {name: method for name, method in vars(dist.ProcessGroup).items() if name in SENDING}

    def counting(name: str) -> Any:
        def send(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            given = args[0] if name in ("allreduce", "allreduce_coalesced", "broadcast") else args[1]
            cost[1] += 1
            cost[2] += sum(t.numel() * t.element_size() for t in _tensors(given))
            return stock[name].__get__(group)(*args, **kwargs)

        return send

    for name in stock:
        setattr(dist.ProcessGroup, name, counting(name))
    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)
        for name, method in stock.items():
            setattr(dist.ProcessGroup, name, method)


def _tensors(given: Any) -> list[torch.Tensor]:
    if isinstance(given, torch.Tensor):
        return [given]
    return [tensor for item in given for tensor in _tensors(item)] if isinstance(given, (list, tuple)) else []


def measure(axes: dict[str, int], checks: str) -> tuple[Cost, Cost]:
    """Train a model with a level of checks; return the cost of the first step and of the last one. Collective."""
    import transformer_engine.pytorch as te

    import te_fsdp

    gc.collect()  # The first step searches all living models for a parameter's owners, also uncollected ones.
    meshes = te_fsdp.Meshes.build(**axes)
    options = {
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "fuse_qkv_params": True,
        "set_parallel_mode": True,
    }
    options |= {"device": "meta", "params_dtype": torch.bfloat16, **meshes.te_kwargs()}
    model = torch.nn.Sequential(*[te.TransformerLayer(64, 128, 4, **options) for _ in range(2)])
    te_fsdp.fully_shard(model, meshes, checks=checks)
    te_fsdp.materialize(model, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(meshes.data_rank)
    costs = []
    for _ in range(STEPS):
        inputs = torch.randn(16, 2, 64, dtype=torch.bfloat16, device=meshes.device)
        cost = [0, 0, 0]
        with count(cost):
            model(inputs).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        costs.append((cost[0], cost[1], cost[2]))
    return costs[0], costs[-1]


def table(found: dict[tuple[str, str], tuple[Cost, Cost]]) -> str:
    """Format measurements by mesh and level. Collectives and bytes are those that level "off" does not send."""
    lines = [HEADER]
    for (mesh, level), costs in found.items():
        cells = []
        for cost, off in zip(costs, found[mesh, "off"], strict=True):
            cells += [f"{cost[0]:,}", f"{cost[1] - off[1]:,}", f"{cost[2] - off[2]:,}"]
        lines.append(f"| {mesh} | `{level}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def rows(page: str) -> list[list[str]]:
    """Return the cells of the page's table."""
    text = page[page.index(HEADER) + len(HEADER) + 1 :].split("\n\n")[0]
    return [[cell.strip() for cell in line.strip("| ").split("|")] for line in text.splitlines()]


def measure_all() -> str:
    """Measure all meshes and levels in this process group; return the table. Collective."""
    for axes in MESHES.values():  # imports and caches of the process
        measure(axes, "full")
    return table({(mesh, level): measure(axes, level) for mesh, axes in MESHES.items() for level in LEVELS})


def main() -> None:
    """Start two emulated ranks; print the table, or with `--write` update the page."""
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        text = measure_all()
        if dist.get_rank() == 0:
            print(text)
        dist.destroy_process_group()
        return
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    command += ["-m", "te_fsdp.emulation", "--arch", "9.0", __file__]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    text = done.stdout[done.stdout.index(HEADER) :].strip()
    if "--write" in sys.argv[1:]:
        page = PAGE.read_text()
        start = page.index(HEADER)
        PAGE.write_text(
            page[:start] + text + page[start + len(page[start:].split("\n\n")[0]) :].rstrip() + "\n"
        )
    print(text)


if __name__ == "__main__":
    main()
