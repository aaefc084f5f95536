"""Train a byte-level language model of TransformerEngine layers on FSDP2, also with tensor parallelism.

Train on 2 x FSDP, 2 x TP, save, and resume on 4 x FSDP. With NVIDIA GPUs run it unchanged. On the CPU set
`TE_FSDP_EMULATION=10.0 OMP_NUM_THREADS=1` first: TransformerEngine (TE) is emulated, losses are real, speed is not.

    torchrun --standalone --nproc-per-node 4 examples/fsdp2_tp/train.py --tp 2 --steps 20 --save out/ckpt
    torchrun --standalone --nproc-per-node 4 examples/fsdp2_tp/train.py --tp 1 --steps 40 --resume out/ckpt

The text is the source code of Python's standard library, or --data FILE_OR_DIR. See README.md in this folder.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
import sysconfig
import threading
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch
import torch.distributed as dist
import torch.nn.functional as F
import tyro
from matplotlib.figure import Figure
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm

import te_fsdp
import te_fsdp.emulation

RANK = int(os.environ.get("RANK", "0"))


def stop(why: str) -> NoReturn:
    """End this process with a message that rank 0 prints. All ranks call it."""
    raise SystemExit(f"{Path(sys.argv[0]).name}: {why}" if RANK == 0 else 1)


# TE warns about this variable whenever tensor parallelism is on. FSDP2 needs several hardware queues.
warnings.filterwarnings("ignore", message=".*CUDA_DEVICE_MAX_CONNECTIONS")
# Deterministic attention kernels, so that a resumed run repeats every bit. TE reads this when it is imported.
os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
if not te_fsdp.emulation.install_from_env() and not torch.cuda.is_available():
    stop(
        "torch sees no GPU. To run on the CPU with TransformerEngine emulated, set in the environment "
        "TE_FSDP_EMULATION=10.0 (Blackwell: every recipe) or TE_FSDP_EMULATION=9.0 (Hopper)."
    )

import transformer_engine.pytorch as te  # noqa: E402
from transformer_engine.common import recipe as te_recipe  # noqa: E402

RECIPES = {
    "none": None,
    "delayed": te_recipe.DelayedScaling,
    "current": te_recipe.Float8CurrentScaling,
    "block": te_recipe.Float8BlockScaling,
    "mxfp8": te_recipe.MXFP8BlockScaling,
    "nvfp4": te_recipe.NVFP4BlockScaling,
}


@dataclass(frozen=True)
class Options:
    """Train a byte-level language model of TransformerEngine layers with te_fsdp."""

    dp_replicate: int = 1
    """Number of copies of the sharded model (HSDP)."""
    dp_shard: int = -1
    """Number of ranks that FSDP2 shards each weight over; -1: world size / the other sizes."""
    tp: int = 1
    """Number of tensor-parallel ranks."""
    sequence_parallel: bool = False
    """Shard the sequence over the tensor-parallel ranks outside attention and MLP."""

    recipe: Literal["none", "delayed", "current", "block", "mxfp8", "nvfp4"] = "none"
    """TE's quantization recipe; none: BF16."""
    quantized_weights: bool = False
    """Store the layers' weights in the recipe's format only. Main weights are in --optimizer fused_adam."""
    optimizer: Literal["adamw", "fused_adam"] = "adamw"
    """adamw: torch's AdamW with FP32 weights, compute in BF16. fused_adam: TE's, BF16 weights, FP32 main weights."""
    lr: float = 1e-3
    """Learning rate."""
    warmup: int = 0
    """Steps in which the learning rate grows linearly."""
    decay: int = 0
    """Step at which a cosine schedule reaches a tenth of the learning rate; 0: no decay."""
    clip: float = 0.0
    """Largest norm of the gradients; 0: no clipping."""
    micro: int = 0
    """Sequences in a microbatch of a rank; 0: all sequences of the rank at once."""

    layers: int = 2
    """Number of TransformerLayers."""
    hidden: int = 256
    """Hidden size. A shard of a quantized weight needs whole blocks: mxfp8 32, block 128, nvfp4 16 rows."""
    ffn: int = 512
    """Hidden size of the MLP."""
    heads: int = 4
    """Number of attention heads."""
    activation: Literal["swiglu", "gelu"] = "swiglu"
    """Activation of the MLP."""

    data: Path = Path(sysconfig.get_path("stdlib"))
    """A file, or a folder whose files that match --pattern are read in the order of their names."""
    pattern: str = "*.py"
    """Pattern of the file names in a folder."""
    megabytes: float = 4.0
    """Read at most this amount of text."""
    seq: int = 128
    """Sequence length in bytes."""
    batch: int = 16
    """Sequences in a step, over all ranks."""
    steps: int = 100
    """Train until this step, counted from the start of the first run."""
    seed: int = 0
    """Seed of the weights and of the order of the data."""

    save: Path | None = None
    """Folder for checkpoints: one at the end, and one every --save-every steps."""
    save_every: int = 0
    """Steps between checkpoints; 0: only at the end."""
    resume: Path | None = None
    """A checkpoint, or a folder of checkpoints, of which the newest complete one is loaded. The mesh may differ."""
    reference: Path | None = None
    """--out of an uninterrupted run: loss.png shows this run on top of it, and the difference."""
    out: Path = Path("out/fsdp2_tp")
    """Folder of metrics.jsonl and loss.png."""


class Text:
    """Bytes in windows, in an order that depends on the seed only, never on the mesh."""

    def __init__(self, options: Options) -> None:
        files = [options.data]
        if options.data.is_dir():
            found = (p for p in options.data.rglob(options.pattern) if p.is_file())
            files = sorted((p for p in found if "site-packages" not in p.parts), key=lambda p: p.as_posix())
        data, limit = bytearray(), int(options.megabytes * 1e6)
        for path in files:
            if len(data) >= limit:
                break
            data += path.read_bytes()[: limit - len(data)]
        self.seq, self.seed = options.seq, options.seed
        self.windows = (len(data) - 1) // self.seq
        if self.windows < 1:
            stop(f"{options.data} has {len(data)} bytes that match; a sequence of {self.seq} needs more.")
        self.bytes = torch.frombuffer(data, dtype=torch.uint8)
        self.digest = hashlib.sha256(data).hexdigest()[:16]

    def take(self, position: int, count: int) -> torch.Tensor:
        """Return ``count`` windows of an endless shuffled stream, from ``position`` on: int64 (seq + 1, count)."""
        picked = []
        for place in range(position, position + count):
            epoch, index = divmod(place, self.windows)
            start = int(self._order(epoch)[index]) * self.seq
            picked.append(self.bytes[start : start + self.seq + 1])
        return torch.stack(picked, dim=1).long()

    def _order(self, epoch: int) -> torch.Tensor:
        if getattr(self, "_epoch", None) != epoch:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            self._epoch, self._permutation = epoch, torch.randperm(self.windows, generator=generator)
        return self._permutation


class ByteModel(nn.Module):
    """Map bytes to the logits of the next byte. Under sequence parallelism a tp rank gets a part of each sequence."""

    def __init__(self, options: Options, meshes: te_fsdp.Meshes, dtype: torch.dtype) -> None:
        super().__init__()
        split = options.sequence_parallel and meshes.size("tp") > 1
        self.embedding = nn.Embedding(256, options.hidden, dtype=dtype, device="meta")
        self.positions = nn.Embedding(options.seq, options.hidden, dtype=dtype, device="meta")
        self.layers = nn.ModuleList(self.layer(options, meshes, dtype, split) for _ in range(options.layers))
        self.norm = te.RMSNorm(options.hidden, sequence_parallel=split, dtype=dtype, device="meta")
        self.head = nn.Linear(options.hidden, 256, bias=False, dtype=dtype, device="meta")
        for module in (self.embedding, self.positions, self.head):
            # A tp rank's gradient comes from its part of the sequence. te_fsdp sums marked gradients over tp.
            module.weight.sequence_parallel = split

    def layer(self, options: Options, meshes: te_fsdp.Meshes, dtype: torch.dtype, split: bool) -> nn.Module:
        """Return one layer: (s, b, hidden) to (s, b, hidden)."""
        return te.TransformerLayer(
            options.hidden,
            options.ffn,
            options.heads,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            normalization="RMSNorm",
            activation=options.activation,
            bias=False,
            set_parallel_mode=True,
            fuse_qkv_params=True,  # TE requires one QKV weight for quantized weights
            sequence_parallel=split,
            params_dtype=dtype,
            device="meta",
            **meshes.te_kwargs(),
        )

    def forward(self, tokens: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Map tokens (s, b) at the positions ``places`` (s,) to logits (s, b, 256)."""
        return self.head(self.states(tokens, places))

    def states(self, tokens: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Return the input of the head (s, b, hidden)."""
        x = self.embedding(tokens) + self.positions(places)[:, None]
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


def build(
    kind: type[ByteModel],
    unit: type[nn.Module],
    options: Options,
    meshes: te_fsdp.Meshes,
    recipe: te_recipe.Recipe | None,
) -> tuple[nn.Module, Any, LambdaLR]:
    """Return the sharded and initialized model, its optimizer and its schedule. The order of the calls matters."""
    fused = options.optimizer == "fused_adam"
    with te.quantized_model_init(options.quantized_weights, recipe, preserve_high_precision_init_val=True):
        model = kind(options, meshes, torch.bfloat16 if fused else torch.float32)
    te_fsdp.fully_shard(
        model,
        meshes,
        units=[unit],
        mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        # The loss of a rank is its share of the global mean, so gradients are summed. Their magnitude is then the same
        # on every mesh, which delayed scaling needs when it resumes.
        average_gradients=False,
    )
    te_fsdp.materialize(model, seed=options.seed)
    adam = {"lr": options.lr, "betas": (0.9, 0.95), "weight_decay": 0.1}
    if fused:
        optimizer = te.optimizers.FusedAdam(model.parameters(), master_weights=True, **adam)
        # Start the main weights at the initial values before quantization. If they started at the quantized values,
        # small updates would not change the quantized weights for many steps.
        te_fsdp.main_weights(model, optimizer)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), **adam)

    def factor(step: int) -> float:
        if step < options.warmup:
            return (step + 1) / options.warmup
        if options.decay == 0:
            return 1.0
        done = min(1.0, (step - options.warmup) / (options.decay - options.warmup))
        return 0.1 + 0.45 * (1 + math.cos(math.pi * done))

    return model, optimizer, LambdaLR(optimizer, factor)


def resume(
    options: Options, model: nn.Module, optimizer: Any, schedule: LambdaLR, about: dict[str, Any]
) -> dict[str, Any]:
    """Load --resume into model, optimizer and schedule; return the progress that was saved with them."""
    path = te_fsdp.checkpoint.latest(options.resume) or options.resume
    progress = te_fsdp.checkpoint.load(path, model, optimizer)
    for what, ours in about.items():
        if ours != progress[what]:
            stop(f"{path} has {what} {progress[what]}, this run {ours}: the batches would differ.")
    schedule.load_state_dict(progress["schedule"])
    if RANK == 0:
        print(f"resumed from {path}: step {progress['step']}, sequence {progress['position']}")
    return progress


class Log:
    """Write metrics.jsonl, a progress bar and loss.png on rank 0. Numbers of an emulated run are marked."""

    def __init__(self, options: Options, meshes: te_fsdp.Meshes, optimizer: Any, losses: list[float]) -> None:
        self.options, self.optimizer, self.losses = options, optimizer, list(losses)
        self.start, self.rates, self.last = len(losses), [], time.perf_counter()
        self.emulated = os.environ.get("TE_FSDP_EMULATION") if te_fsdp.emulation.active() else None
        self.about = {"mesh": str(meshes), "recipe": options.recipe, "emulated": self.emulated}
        if RANK:
            return
        # Rows of an earlier run stay up to the step at which this one starts.
        options.out.mkdir(parents=True, exist_ok=True)
        path = options.out / "metrics.jsonl"
        earlier = path.read_text().splitlines() if path.exists() and self.start else []
        self.file = path.open("w")
        self.file.writelines(f"{row}\n" for row in earlier if json.loads(row)["step"] < self.start)
        label = f"training (TE emulated, {self.emulated})" if self.emulated else "training"
        every = 0.1 if sys.stderr.isatty() else 10.0  # seconds between updates
        # From Python 3.14 on the default one is a named semaphore, which os._exit leaves behind.
        tqdm.set_lock(threading.RLock())
        self.bar = tqdm(total=options.steps, initial=self.start, desc=label, unit="step", mininterval=every)

    def step(self, step: int, loss: torch.Tensor, **more: torch.Tensor | float) -> float:
        """Record a step; return its loss. Waits for the GPU: log only some steps in a job where speed matters."""
        value, now = loss.item(), time.perf_counter()
        rate, self.last = self.options.batch * self.options.seq / (now - self.last), now
        self.losses.append(value)
        self.rates.append(rate)
        if RANK == 0:
            row = {"step": step, "loss": value, "loss_hex": value.hex(), "tokens_per_s": rate}
            row |= {"lr": self.optimizer.param_groups[0]["lr"]} | {name: float(x) for name, x in more.items()}
            print(json.dumps(row | self.about), file=self.file, flush=True)
            self.bar.set_postfix_str(f"loss {value:.4f}, {rate:,.0f} tokens/s", refresh=False)
            self.bar.update()
        return value

    def close(self) -> None:
        """Draw loss.png and print a summary."""
        if RANK:
            return
        self.bar.close()
        self.file.close()
        path = self.options.reference and self.options.reference / "metrics.jsonl"
        reference = [json.loads(row)["loss"] for row in path.read_text().splitlines()] if path else []
        self.draw(reference[: len(self.losses)])
        rate = sorted(self.rates)[len(self.rates) // 2]
        note = " (emulated: says nothing about speed)" if self.emulated else ""
        shown = f"loss {self.losses[self.start]:.4f} -> {self.losses[-1]:.4f}, {rate:,.0f} tokens/s{note}"
        print(f"done: step {len(self.losses)}, {shown}")
        if reference:
            gap = max(abs(a - b) for a, b in zip(self.losses, reference, strict=False))
            print(
                f"resumed at step {self.start} on {self.about['mesh']}: losses within {gap:.1e} of the",
                end=" ",
            )
            print(f"uninterrupted run; both curves and their difference: {self.options.out / 'loss.png'}")
        else:
            print(f"losses of all steps: {self.options.out / 'loss.png'}")

    def draw(self, reference: list[float]) -> None:
        """Draw the losses and, below them, their differences from a reference run."""
        figure = Figure(figsize=(7, 5.5 if reference else 4), layout="constrained")
        top, *below = figure.subplots(
            2 if reference else 1, sharex=True, squeeze=False, height_ratios=[3, 1][: 1 + bool(reference)]
        )[:, 0]
        steps = range(len(self.losses))
        if reference:
            top.plot(steps, reference, color="black", linewidth=3, alpha=0.3, label="uninterrupted run")
            below[0].axhline(0.0, color="black", linewidth=0.8)
            below[0].plot(steps, [a - b for a, b in zip(self.losses, reference, strict=True)], color="C1")
            below[0].set(ylabel="difference")
        if self.start:
            top.plot(steps[: self.start], self.losses[: self.start], color="C0", label="until the checkpoint")
            for axes in (top, *below):
                axes.axvline(self.start - 0.5, color="gray", linewidth=0.8, linestyle=":")
        top.plot(steps[self.start :], self.losses[self.start :], color="C1", label=self.about["mesh"])
        top.set(ylabel="loss (nats per byte)")
        (below or [top])[-1].set(xlabel="step")
        top.set_title(f"recipe {self.about['recipe']}", loc="left")
        if self.emulated:
            top.set_title(f"TransformerEngine emulated, arch {self.emulated}", loc="right", fontsize=8)
        top.legend()
        figure.savefig(self.options.out / "loss.png", dpi=80)


def check(options: Options, meshes: te_fsdp.Meshes) -> int:
    """Refuse options that do not fit together, before anything is built; return the microbatches of a rank."""
    tp, share = meshes.size("tp"), options.batch // meshes.data_size
    if options.batch % meshes.data_size:
        stop(
            f"--batch {options.batch} is not a multiple of {meshes.data_size} data-parallel ranks ({meshes})."
        )
    if options.micro and share % options.micro:
        stop(
            f"--batch {options.batch} is not a multiple of {meshes.data_size} ranks x --micro {options.micro}."
        )
    if options.sequence_parallel and options.seq % tp:
        stop(f"--seq {options.seq} is not a multiple of --tp {tp}, which --sequence-parallel needs.")
    if options.sequence_parallel and tp == 1 and RANK == 0:
        print("note: --sequence-parallel does nothing with --tp 1")
    if options.quantized_weights and (options.recipe == "none" or options.optimizer != "fused_adam"):
        stop("--quantized-weights needs a --recipe, and --optimizer fused_adam to keep the main weights.")
    if options.save_every and not options.save:
        stop("--save-every needs --save DIR.")
    if options.decay and options.decay <= options.warmup:
        stop(f"--decay {options.decay} must come after --warmup {options.warmup}.")
    return share // options.micro if options.micro else 1


def planned_saves(options: Options, begin: int) -> dict[int, Path]:
    """Return the steps after which a checkpoint is saved, and its path."""
    if not options.save:
        return {}
    steps = {n for n in range(begin + 1, options.steps) if options.save_every and n % options.save_every == 0}
    paths = {n: options.save / f"step-{n}" for n in sorted(steps | {options.steps})}
    taken = [str(path) for path in paths.values() if path.exists()]
    dist.barrier()  # no rank saves before all ranks have checked
    if taken:
        stop(f"{', '.join(taken)} exists already: --resume {options.save}, or remove it.")
    return paths


def portion(options: Options, meshes: te_fsdp.Meshes) -> tuple[int, int, torch.Tensor, int]:
    """Return this rank's part of the global batch: first sequence, count, positions, and ranks with the same part.

    Ranks of one tp group take the same sequences: the full ones, or one part each under sequence parallelism.
    """
    share = options.batch // meshes.data_size
    parts = meshes.size("tp") if options.sequence_parallel else 1
    tp_rank = meshes.device_mesh.get_local_rank("tp")
    places = torch.arange(options.seq, device=meshes.device).chunk(parts)[tp_rank % parts]
    return meshes.data_rank * share, share, places, meshes.size("tp") // parts


def update(options: Options, model: nn.Module, optimizer: Any, schedule: LambdaLR) -> dict[str, torch.Tensor]:
    """Clip, step, advance the schedule and clear the gradients; return the gradient norm if it was computed."""
    norm = {"grad_norm": te_fsdp.clip_grad_norm_(model, options.clip)} if options.clip else {}
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    return norm


def main(options: Options) -> None:
    """Build the model, resume if asked to, train and save."""
    meshes = te_fsdp.Meshes.build(dp_replicate=options.dp_replicate, dp_shard=options.dp_shard, tp=options.tp)
    count, text = check(options, meshes), Text(options)
    recipe = RECIPES[options.recipe] and RECIPES[options.recipe]()
    model, optimizer, schedule = build(ByteModel, te.TransformerLayer, options, meshes, recipe)
    # Saved with the model and the optimizer; the losses are for the plot of a resumed run.
    about = {"data": text.digest, "seed": options.seed, "seq": options.seq}
    progress = {"step": 0, "position": 0, "losses": [], **about}
    if options.resume:
        progress = resume(options, model, optimizer, schedule, about)
    if RANK == 0:
        print(te_fsdp.report(model))
    if progress["step"] >= options.steps:
        stop(f"nothing to do: the checkpoint is at step {progress['step']}, --steps is {options.steps}.")
    paths = planned_saves(options, progress["step"])
    log = Log(options, meshes, optimizer, progress["losses"])

    first, share, places, copies = portion(options, meshes)
    saving = None
    for step in range(progress["step"], options.steps):
        torch.manual_seed(options.seed + 7919 * step + first)  # for recipes with stochastic rounding
        tokens = text.take(progress["position"] + first, share).to(meshes.device)
        mean = torch.zeros((), dtype=torch.float64, device=meshes.device)
        for index, part in enumerate(tokens.chunk(count, dim=1)):
            with te_fsdp.microbatch(model, is_last=index == count - 1):
                with te.autocast(enabled=recipe is not None, recipe=recipe):
                    logits = model(part[places], places)
                losses = F.cross_entropy(
                    logits.flatten(0, 1).float(), part[places + 1].flatten(), reduction="sum"
                )
                loss = losses / (options.batch * options.seq)
                loss.backward()
            mean += loss.detach()
        norm = update(options, model, optimizer, schedule)

        dist.all_reduce(mean)
        progress["losses"].append(log.step(step, mean / copies, **norm))
        progress |= {"step": step + 1, "position": progress["position"] + options.batch}
        progress["schedule"] = schedule.state_dict()
        if step + 1 in paths:
            saving = te_fsdp.checkpoint.save(paths[step + 1], model, optimizer, extra=progress)

    if saving is not None:
        saving.result()  # with asynchronous=True the save would end with the process, by os._exit below
    log.close()


if __name__ == "__main__":
    main(tyro.cli(Options, console_outputs=RANK == 0))
    dist.barrier()
    dist.destroy_process_group()
    # Communication threads that are still ending when the interpreter shuts down abort it now and then.
    sys.stdout.flush()
    os._exit(0)
