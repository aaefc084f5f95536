"""Train train.py's model in a job that continues by itself after it has lost nodes or ranks.

torchrun restarts the script when a rank has died or a node has joined, on the ranks that are then available. Each start
builds its mesh from them, loads the newest complete checkpoint, and continues at the same position of the data with the
same global batch. On each of one to four nodes, with a store outside of them (see docs/nodes.md):

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    torchrun --nnodes 1:4 --nproc-per-node 8 --max-restarts 20 --rdzv-backend c10d --rdzv-endpoint store:29500 \
        --rdzv-conf is_host=0 examples/fsdp2_tp/train_elastic.py --tp 2 --save /shared/checkpoints

This file contains what such a job adds. Text, model, optimizer and log are imported from train.py.
"""

from __future__ import annotations

import json
import os
import random
import sys
import traceback
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
import train
import tyro
from train import RANK, RECIPES, te  # TransformerEngine: real, or emulated where the environment says so

import te_fsdp


@dataclass(frozen=True)
class Options(train.Options):
    """Train train.py's model on the available ranks, after every restart."""

    micro: int = 2
    """Sequences of a microbatch. --batch does not depend on the number of ranks."""
    noise: float = 0.05
    """Share of the input bytes that are replaced by random ones."""
    save: Path | None = Path("out/elastic/checkpoints")
    """Folder of the checkpoints, shared by all nodes. A start resumes from the newest complete one."""
    save_every: int = 10
    """Steps between checkpoints."""
    keep: int = 3
    """Number of checkpoints to keep."""
    asynchronous: bool = True
    """Continue training while a checkpoint is written."""
    resume: Path | None = None
    """Start from this checkpoint instead of the newest one in --save."""
    patience: float = 600.0
    """Seconds that a rank waits for a silent one. A dead rank is noticed at once."""
    out: Path = Path("out/elastic")
    """Folder of metrics.jsonl and loss.png."""


def start_distributed(options: Options) -> te_fsdp.Meshes:
    """Return the mesh of the available ranks. The size of dp_shard is inferred from --tp and --dp-replicate."""
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    # The limit for collectives in training and outside.
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=timedelta(seconds=options.patience)
    )
    te_fsdp.set_collective_timeout(options.patience)
    try:
        return te_fsdp.Meshes.build(
            dp_replicate=options.dp_replicate, dp_shard=options.dp_shard, tp=options.tp
        )
    except te_fsdp.MeshError as error:
        # torchrun retries, at most --max-restarts times. With a sufficient MIN of --nnodes MIN:MAX it waits instead.
        train.stop(f"{dist.get_world_size()} ranks are available, and they cannot form the mesh. {error}")


def check(options: Options, meshes: te_fsdp.Meshes) -> int:
    """Return the microbatches of a step on each rank; stop if the batch does not divide."""
    if options.micro < 1:
        train.stop("--micro must be at least 1.")
    train.check(options, meshes)
    at_once = meshes.data_size * options.micro
    if options.batch % at_once:
        ranks = f"{meshes.data_size} data-parallel ranks x --micro {options.micro}"
        train.stop(f"--batch {options.batch} is not a multiple of {ranks} ({meshes}).")
    if options.save is None:
        train.stop("--save DIR is required: a restart needs checkpoints.")
    return options.batch // at_once


def find_newest(options: Options, meshes: te_fsdp.Meshes) -> tuple[Path | None, int]:
    """Return rank 0's newest complete checkpoint and the number of this start, which is recorded in starts.jsonl.

    Only rank 0 searches, because ranks that search at different times can find different checkpoints. Names of
    checkpoints include the number of the start, so that they never collide with a damaged one, or with one that a
    disconnected rank completes late.
    """
    found: list[Any] = [None, 0]
    if RANK == 0:
        options.save.mkdir(parents=True, exist_ok=True)
        newest = options.resume or te_fsdp.checkpoint.latest(options.save)
        with (options.save / "starts.jsonl").open("a+") as starts:
            starts.seek(0)
            found = [newest, 1 + len(starts.readlines())]
            row = {"start": found[1], "ranks": dist.get_world_size(), "from": newest and newest.name}
            starts.write(json.dumps(row) + "\n")
        print(f"start {found[1]}: {meshes}, from {newest or 'the beginning'}", flush=True)
    dist.broadcast_object_list(found)
    return found[0], found[1]


def check_newest(options: Options, start: int) -> None:
    """Stop if a later start has begun, because torchrun considered this node lost and restarted the others.

    Otherwise two jobs would write checkpoints of different runs.
    """
    later = torch.zeros((), dtype=torch.int64)
    if RANK == 0:
        later += (options.save / "starts.jsonl").read_text().count("\n") - start
    dist.broadcast(later, src=0)
    if later > 0:
        train.stop(f"start {start} was considered lost: start {start + int(later)} has begun.")


def resume(
    path: Path | None, model: torch.nn.Module, optimizer: Any, schedule: Any, about: dict[str, Any]
) -> dict[str, Any]:
    """Load a checkpoint; return the progress that was saved with it, or that of a new run."""
    if path is None:
        return {"step": 0, "position": 0, "losses": [], "rng": None, **about}
    progress = te_fsdp.checkpoint.load(path, model, optimizer)
    for what, ours in about.items():
        if ours != progress[what]:
            train.stop(f"{path} has {what} {progress[what]}, this run {ours}: the batches would differ.")
    schedule.load_state_dict(progress["schedule"])
    return progress


def seed(options: Options, meshes: te_fsdp.Meshes, progress: dict[str, Any]) -> None:
    """Restore the random generators. On a different mesh, seed them again."""
    if progress["rng"] is not None:
        te_fsdp.checkpoint.set_rng_state(progress["rng"])
        return
    number = (
        options.seed + 1_000_003 * progress["step"] + meshes.data_rank
    )  # ranks of one tp group draw the same
    random.seed(number)
    np.random.seed(number % 2**32)
    torch.manual_seed(number)


def train_step(
    model: torch.nn.Module, recipe: Any, options: Options, meshes: te_fsdp.Meshes, batches: list[torch.Tensor]
) -> torch.Tensor:
    """Run forward and backward of all microbatches; return the mean loss over all ranks."""
    places, mean = torch.arange(options.seq, device=meshes.device), torch.zeros((), dtype=torch.float64)
    parts = meshes.size("tp") if options.sequence_parallel else 1
    places = places.chunk(parts)[meshes.device_mesh.get_local_rank("tp") % parts]
    for index, tokens in enumerate(batches):
        drawn = torch.rand(tokens.shape, device=tokens.device) < options.noise
        read = torch.where(drawn, torch.randint_like(tokens, 256), tokens)
        with te_fsdp.microbatch(model, is_last=index == len(batches) - 1):
            with te.autocast(enabled=recipe is not None, recipe=recipe):
                logits = model(read[places], places)
            total = F.cross_entropy(
                logits.flatten(0, 1).float(), tokens[places + 1].flatten(), reduction="sum"
            )
            loss = total / (options.batch * options.seq)
            loss.backward()
        mean += loss.detach().double().cpu()
    dist.all_reduce(mean)
    return mean / (meshes.size("tp") // parts)


def main(options: Options) -> None:
    """Run one start: build for the available ranks, load, and train until --steps."""
    meshes = start_distributed(options)
    count, text = check(options, meshes), train.Text(options)
    recipe = RECIPES[options.recipe] and RECIPES[options.recipe]()
    model, optimizer, schedule = train.build(train.ByteModel, te.TransformerLayer, options, meshes, recipe)
    about = {"data": text.digest, "seed": options.seed, "seq": options.seq, "batch": options.batch}
    path, start = find_newest(options, meshes)
    progress = resume(path, model, optimizer, schedule, about)
    if progress["step"] >= options.steps:
        return  # the previous start had completed the last checkpoint
    seed(options, meshes, progress)
    log = train.Log(options, meshes, optimizer, progress["losses"])

    share = meshes.data_size * options.micro
    for step in range(progress["step"], options.steps):
        first = progress["position"] + meshes.data_rank * options.micro
        batches = [
            text.take(first + index * share, options.micro).to(meshes.device) for index in range(count)
        ]
        loss = train_step(model, recipe, options, meshes, batches)
        norm = train.update(options, model, optimizer, schedule)
        progress["losses"].append(log.step(step, loss, **norm))
        progress |= {"step": step + 1, "position": progress["position"] + options.batch}
        progress["schedule"] = schedule.state_dict()
        if (step + 1) % options.save_every == 0 or step + 1 == options.steps:
            check_newest(options, start)
            saving = te_fsdp.checkpoint.save(
                options.save / f"start-{start}-step-{step + 1}",
                model,
                optimizer,
                extra={**progress, "rng": te_fsdp.checkpoint.rng_state()},
                asynchronous=options.asynchronous,
                keep_last=options.keep,
            )
    saving.result()
    log.close()


if __name__ == "__main__":
    chosen, status = tyro.cli(Options, console_outputs=RANK == 0), 1
    try:
        main(chosen)
        dist.barrier()
        dist.destroy_process_group()
        status = 0
    except SystemExit as stopped:  # train.stop
        print(stopped, file=sys.stderr)
    except Exception:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    # A normal exit would wait for a running save, which may wait for a silent rank.
    os._exit(status)
