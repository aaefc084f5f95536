"""train.py's model in a job that loses nodes and ranks, and goes on with those that are left, by itself.

torchrun starts the script again whenever a rank has died or a node has come, on as many ranks as there are then. Each
start makes its mesh from them, loads the newest whole checkpoint, and goes on at the same place of the data with the
same global batch. On each of one to four nodes, with a store outside of them (see docs/nodes.md):

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    torchrun --nnodes 1:4 --nproc-per-node 8 --max-restarts 20 --rdzv-backend c10d --rdzv-endpoint store:29500 \
        --rdzv-conf is_host=0 examples/fsdp2_tp/train_elastic.py --tp 2 --save /shared/checkpoints

Here is what such a job adds; text, model, optimizer and log come from train.py beside this file.
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
    """Train train.py's model on as many ranks as there are, again and again."""

    micro: int = 2
    """Sequences that a rank computes at once: --batch stays what it is, whatever the number of ranks."""
    noise: float = 0.05
    """Share of the bytes that the model reads which are replaced by random ones."""
    save: Path | None = Path("out/elastic/checkpoints")
    """Folder of the checkpoints, which all nodes see; a start resumes from the newest whole one in it."""
    save_every: int = 10
    """Steps between checkpoints: so many are lost at most, and those of a save that is under way."""
    keep: int = 3
    """How many checkpoints are kept."""
    asynchronous: bool = True
    """Go on with training while a checkpoint is being written."""
    resume: Path | None = None
    """Begin with this checkpoint in place of the newest one in --save."""
    patience: float = 600.0
    """Seconds after which a rank ends that waits for one which is silent: a dead one is noticed at once."""
    out: Path = Path("out/elastic")
    """Folder of metrics.jsonl and loss.png."""


def start_distributed(options: Options) -> te_fsdp.Meshes:
    """The mesh of the ranks that are there now; the data-parallel axis takes what --tp and --dp-replicate leave."""
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    # No collective waits longer, in training and outside.
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=timedelta(seconds=options.patience)
    )
    te_fsdp.set_collective_timeout(options.patience)
    try:
        return te_fsdp.Meshes.build(
            dp_replicate=options.dp_replicate, dp_shard=options.dp_shard, tp=options.tp
        )
    except te_fsdp.MeshError as error:
        # torchrun tries again, --max-restarts times at most; --nnodes MIN:MAX with a sufficient MIN waits instead.
        train.stop(f"{dist.get_world_size()} ranks are there now, which cannot form the mesh. {error}")


def check(options: Options, meshes: te_fsdp.Meshes) -> int:
    """Microbatches of a step on each rank; refuses a batch that does not divide."""
    if options.micro < 1:
        train.stop("--micro must be at least 1.")
    train.check(options, meshes)
    at_once = meshes.data_size * options.micro
    if options.batch % at_once:
        ranks = f"{meshes.data_size} data-parallel ranks x --micro {options.micro}"
        train.stop(f"--batch {options.batch} is not a multiple of {ranks} ({meshes}).")
    if options.save is None:
        train.stop("--save DIR: without checkpoints nothing can go on.")
    return options.batch // at_once


def find_newest(options: Options, meshes: te_fsdp.Meshes) -> tuple[Path | None, int]:
    """The newest whole checkpoint, as rank 0 sees it, and the number of this start, which starts.jsonl notes.

    Ranks that look at different moments would see different ones. Checkpoints of this start have its number in their
    names, so that they are in the way of none: neither of a damaged one that was passed over, nor of one that a rank
    which was cut off from the others completes late.
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
    """End where a later start has begun: torchrun has taken this node for lost, and the others have gone on without it.

    Two jobs would write checkpoints by turns, and neither would be the run.
    """
    later = torch.zeros((), dtype=torch.int64)
    if RANK == 0:
        later += (options.save / "starts.jsonl").read_text().count("\n") - start
    dist.broadcast(later, src=0)
    if later > 0:
        train.stop(f"start {start} was taken for lost: start {start + int(later)} has begun.")


def resume(
    path: Path | None, model: torch.nn.Module, optimizer: Any, schedule: Any, about: dict[str, Any]
) -> dict[str, Any]:
    """What was saved beside model and optimizer, or where a run begins."""
    if path is None:
        return {"step": 0, "position": 0, "losses": [], "rng": None, **about}
    progress = te_fsdp.checkpoint.load(path, model, optimizer)
    for what, ours in about.items():
        if ours != progress[what]:
            train.stop(f"{path} has {what} {progress[what]}, this run {ours}: the batches would differ.")
    schedule.load_state_dict(progress["schedule"])
    return progress


def seed(options: Options, meshes: te_fsdp.Meshes, progress: dict[str, Any]) -> None:
    """The generators as they were; on another mesh nobody's state is this rank's, and they begin anew."""
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
    """Forward and backward of all microbatches; this rank's part of the mean loss, summed over all ranks."""
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
    """One start: build for the ranks that are there, load, train until --steps or until it is ended."""
    meshes = start_distributed(options)
    count, text = check(options, meshes), train.Text(options)
    recipe = RECIPES[options.recipe] and RECIPES[options.recipe]()
    model, optimizer, schedule = train.build(train.ByteModel, te.TransformerLayer, options, meshes, recipe)
    about = {"data": text.digest, "seed": options.seed, "seq": options.seq, "batch": options.batch}
    path, start = find_newest(options, meshes)
    progress = resume(path, model, optimizer, schedule, about)
    if progress["step"] >= options.steps:
        return  # the last checkpoint was whole when the start before was ended
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
    # Not the interpreter's own end: it would wait for a save, and the save for a rank that is silent.
    os._exit(status)
