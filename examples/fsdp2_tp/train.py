"""A byte-level language model of TransformerEngine layers on FSDP2 x TP, resumed on another mesh.

Train on 2 x FSDP, 2 x TP, save, and go on with 4 x FSDP. On NVIDIA GPUs as it stands; on the CPU after
`export TE_FSDP_EMULATION=10.0 OMP_NUM_THREADS=1` (TransformerEngine emulated: losses count, speed does not):

    torchrun --standalone --nproc-per-node 4 examples/fsdp2_tp/train.py --tp 2 --steps 20 --save out/ckpt
    torchrun --standalone --nproc-per-node 4 examples/fsdp2_tp/train.py --tp 1 --steps 40 --resume out/ckpt

The text is the Python standard library's own source, or --data FILE_OR_DIR. README.md here tells more.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import sysconfig
import warnings
from collections.abc import Mapping
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
from tqdm import tqdm

import te_fsdp
import te_fsdp.emulation
from te_fsdp.integrations.training_log import JsonLines, TrainingLog

RANK = int(os.environ.get("RANK", "0"))


def stop(why: str) -> NoReturn:
    """End this process with a message, printed once; call on all ranks."""
    raise SystemExit(f"{Path(sys.argv[0]).name}: {why}" if RANK == 0 else 1)


# Advice against FSDP2, whose gathers need several queues; TE gives it whenever it sees tensor parallelism.
warnings.filterwarnings("ignore", message=".*CUDA_DEVICE_MAX_CONNECTIONS")
# Attention kernels that sum in a fixed order: a resumed run repeats every bit. Read when TE is imported.
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
    """Copies of the sharded model (HSDP)."""
    dp_shard: int = -1
    """FSDP2 shards each weight over so many ranks; -1: all that the other axes leave."""
    tp: int = 1
    """Tensor-parallel ranks."""
    sequence_parallel: bool = False
    """Split the sequence over the tensor-parallel ranks outside attention and MLP."""

    recipe: Literal["none", "delayed", "current", "block", "mxfp8", "nvfp4"] = "none"
    """TransformerEngine's quantization recipe; none: bf16."""
    quantized_weights: bool = False
    """Hold the layers' weights in the recipe's format alone (main weights live in --optimizer fused_adam)."""
    optimizer: Literal["adamw", "fused_adam"] = "adamw"
    """adamw: torch's, fp32 weights, bf16 compute. fused_adam: TE's, bf16 weights, fp32 main weights."""
    lr: float = 1e-3
    """Learning rate."""

    layers: int = 2
    """TransformerLayers."""
    hidden: int = 256
    """Width. Quantized weights need whole blocks in every shard: mxfp8 32, block 128, nvfp4 16 rows."""
    ffn: int = 512
    """Width inside the MLP."""
    heads: int = 4
    """Attention heads."""
    activation: Literal["swiglu", "gelu"] = "swiglu"
    """The MLP's activation."""

    data: Path = Path(sysconfig.get_path("stdlib"))
    """A file, or a folder whose files that match --pattern are read in the order of their names."""
    pattern: str = "*.py"
    """Which files of a folder."""
    megabytes: float = 4.0
    """Read at most this much text."""
    seq: int = 128
    """Bytes in a sequence."""
    batch: int = 16
    """Sequences in a step, over all ranks."""
    steps: int = 100
    """Train until this step, counted from the first run's beginning."""
    seed: int = 0
    """Of weights and of the order of the data."""

    save: Path | None = None
    """Save checkpoints into this folder: at the end, and every --save-every steps."""
    save_every: int = 0
    """Steps between checkpoints; 0: only at the end."""
    resume: Path | None = None
    """A checkpoint, or a folder of checkpoints whose newest whole one is taken. The mesh may be another."""
    out: Path = Path("out/fsdp2_tp")
    """Folder of metrics.jsonl and loss.png."""


class Text:
    """Bytes cut into windows, visited in an order that depends on the seed alone, never on the mesh."""

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
            stop(f"{options.data} holds {len(data)} bytes that match; a sequence of {self.seq} needs more.")
        self.bytes = torch.frombuffer(data, dtype=torch.uint8)
        self.digest = hashlib.sha256(data).hexdigest()[:16]

    def take(self, position: int, count: int) -> torch.Tensor:
        """``count`` windows from ``position`` on, of an endless shuffled stream: int64 (seq + 1, count)."""
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
    """Bytes in, logits of the next byte out. With sequence parallelism a tp rank sees part of each."""

    def __init__(self, options: Options, meshes: te_fsdp.Meshes, dtype: torch.dtype) -> None:
        super().__init__()
        split = options.sequence_parallel and meshes.size("tp") > 1
        self.embedding = nn.Embedding(256, options.hidden, dtype=dtype, device="meta")
        self.positions = nn.Embedding(options.seq, options.hidden, dtype=dtype, device="meta")
        self.layers = nn.ModuleList(self.layer(options, meshes, dtype, split) for _ in range(options.layers))
        self.norm = te.RMSNorm(options.hidden, sequence_parallel=split, dtype=dtype, device="meta")
        self.head = nn.Linear(options.hidden, 256, bias=False, dtype=dtype, device="meta")
        for module in (self.embedding, self.positions, self.head):
            # A tp rank's gradient stems from its part of the sequence: te_fsdp sums those marked so over tp.
            module.weight.sequence_parallel = split

    def layer(self, options: Options, meshes: te_fsdp.Meshes, dtype: torch.dtype, split: bool) -> nn.Module:
        """One of the layers: (s, b, hidden) -> the same."""
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
            fuse_qkv_params=True,  # TE wants one QKV weight when weights are quantized
            sequence_parallel=split,
            params_dtype=dtype,
            device="meta",
            **meshes.te_kwargs(),
        )

    def forward(self, tokens: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Tokens (s, b) at the places (s,) of the sequence -> logits (s, b, 256)."""
        x = self.embedding(tokens) + self.positions(places)[:, None]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def build(
    kind: type[ByteModel],
    unit: type[nn.Module],
    options: Options,
    meshes: te_fsdp.Meshes,
    recipe: te_recipe.Recipe | None,
) -> tuple[nn.Module, Any]:
    """The model, sharded unit by unit and initialised, and its optimizer, in the only order that works."""
    fused = options.optimizer == "fused_adam"
    with te.quantized_model_init(options.quantized_weights, recipe, preserve_high_precision_init_val=True):
        model = kind(options, meshes, torch.bfloat16 if fused else torch.float32)
    te_fsdp.fully_shard(
        model,
        meshes,
        units=[unit],
        mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        # A rank's loss is its share of the global mean. Gradients are then of one size on every mesh, which delayed
        # scaling needs when it resumes.
        average_gradients=False,
    )
    te_fsdp.materialize(model, seed=options.seed)
    adam = {"lr": options.lr, "betas": (0.9, 0.95), "weight_decay": 0.1}
    if not fused:
        return model, torch.optim.AdamW(model.parameters(), **adam)
    optimizer = te.optimizers.FusedAdam(model.parameters(), master_weights=True, **adam)
    # Main weights begin at the values drawn. On a point of the format's grid, where quantizing left the weights, every
    # small update would be rounded away, and learning would begin late.
    te_fsdp.main_weights(model, optimizer)
    return model, optimizer


def resume(options: Options, model: nn.Module, optimizer: Any, about: dict[str, Any]) -> dict[str, Any]:
    """Load --resume into model and optimizer; returns the progress that was saved with them."""
    path = te_fsdp.checkpoint.latest(options.resume) or options.resume
    progress = te_fsdp.checkpoint.load(path, model, optimizer)
    for what, ours in about.items():
        if ours != progress[what]:
            stop(f"{path} has {what} {progress[what]}, this run {ours}: other batches would follow.")
    if RANK == 0:
        print(f"resumed from {path}: step {progress['step']}, sequence {progress['position']}")
    return progress


class Progress:
    """Rank 0's metrics.jsonl, progress bar and loss plot. Numbers of an emulated run are marked so."""

    def __init__(self, options: Options, meshes: te_fsdp.Meshes, losses: list[float]) -> None:
        self.emulated = os.environ.get("TE_FSDP_EMULATION") if te_fsdp.emulation.active() else None
        self.about = {"mesh": str(meshes), "recipe": options.recipe, "emulated": self.emulated}
        self.losses, self.start, self.rates = losses, len(losses), []
        self.out = options.out
        self.out.mkdir(parents=True, exist_ok=True)
        # Another run's rows stay as far as this one builds upon them.
        path = self.out / "metrics.jsonl"
        earlier = path.read_text().splitlines() if path.exists() and self.start else []
        path.write_text("".join(f"{row}\n" for row in earlier if json.loads(row)["step"] < self.start))
        self.lines = JsonLines(path, self.about)
        label = f"training (TE emulated, {self.emulated})" if self.emulated else "training"
        every = 0.1 if sys.stderr.isatty() else 10.0  # seconds between updates
        self.bar = tqdm(total=options.steps, initial=self.start, desc=label, unit="step", mininterval=every)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Add one step: what makes this a writer of `TrainingLog`."""
        loss, rate = values["loss"], values["tokens_per_s"]
        self.losses.append(loss)
        self.rates.append(rate)
        self.lines.write(step, {**values, "loss_hex": loss.hex()})
        self.bar.set_postfix_str(f"loss {loss:.4f}, {rate:,.0f} tokens/s", refresh=False)
        self.bar.update()

    def close(self) -> None:
        """Draw loss.png and print the summary line."""
        self.bar.close()
        self.lines.close()
        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.subplots()
        if self.start:
            axes.plot(self.losses[: self.start], color="gray", label="before the checkpoint")
            axes.axvline(self.start - 0.5, color="gray", linewidth=0.8, linestyle=":")
        axes.plot(range(self.start, len(self.losses)), self.losses[self.start :], label=self.about["mesh"])
        axes.set(xlabel="step", ylabel="loss (nats per byte)")
        axes.set_title(f"recipe {self.about['recipe']}", loc="left")
        if self.emulated:
            axes.set_title(f"TransformerEngine emulated, arch {self.emulated}", loc="right", fontsize=8)
        axes.legend()
        figure.savefig(self.out / "loss.png", dpi=80)
        rate = sorted(self.rates)[len(self.rates) // 2]
        note = " (emulated: says nothing about speed)" if self.emulated else ""
        step, first, last = len(self.losses), self.losses[self.start], self.losses[-1]
        shown = f"loss {first:.4f} -> {last:.4f}, {rate:,.0f} tokens/s{note}"
        print(f"done: step {step}, {shown}, see {self.out}")


def start_log(options: Options, meshes: te_fsdp.Meshes, optimizer: Any, losses: list[float]) -> TrainingLog:
    """What tells the numbers of each step, and keeps them on rank 0."""
    # TensorBoard(options.out), WandB(project=...) of the same module are further writers.
    writers = [Progress(options, meshes, list(losses))] if RANK == 0 else []
    return TrainingLog(writers, every=1, optimizer=optimizer, tokens_per_step=options.batch * options.seq)


def check(options: Options, meshes: te_fsdp.Meshes) -> None:
    """Refuse options that do not go together, before anything is built."""
    tp = meshes.size("tp")
    if options.batch % meshes.data_size:
        stop(
            f"--batch {options.batch} does not divide over {meshes.data_size} data-parallel ranks ({meshes})."
        )
    if options.sequence_parallel and options.seq % tp:
        stop(f"--seq {options.seq} does not divide over --tp {tp}, which --sequence-parallel needs.")
    if options.sequence_parallel and tp == 1 and RANK == 0:
        print("note: --sequence-parallel does nothing with --tp 1")
    if options.quantized_weights and (options.recipe == "none" or options.optimizer != "fused_adam"):
        stop("--quantized-weights needs a --recipe, and --optimizer fused_adam to keep the main weights.")
    if options.save_every and not options.save:
        stop("--save-every needs --save DIR.")


def planned_saves(options: Options, begin: int) -> dict[int, Path]:
    """Steps to save after, and where."""
    if not options.save:
        return {}
    steps = {n for n in range(begin + 1, options.steps) if options.save_every and n % options.save_every == 0}
    paths = {n: options.save / f"step-{n}" for n in sorted(steps | {options.steps})}
    taken = [str(path) for path in paths.values() if path.exists()]
    dist.barrier()  # nobody saves before all have looked
    if taken:
        stop(f"{', '.join(taken)} exists already: --resume {options.save}, or remove it.")
    return paths


def portion(options: Options, meshes: te_fsdp.Meshes) -> tuple[int, int, torch.Tensor, int]:
    """This rank's sequences of the global batch (first, how many), its places in each, how many ranks share them.

    Ranks of one tp group take the same sequences: whole ones, or one part each with sequence parallelism.
    """
    tp_rank = meshes.device_mesh.get_local_rank("tp")
    share = options.batch // meshes.data_size
    first = meshes.data_rank * share
    parts = meshes.size("tp") if options.sequence_parallel else 1
    places = torch.arange(options.seq, device=meshes.device).chunk(parts)[tp_rank % parts]
    return first, share, places, meshes.size("tp") // parts


def main(options: Options) -> None:
    """Build, maybe resume, train, save."""
    meshes = te_fsdp.Meshes.build(dp_replicate=options.dp_replicate, dp_shard=options.dp_shard, tp=options.tp)
    check(options, meshes)
    text = Text(options)
    recipe = RECIPES[options.recipe] and RECIPES[options.recipe]()
    model, optimizer = build(ByteModel, te.TransformerLayer, options, meshes, recipe)
    # What a checkpoint keeps beside model and optimizer; the losses for the plot of a resumed run.
    about = {"data": text.digest, "seed": options.seed, "seq": options.seq}
    progress = {"step": 0, "position": 0, "losses": [], **about}
    if options.resume:
        progress = resume(options, model, optimizer, about)
    if RANK == 0:
        print(te_fsdp.report(model))
    if progress["step"] >= options.steps:
        stop(f"nothing to do: the checkpoint is at step {progress['step']}, --steps is {options.steps}.")
    paths = planned_saves(options, progress["step"])
    log = start_log(options, meshes, optimizer, progress["losses"])

    first, share, places, copies = portion(options, meshes)
    for step in range(progress["step"], options.steps):
        torch.manual_seed(options.seed + 7919 * step + first)  # for recipes that round stochastically
        tokens = text.take(progress["position"] + first, share).to(meshes.device)
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            logits = model(tokens[places], places)
        total = F.cross_entropy(logits.flatten(0, 1).float(), tokens[places + 1].flatten(), reduction="sum")
        loss = total / (options.batch * options.seq)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

        mean = loss.detach().double()
        dist.all_reduce(mean)
        told = log.step(step, loss=mean / copies)
        progress["losses"].append(told["loss"])
        progress["step"], progress["position"] = step + 1, progress["position"] + options.batch
        if step + 1 in paths:
            te_fsdp.checkpoint.save(paths[step + 1], model, optimizer, extra=progress)

    log.close()


if __name__ == "__main__":
    main(tyro.cli(Options, console_outputs=RANK == 0))
    dist.barrier()
    dist.destroy_process_group()
    # Communication threads that are still ending when the interpreter shuts down abort it now and then.
    sys.stdout.flush()
    os._exit(0)
