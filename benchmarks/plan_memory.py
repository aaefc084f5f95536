"""Memory of a training step on GPUs, compared with the estimate of ``te_fsdp.planning.plan``.

    python benchmarks/plan_memory.py --ranks 2 --out benchmarks/results/plan-h200x2.json

Plans are made first, in this process; then ranks of a torchrun train each configuration for a few steps. ``held`` is
the bytes between two steps, ``peak`` is ``torch.cuda.max_memory_allocated`` over a later step, both of
rank 0 and over what was there before the model; ``report`` is the result of ``te_fsdp.report``. ``difference`` is the
plan's number over the measured one, minus 1. ``--measured FILE`` plans again for an earlier run's results:
that needs no GPU. Under emulation the script runs as a check of itself.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import pickle
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from machine import join, machine
from torch import nn

import te_fsdp
import te_fsdp.emulation

te_fsdp.emulation.install_from_env()

import transformer_engine.pytorch as te  # noqa: E402
from step_models import Model  # noqa: E402
from transformer_engine.common.recipe import Float8CurrentScaling  # noqa: E402
from transformer_engine.pytorch.optimizers import FusedAdam  # noqa: E402

from te_fsdp.planning import Job, Sizes, plan  # noqa: E402

LARGE = {"layers": 8, "hidden": 4096, "ffn": 14336, "heads": 32, "groups": 8, "vocabulary": 0}
TINY = {"layers": 2, "hidden": 128, "ffn": 256, "heads": 4, "groups": 2, "vocabulary": 0}
#: Weights, strategy, optimizer; and the changed settings of rows that the fit does not use.
ROWS: list[tuple[str, str, str, dict[str, Any]]] = [
    ("bf16", "optim_grads_params", "fused-adam", {}),
    ("fp8-compute", "optim_grads_params", "adamw", {}),
    ("fp8", "optim_grads_params", "fused-adam", {}),
    ("bf16", "optim", "adamw", {}),
    ("fp8-compute", "optim", "fused-adam", {}),
    ("fp8", "optim", "adamw", {}),
    ("bf16", "optim_grads_params", "adamw", {"vocabulary": 32768, "layers": 4, "precision": True}),
    (
        "fp8",
        "optim_grads_params",
        "fused-adam",
        {"hidden": 2048, "ffn": 8192, "heads": 16, "batch": 4, "layers": 12},
    ),
    ("fp8-compute", "optim_grads", "adamw", {"recompute": True, "batch": 2, "microbatches": 2}),
]


def job_of(row: tuple[str, str, str, dict[str, Any]], large: bool) -> tuple[Job, argparse.Namespace]:
    """Return the job of a row, and the shape of its model."""
    weights, strategy, optimizer, other = row
    other = (
        dict(other)
        if large
        else {k: v for k, v in other.items() if k not in ("hidden", "ffn", "heads", "layers")}
    )
    options = argparse.Namespace(
        experts=0, **{**(LARGE if large else TINY), **{k: v for k, v in other.items() if k in LARGE}}
    )
    job = Job(
        partial(build, options),
        recipe="none" if weights == "bf16" else "current",
        quantized_weights=weights == "fp8",
        strategy=strategy,
        optimizer=optimizer,
        precision=te_fsdp.MixedPrecisionPolicy() if other.get("precision") else None,
        units=("layers.*", "head") if options.vocabulary else ("layers.*",),
        sequence=4096 if large else 64,
        batch=other.get("batch", 1),
        microbatches=other.get("microbatches", 1),
        recompute=other.get("recompute", False),
        vocabulary=options.vocabulary,
    )
    return job, options


def build(options: argparse.Namespace, meshes: te_fsdp.Meshes) -> nn.Module:
    """Return the model on meta."""
    return Model(options, "meta")


class Recomputed(Model):
    """The model with activation checkpointing of each layer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the loss of activations."""
        for layer in self.layers:
            x = te.checkpoint(layer, x, use_reentrant=False)
        return x.float().square().mean()


# ------------------------------------------------------------------------------------------------------- the ranks


def train(job: Job, options: argparse.Namespace, device: torch.device, trace: Path | None) -> dict[str, int]:
    """Return the memory of a steady-state step of a job on this rank."""
    before = allocated(device)
    with te.quantized_model_init(enabled=job.quantized_weights, recipe=Float8CurrentScaling()):
        model: Any = (Recomputed if job.recompute else Model)(options, "meta")
    meshes = te_fsdp.Meshes.build(device_type=device.type)
    # By NCCL: shards that other ranks read would not be the allocator's.
    options_of_sharding = {"strategy": job.strategy, "precision": job.precision, "transport": "nccl"}
    te_fsdp.fully_shard(model, meshes, units=job.units, **options_of_sharding)
    te_fsdp.materialize(model, seed=0)
    if job.optimizer == "adamw":
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    else:
        optimizer = FusedAdam(model.parameters(), lr=1e-4, master_weights=True)
    te_fsdp.main_weights(model, optimizer)
    shape = (job.sequence, job.batch)
    if options.vocabulary:
        x = torch.randint(options.vocabulary, shape, device=device)
    else:
        x = torch.randn(*shape, options.hidden, device=device, dtype=torch.bfloat16)
    results: dict[str, int] = {"before": before, "report": te_fsdp.report(model).total_bytes}

    def mark(name: str) -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()
            results[f"{name} peak"] = torch.cuda.max_memory_allocated() - before
            torch.cuda.reset_peak_memory_stats()
        results[name] = allocated(device) - before

    for number in range(4):
        if number == 3 and trace is not None:
            torch.cuda.memory._record_memory_history(max_entries=200_000, stacks="python")
        mark("between steps")
        for last in range(job.microbatches):
            with te_fsdp.microbatch(model, is_last=last == job.microbatches - 1):
                with te.autocast(enabled=job.recipe != "none", recipe=Float8CurrentScaling()):
                    loss = model(x)
                mark("forward")
                loss.backward()
                del loss
        mark("backward")
        optimizer.step()
        mark("step")
        optimizer.zero_grad()
        if number == 3 and trace is not None:
            trace.write_bytes(pickle.dumps(torch.cuda.memory._snapshot()["device_traces"][device.index or 0]))
            torch.cuda.memory._record_memory_history(enabled=None)
    results["held"] = results["between steps"]
    results["peak"] = max((size for name, size in results.items() if name.endswith("peak")), default=0)
    return results


def allocated(device: torch.device) -> int:
    """Return the bytes of live tensors on this rank's GPU."""
    return torch.cuda.memory_allocated() if device.type == "cuda" else 0


def ranks(options: argparse.Namespace) -> None:
    """Train the rows on all ranks; rank 0 appends what it found to a file."""
    device = join()
    torch.zeros(1, device=device) @ torch.zeros(1, device=device)  # the GPU's context
    for number in options.rows:
        job, shape = job_of(ROWS[number], device.type == "cuda")
        trace = options.traces / f"trace{number}.pickle" if options.traces and dist.get_rank() == 0 else None
        try:
            result: dict[str, Any] = train(job, shape, device, trace)
        except Exception as error:
            result = {"reason": f"{type(error).__name__}: {error}"[:300]}
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        if dist.get_rank() == 0:
            with options.found.open("a", encoding="utf-8") as out:
                print(json.dumps([number, result]), file=out)
    dist.destroy_process_group()


# ------------------------------------------------------------------------------------------------------ the driver


def main() -> None:
    """Plan, measure, compare, and write it down after each row."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rows", type=int, nargs="+", default=list(range(len(ROWS))))
    parser.add_argument("--seconds", type=float, default=110, help="for all rows together")
    parser.add_argument("--out", type=Path, default=Path("plan-memory.json"))
    parser.add_argument("--found", type=Path, help="used between processes")
    parser.add_argument(
        "--measured", type=Path, help="results of an earlier run: its measurements, and new plans"
    )
    parser.add_argument("--traces", type=Path, help="folder for the allocator's history of one step per row")
    options = parser.parse_args()
    if "RANK" in os.environ:
        ranks(options)
        return
    large = torch.cuda.is_available() or options.measured is not None
    result = options.out.with_suffix(".lines")
    result.unlink(missing_ok=True)
    plans = {}
    for number in options.rows:
        plans[number] = plan(job_of(ROWS[number], large)[0], Sizes(dp_shard=options.ranks)).as_json()
        del plans[number]["report"]["rows"]
    if options.measured is not None:
        again(options, plans)
        return
    args = ["--rows", *map(str, options.rows), "--found", str(result)]
    args += ["--traces", str(options.traces)] if options.traces else []
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(options.ranks),
    ]
    try:
        subprocess.run([*command, __file__, *args], timeout=options.seconds, check=False)
    except subprocess.TimeoutExpired:
        print("out of time")
    measured = dict(map(json.loads, result.read_text().splitlines())) if result.exists() else {}
    device = torch.device("cuda" if large else "cpu")
    write(options, plans, measured, {"machine": machine(device) | {"ranks": options.ranks}})


def again(options: argparse.Namespace, plans: dict[int, dict[str, Any]]) -> None:
    """Compare what an earlier run measured with plans of this commit."""
    earlier = json.loads(options.measured.read_text(encoding="utf-8"))
    measured = {number: row["measured"] for number, row in enumerate(earlier["rows"])}
    planned = {key: machine(torch.device("cpu"))[key] for key in ("commit", "torch", "device")}
    write(options, plans, measured, {"machine": earlier["machine"], "plans": planned})


def write(
    options: argparse.Namespace,
    plans: dict[int, dict[str, Any]],
    measured: dict[int, dict[str, Any]],
    about: dict[str, Any],
) -> None:
    """Write the results to the file, and a summary to the terminal."""
    rows = [compare(number, plans[number], measured.get(number, {})) for number in options.rows]
    options.out.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    for row in rows:
        print({key: value for key, value in row.items() if key not in ("plan", "measured")})


def compare(number: int, planned: dict[str, Any], measured: dict[str, Any]) -> dict[str, Any]:
    """Return a row of the results."""
    weights, strategy, optimizer, other = ROWS[number]
    row: dict[str, Any] = {"weights": weights, "strategy": strategy, "optimizer": optimizer, **other}
    numbers = {
        "report": sum(size for words, size in planned["held"].items() if words.startswith("weights")),
        "held": sum(planned["held"].values()),
        "peak": sum(planned["peak"]["parts"].values()),
    }
    for name, size in numbers.items():
        row[name] = {"plan": size, "measured": measured.get(name)}
        if measured.get(name):
            row[name]["difference"] = round(size / measured[name] - 1, 4)
    return row | {"plan": planned, "measured": measured}


if __name__ == "__main__":
    main()
