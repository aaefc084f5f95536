"""Cost of many real processes on one machine, phase by phase.

    TE_FSDP_EMULATION=9.0 OMP_NUM_THREADS=1 python benchmarks/many_ranks.py --ranks 32 --out RESULTS.json

CPU only, with gloo, emulated TransformerEngine and a tiny model. One process imports everything and forks the ranks,
which share its memory. With fewer cores than ranks, CPU seconds of a rank are its own cost, and wall seconds include
waiting for cores. The phase `torch` is init_process_group, without te_fsdp.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import te_fsdp.emulation

te_fsdp.emulation.install_from_env(default="9.0")
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.distributed.checkpoint  # noqa: E402
import torch.distributed.fsdp  # noqa: E402
import transformer_engine.pytorch as te  # noqa: E402
from machine import machine  # noqa: E402
from transformer_engine.common import recipe as te_recipe  # noqa: E402

import te_fsdp  # noqa: E402

# Imported before the fork, so that ranks do not import them separately.
SHARED = te_fsdp.checkpoint, te_fsdp.fully_shard, te_fsdp.materialize, te_fsdp.main_weights

HIDDEN, HEADS, TOKENS = 128, 4, 32
PHASES = ("torch", "meshes", "fully_shard", "materialize", "step 1", "steps 2, 3", "save 1", "save 2", "load")


def meshes_of(ranks: int) -> dict[str, dict[str, int]]:
    """Return the tested meshes by their names in the table."""
    rows = {1 << k: 1 << (ranks.bit_length() - 1 - k) for k in range(ranks.bit_length())}
    outer = max(copies for copies, shards in rows.items() if copies <= shards and copies * shards == ranks)
    return {
        f"dp_shard={ranks}, FP8 weights": {"dp_shard": ranks},
        f"dp_replicate={outer} x dp_shard={ranks // outer}": {"dp_replicate": outer},
        f"dp_shard={ranks // 4} x tp=4": {"tp": 4},
    }


class Phases:
    """Wall seconds of phases, each up to a barrier of all ranks, and this rank's CPU seconds in them."""

    def __init__(self) -> None:
        self.wall: dict[str, float] = {}
        self.cpu: dict[str, float] = {}
        self._began = time.perf_counter(), time.process_time()

    def run(self, name: str, call: Callable[[], Any]) -> Any:
        """Time a call, and wait for the other ranks."""
        wall, cpu = time.perf_counter(), time.process_time()
        result = call()
        self.cpu[name] = time.process_time() - cpu
        dist.barrier()
        self.wall[name] = time.perf_counter() - wall
        return result


def build(meshes: te_fsdp.Meshes, phases: Phases, quantized: bool) -> tuple[torch.nn.Module, Any]:
    """Return two layers, sharded and initialized, and their optimizer."""
    recipe = te_recipe.Float8CurrentScaling()
    with te.quantized_model_init(quantized, recipe, preserve_high_precision_init_val=True):
        layers = [
            te.TransformerLayer(
                HIDDEN,
                HIDDEN,
                HEADS,
                hidden_dropout=0.0,
                attention_dropout=0.0,
                fuse_qkv_params=True,
                set_parallel_mode=True,
                params_dtype=torch.bfloat16,
                device="meta",
                **meshes.te_kwargs(),
            )
            for _ in range(2)
        ]
    model = torch.nn.Sequential(*layers)
    phases.run("fully_shard", lambda: te_fsdp.fully_shard(model, meshes, units=[te.TransformerLayer]))
    phases.run("materialize", lambda: te_fsdp.materialize(model, seed=0))
    optimizer = te.optimizers.FusedAdam(model.parameters(), lr=1e-3, master_weights=True)
    te_fsdp.main_weights(model, optimizer)
    return model, optimizer


def rank_of(axes: dict[str, int], quantized: bool, folder: Path, load: bool) -> dict[str, Any]:
    """Run the work of one rank."""
    torch.set_num_threads(1)
    phases = Phases()
    began = time.perf_counter(), time.process_time()
    dist.init_process_group("gloo")
    phases.run("torch", dist.barrier)
    phases.wall["torch"], phases.cpu["torch"] = time.perf_counter() - began[0], time.process_time() - began[1]
    meshes = phases.run("meshes", lambda: te_fsdp.Meshes.build(**axes))
    model, optimizer = build(meshes, phases, quantized)
    context = te.autocast(recipe=te_recipe.Float8CurrentScaling()) if quantized else nullcontext()
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(TOKENS, 1, HIDDEN, generator=generator).bfloat16()

    def loss() -> torch.Tensor:
        with context:
            return model(x).float().square().mean()

    def step() -> None:
        loss().backward()
        te_fsdp.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    if load:
        phases.run("load", lambda: te_fsdp.checkpoint.load(folder / "step-2", model, optimizer))
    else:
        phases.run("step 1", step)
        phases.run("steps 2, 3", lambda: (step(), step()))
        for number in (1, 2):  # the first one plans
            path = folder / f"step-{number}"
            phases.run(f"save {number}", lambda path=path: te_fsdp.checkpoint.save(path, model, optimizer))
    with torch.no_grad():
        last = float(loss())
    own = Path("/proc/self/smaps_rollup").read_text()
    return {
        "wall": phases.wall,
        "cpu": phases.cpu,
        "loss": last,
        "pss_mib": int(own.split("Pss:")[1].split()[0]) / 1024,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "open_files": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "groups": len(dist.distributed_c10d._world.pg_map),
    }


def fork(ranks: int, work: Callable[[], dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """Run a function in this number of forked processes; return the result of each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
            place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            os.environ.update({name: str(value) for name, value in {**own, **place}.items()})
            status = 1
            try:
                (folder / f"rank-{rank}.json").write_text(json.dumps(work()))
                dist.barrier()
                status = 0
            except BaseException:
                traceback.print_exc()
            sys.stderr.flush()
            os._exit(status)
        children.append(pid)
    failed = [pid for pid in children if os.waitpid(pid, 0)[1]]
    if failed:
        raise SystemExit(f"many_ranks: {len(failed)} of {ranks} ranks failed")
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(ranks)]


def measure(ranks: int, name: str, axes: dict[str, int], loading: int) -> dict[str, Any]:
    """Return a row: ranks train and save, then ``loading`` ranks load."""
    quantized = "FP8" in name
    with tempfile.TemporaryDirectory(prefix="te_fsdp_ranks_") as text:
        folder = Path(text)
        trained = fork(ranks, lambda: rank_of(axes, quantized, folder, load=False), folder)
        fewer = (
            {"dp_replicate": 2}
            if "dp_replicate" in axes
            else axes | ({"dp_shard": loading} if "dp_shard" in axes else {})
        )
        loaded = fork(loading, lambda: rank_of(fewer, quantized, folder, load=True), folder)
        stored = sum(path.stat().st_size for path in (folder / "step-2").iterdir())
    every = trained[0]["wall"] | {"load": loaded[0]["wall"]["load"]}
    mean = {p: sum(r["cpu"][p] for r in trained) / ranks for p in trained[0]["cpu"]}
    return {
        "ranks": ranks,
        "mesh": name,
        "loading_ranks": loading,
        "wall": every,
        "cpu": mean | {"load": sum(r["cpu"]["load"] for r in loaded) / loading},
        "loss": trained[0]["loss"],
        "loss_after_load": loaded[0]["loss"],
        "pss_mib_of_all": sum(r["pss_mib"] for r in trained),
        "stored_bytes": stored,
        **{key: max(r[key] for r in trained) for key in ("peak_mib", "open_files", "threads", "groups")},
    }


def show(rows: list[dict[str, Any]]) -> None:
    """Print the wall seconds of each phase, and its CPU seconds per rank."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title="wall seconds (CPU seconds of a rank)")
    for column in ("ranks", "mesh", *PHASES, "MiB of a rank", "open files"):
        table.add_column(column)
    for row in rows:
        cells = [f"{row['wall'][p]:.1f} ({row['cpu'][p]:.2f})" for p in PHASES]
        memory = f"{row['pss_mib_of_all'] / row['ranks']:.0f}"
        table.add_row(str(row["ranks"]), row["mesh"], *cells, memory, str(row["open_files"]))
    Console(width=190).print(table)


def main() -> None:
    """Measure the meshes of each number of ranks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", nargs="+", type=int, default=[32])
    parser.add_argument("--meshes", nargs="+", type=int, default=[0, 1, 2], help="which of the three")
    parser.add_argument("--loading", type=int, default=16, help="ranks that load")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message=".*CUDA_DEVICE_MAX_CONNECTIONS")  # TE's advice, of each rank
    gc.collect()
    gc.freeze()  # garbage collection of the ranks must not write to shared pages, because this would copy them
    rows = []
    for ranks in options.ranks:
        for index, (name, axes) in enumerate(meshes_of(ranks).items()):
            if index in options.meshes:
                rows.append(measure(ranks, name, axes, options.loading))
                print(json.dumps(rows[-1]), flush=True)
    show(rows)
    if options.out:
        document = {"machine": machine(torch.device("cpu")), "rows": rows}
        options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
