"""Loss curves of a small language model, sharded in several ways or on one GPU.

    torchrun --nproc-per-node 4 benchmarks/convergence.py --out out/convergence                 # four GPUs
    TE_FSDP_EMULATION=10.0 OMP_NUM_THREADS=1 torchrun --nproc-per-node 4 benchmarks/convergence.py \
        --recipe mxfp8 --size cpu --steps 300 --out out/convergence-mxfp8                       # without a GPU

The model and the text are those of examples/fsdp2_tp/train.py: a byte-level decoder of TransformerLayers (RMSNorm,
SwiGLU) on the source of Python's standard library. All runs get the same sequences in the same order. "one" is stock
TransformerEngine in one process, without te_fsdp, in bf16 and with the recipe, each with two seeds of the initial
weights. Sharded runs start from the same weights as seed 0. "zero3" shards over all ranks, "tp" over half of them and
a tensor-parallel axis of 2 with sequence parallelism, "HFSDP" over half of them with two replicas. "weights" has
weights in the recipe's format with fp32 main weights. "resumed" loads the checkpoint that "zero3, weights" saves after
half of the steps, on a different mesh.

Runs of one process are trained next to each other, one on each rank. Sharded runs follow one after the other and use
CUDA graphs (`te_fsdp.graphed_step`), which changes no bit. Finished runs in OUT/losses.jsonl are not repeated, so the
work can be split with --only and --seconds. Rank 0 then writes losses.csv (means of ten steps), summary.json and
losses.png.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from convergence_curves import draw, summary
from machine import join, machine

import te_fsdp

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples/fsdp2_tp"))
import train
from train import RECIPES, ByteModel, te

EVERY = 10  # steps in a mean that is written
FLUSH = 50  # steps between two writes
SIZES: dict[str, dict[str, Any]] = {
    "gpu": {"layers": 3, "hidden": 512, "ffn": 1536, "heads": 8, "seq": 256, "batch": 32, "megabytes": 20.0},
    "cpu": {"layers": 1, "hidden": 128, "ffn": 256, "heads": 4, "seq": 64, "batch": 16, "megabytes": 2.0},
}


@dataclass(frozen=True)
class Run:
    """A training run.

    Attributes:
        recipe: Key of RECIPES; "none": bf16.
        mesh: Sizes for `Meshes.build`; empty: one process without te_fsdp.
        seed: Seed of the initial weights.
        weights: Whether weights are stored in the recipe's format.
        outer: Strategy over `dp_replicate`.
        saves: Whether a checkpoint is saved after half of the steps.
        resumes: Whether the run starts from that checkpoint.
    """

    recipe: str
    mesh: tuple[tuple[str, int], ...] = ()
    seed: int = 0
    weights: bool = False
    outer: str = "no_shard"
    saves: bool = False
    resumes: bool = False


def runs_of(recipe: str, ranks: int) -> dict[str, Run]:
    """Return all runs by name, in order: first those of one process."""
    zero3 = (("dp_shard", ranks),)
    tp = (("dp_shard", ranks // 2), ("tp", 2))
    hybrid = (("dp_replicate", 2), ("dp_shard", ranks // 2))
    results = {}
    for kind, label in (("none", "bf16"), (recipe, recipe)):
        results[f"{label} one"] = Run(kind)
        results[f"{label} one, seed 1"] = Run(kind, seed=1)
    for kind, label in ((recipe, recipe), ("none", "bf16")):
        results[f"{label} zero3"] = Run(kind, zero3)
        results[f"{label} tp"] = Run(kind, tp)
        results[f"{label} HFSDP"] = Run(kind, hybrid, outer="optim")
        if kind != "none":
            results[f"{label} zero3, weights"] = Run(kind, zero3, weights=True, saves=True)
            results[f"{label} tp, weights, resumed"] = Run(kind, tp, weights=True, resumes=True)
    return results


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("out/convergence"), help="folder of the results")
    parser.add_argument("--recipe", choices=[name for name in RECIPES if name != "none"], default="current")
    parser.add_argument("--size", choices=SIZES, default="gpu")
    parser.add_argument("--steps", type=int, default=2000, help=f"a multiple of {2 * FLUSH}")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--only", nargs="*", default=[], help="words; a run must contain one of them")
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop training after this time")
    parser.add_argument(
        "--checkpoints", type=Path, help="folder of the checkpoint (default: a temporary one)"
    )
    return parser.parse_args()


def model_options(options: argparse.Namespace, run: Run) -> train.Options:
    """Return the options of examples/fsdp2_tp/train.py for a run."""
    shape = SIZES[options.size]
    split = dict(run.mesh).get("tp", 1) > 1
    return train.Options(recipe=run.recipe, quantized_weights=run.weights, sequence_parallel=split, **shape)


def schedule_of(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LambdaLR:
    """Return linear warmup over a twentieth of the steps, then cosine decay to a tenth."""
    warmup = max(1, steps // 20)

    def factor(step: int) -> float:
        done = max(0.0, (step - warmup) / max(1, steps - warmup))
        return min(1.0, (step + 1) / warmup) * (0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, done))))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def loss_of(
    model: torch.nn.Module, run: Run, part: torch.Tensor, places: torch.Tensor, tokens: int
) -> torch.Tensor:
    """Return this rank's share of the mean loss of a global batch of ``tokens`` bytes."""
    recipe = RECIPES[run.recipe]
    with te.autocast(enabled=recipe is not None, recipe=recipe() if recipe else None):
        logits = model(part[places], places)
    targets = part[places + 1].flatten()
    total = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets, reduction="sum")
    return total / tokens


#: A training step: from the batch's part to the loss.
Step = Callable[[torch.Tensor], torch.Tensor]
ADAM = {"betas": (0.9, 0.95), "weight_decay": 0.1}


class Trainer:
    """Model, optimizer and step of a run, on the device."""

    def __init__(
        self, run: Run, options: argparse.Namespace, device: torch.device, plain: te_fsdp.Meshes
    ) -> None:
        self.run, self.options, self.device = run, options, device
        self.about = model_options(options, run)
        mesh = te_fsdp.Meshes.build(**dict(run.mesh), device_type=device.type) if run.mesh else plain
        self.meshes = mesh
        recipe = RECIPES[run.recipe]
        with te.quantized_model_init(
            run.weights, recipe() if recipe else None, preserve_high_precision_init_val=True
        ):
            self.model = ByteModel(self.about, self.meshes, torch.bfloat16)
        self.first, self.share, self.copies = 0, self.about.batch, 1
        self.places = torch.arange(self.about.seq, device=device)
        self.recorded: te_fsdp.GraphedStep | None = None
        self.step = self._sharded() if run.mesh else self._alone()
        self.schedule = schedule_of(self.optimizer, options.steps)

    def _alone(self) -> Step:
        """Set up stock TransformerEngine in one process."""
        te_fsdp.materialize(self.model, seed=self.run.seed)  # draws the weights that sharded runs get
        self.optimizer: torch.optim.Optimizer = te.optimizers.FusedAdam(
            self.model.parameters(), lr=self.options.lr, master_weights=True, **ADAM
        )

        def step(part: torch.Tensor) -> torch.Tensor:
            loss = self._loss(part)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            return loss.detach()

        return step

    def _sharded(self) -> Step:
        """Set up te_fsdp."""
        fp32 = torch.distributed.fsdp.MixedPrecisionPolicy(reduce_dtype=torch.float32)
        te_fsdp.fully_shard(
            self.model,
            self.meshes,
            units=[te.TransformerLayer],
            outer_strategy=self.run.outer,
            mp_policy=fp32,
            average_gradients=False,  # a rank's loss is its share of the mean
        )
        te_fsdp.materialize(self.model, seed=self.run.seed)
        on_gpu = self.device.type == "cuda"
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=self.options.lr, fused=on_gpu or None, capturable=on_gpu, **ADAM
        )
        te_fsdp.main_weights(self.model, self.optimizer)
        if self.run.outer == "optim":
            te_fsdp.shard_optimizer(self.optimizer)
        self.first, self.share, self.places, self.copies = train.portion(self.about, self.meshes)

        def forward_backward(part: torch.Tensor) -> torch.Tensor:
            with te_fsdp.microbatch(self.model, is_last=True):
                loss = self._loss(part)
                loss.backward()
            return loss.detach()

        self.recorded = te_fsdp.graphed_step(self.model, self.optimizer, forward_backward, max_norm=1.0)
        return lambda part: self.recorded(part)[0]  # type: ignore[misc]

    def _loss(self, part: torch.Tensor) -> torch.Tensor:
        return loss_of(self.model, self.run, part, self.places, self.about.batch * self.about.seq)

    def batch(self, data: torch.Tensor, step: int) -> torch.Tensor:
        """Return this rank's sequences of a step: int64 (seq + 1, share)."""
        begin = step * self.about.batch + self.first
        return data[:, begin : begin + self.share].long()


class Losses:
    """OUT/losses.jsonl: lines {"run", "step", "loss"} of means over EVERY steps, and {"run", "done"}."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "losses.jsonl"

    def read(self) -> tuple[dict[str, dict[int, float]], dict[str, dict[str, Any]]]:
        """Return the losses by run and step, and what is known of finished runs."""
        losses: dict[str, dict[int, float]] = {}
        done: dict[str, dict[str, Any]] = {}
        lines = self.path.read_text(encoding="utf-8").splitlines() if self.path.exists() else []
        for row in map(json.loads, lines):
            if "done" in row:
                done[row["run"]] = row["done"]
            elif row["step"] == row["begins"]:  # a run that began again replaces its earlier rows
                losses[row["run"]] = {row["step"]: row["loss"]}
            else:
                losses[row["run"]][row["step"]] = row["loss"]
        return losses, done

    def append(self, rows: list[dict[str, Any]]) -> None:
        """Append rows. Ranks of different runs may append at the same time."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(row) + "\n" for row in rows))


def trained(
    name: str, trainer: Trainer, data: torch.Tensor, losses: Losses, deadline: float, where: Path
) -> bool:
    """Train a run and write its losses; return whether it reached the last step.

    Collective over the world for a sharded run.
    """
    run, steps, begins = trainer.run, trainer.options.steps, 0
    if run.resumes:
        saved = te_fsdp.checkpoint.load(where / "half", trainer.model, trainer.optimizer)
        begins = saved["step"]
        trainer.schedule.load_state_dict(saved["schedule"])
    result, began = torch.zeros(steps, dtype=torch.float64, device=trainer.device), time.perf_counter()
    for step in range(begins, steps):
        if run.recipe == "nvfp4":  # rounds stochastically
            torch.manual_seed(7919 * step + trainer.first)
        result[step] = trainer.step(trainer.batch(data, step))
        trainer.schedule.step()
        if run.saves and step + 1 == steps // 2:
            progress = {"step": step + 1, "schedule": trainer.schedule.state_dict()}
            te_fsdp.checkpoint.save(where / "half", trainer.model, trainer.optimizer, extra=progress)
        if (step + 1) % FLUSH == 0:
            values = result[step + 1 - FLUSH : step + 1].clone()
            late = torch.tensor([float(time.time() > deadline)], device=trainer.device)
            if run.mesh:
                dist.all_reduce(values)
                dist.all_reduce(late)
            means = (values / trainer.copies).view(-1, EVERY).mean(1).tolist()
            first = step + 1 - FLUSH
            rows = [
                {"run": name, "begins": begins, "step": first + EVERY * n, "loss": mean}
                for n, mean in enumerate(means)
            ]
            if not run.mesh or dist.get_rank() == 0:
                losses.append(rows)
            if late.item() and step + 1 < steps:
                return False
    about = {
        "mesh": str(trainer.meshes) if run.mesh else "one process",
        "ms_per_step": 1e3 * (time.perf_counter() - began) / (steps - begins),
        "eager because": trainer.recorded.why_eager if trainer.recorded else "without te_fsdp",
    }
    if not run.mesh or dist.get_rank() == 0:
        losses.append([{"run": name, "done": about}])
    return True


@contextmanager
def trainer_of(
    run: Run, options: argparse.Namespace, device: torch.device, plain: te_fsdp.Meshes
) -> Iterator[Trainer]:
    """Build a trainer; free its recordings afterwards."""
    trainer = Trainer(run, options, device, plain)
    try:
        yield trainer
    finally:
        if trainer.recorded is not None:
            trainer.recorded.forget()


def write(options: argparse.Namespace, device: torch.device, names: list[str], digest: str) -> None:
    """Write losses.csv, summary.json and losses.png of all runs so far, on one rank."""
    losses, done = Losses(options.out).read()
    losses = {name: dict(sorted(losses[name].items())) for name in names if name in losses}
    steps = sorted({step for values in losses.values() for step in values})
    with (options.out / "losses.csv").open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["step", *losses])
        for step in steps:
            table.writerow([step, *(f"{v[step]:.5f}" if step in v else "" for v in losses.values())])
    shape = SIZES[options.size] | {"steps": options.steps, "lr": options.lr, "text": digest}
    result = summary(losses)
    for name, about in done.items():
        result.get(name, {}).update(about)
    emulated = te_fsdp.emulation.active()
    results = {"machine": machine(device), "emulated": emulated, "model": shape, "runs": result}
    text = json.dumps(results, indent=1)
    (options.out / "summary.json").write_text(text + "\n", encoding="utf-8")
    where = (
        "TransformerEngine emulated on the CPU"
        if emulated
        else f"{dist.get_world_size()} x {machine(device)['device']}"
    )
    draw(losses, f"{options.recipe}, {where}", options.out / "losses.png")
    print(text)


def main() -> None:
    """Train the runs that are not finished, and write the results."""
    options, deadline = arguments(), time.time()
    deadline += options.seconds
    device = join()
    if options.steps % (2 * FLUSH):
        raise SystemExit(f"--steps must be a multiple of {2 * FLUSH}")
    options.out.mkdir(parents=True, exist_ok=True)
    box = [str(options.checkpoints or tempfile.mkdtemp(prefix="te_fsdp-convergence-"))]
    dist.broadcast_object_list(box)
    every, losses = runs_of(options.recipe, dist.get_world_size()), Losses(options.out)
    finished = [losses.read()[1]]
    dist.broadcast_object_list(finished)
    chosen = {
        name: run
        for name, run in every.items()
        if name not in finished[0] and (not options.only or any(word in name for word in options.only))
    }
    plain = te_fsdp.Meshes.build(dp_shard=-1, device_type=device.type)  # without tp, for runs of one process
    text = train.Text(model_options(options, Run("none")))

    def train_all(names: list[str]) -> None:
        for name in names:
            late = torch.tensor([float(time.time() > deadline)], device=device)
            if chosen[name].mesh:
                dist.all_reduce(late)
            if late.item():
                break
            try:
                with trainer_of(chosen[name], options, device, plain) as trainer:
                    trained(name, trainer, data, losses, deadline, Path(box[0]))
            except Exception:  # the same on all ranks, or a timeout ends them
                traceback.print_exc()

    data = text.take(0, options.steps * SIZES[options.size]["batch"]).to(torch.uint8).to(device)
    alone = [name for name, run in chosen.items() if not run.mesh]
    train_all(alone[dist.get_rank() :: dist.get_world_size()])
    dist.barrier()
    train_all([name for name, run in chosen.items() if run.mesh])
    if dist.get_rank() == 0:
        write(options, device, [*every], text.digest)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
