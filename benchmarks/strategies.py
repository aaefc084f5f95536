"""Step time and peak memory of each sharding strategy, beside plain FSDP2's closest setting and megatron-fsdp.

    torchrun --nproc-per-node 4 benchmarks/strategies.py --out benchmarks/results/strategies-MACHINE.json

The same TransformerLayers, the same optimizer and the same tokens for all. `bf16`: fp32 main weights under bf16
compute, torch's fused AdamW. `fp8`: FP8 weights (current scaling), fp32 main weights in TE's FusedAdam. A round builds,
warms up, times and frees one variant after the other; every other round in the opposite order. Times are medians over
rounds of the slowest rank's median step; memory is the allocator's peak in those steps, of the rank with the most. Only
what stands in one table was measured side by side. Variants that a library refuses are reported with its reason. Under
emulation the script runs as a check of itself: its times then say nothing.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from machine import machine
from rich.console import Console
from rich.table import Table
from torch import nn

import te_fsdp
import te_fsdp.emulation

te_fsdp.emulation.install_from_env()

import transformer_engine.pytorch as te  # noqa: E402
from transformer_engine.common.recipe import Float8CurrentScaling  # noqa: E402

OUTER = 2


@dataclass(frozen=True)
class Variant:
    """One row of the table.

    Attributes:
        library: "te_fsdp", "FSDP2" (or torch's DDP) or "megatron-fsdp".
        strategy: Of te_fsdp's names.
        outer: None for one data-parallel axis, else the outer strategy.
    """

    library: str
    strategy: str
    outer: str | None = None

    @property
    def setting(self) -> str:
        """What rows of different libraries are compared by."""
        return self.strategy + {None: "", "no_shard": " HSDP", "optim": " HFSDP"}[self.outer]


STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
SETTINGS: list[tuple[str, str | None]] = [(name, None) for name in STRATEGIES]
SETTINGS += [("optim_grads_params", "no_shard"), ("optim_grads_params", "optim")]
VARIANTS = [Variant("te_fsdp", *setting) for setting in SETTINGS]
VARIANTS += [
    Variant("FSDP2", *setting) for setting in SETTINGS if setting[0] != "optim" and setting[1] != "optim"
]
VARIANTS += [Variant("megatron-fsdp", *setting) for setting in SETTINGS]


def arguments() -> argparse.Namespace:
    """The command line; sizes fit a GPU with 80 GiB, and small ones are the default on the CPU."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    large = torch.cuda.is_available()
    parser.add_argument("--layers", type=int, default=8 if large else 2)
    parser.add_argument("--hidden", type=int, default=4096 if large else 128)
    parser.add_argument("--ffn", type=int, default=14336 if large else 256)
    parser.add_argument("--heads", type=int, default=32 if large else 4)
    parser.add_argument("--groups", type=int, default=8 if large else 2)
    parser.add_argument("--sequence", type=int, default=4096 if large else 32)
    parser.add_argument("--batch", type=int, default=1, help="sequences per rank and microbatch")
    parser.add_argument("--microbatches", type=int, default=1)
    parser.add_argument("--steps", type=int, default=10 if large else 2, help="timed steps per round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--weights", choices=["bf16", "fp8"], nargs="+", default=["bf16", "fp8"])
    parser.add_argument("--libraries", nargs="+", default=["te_fsdp", "FSDP2", "megatron-fsdp"])
    parser.add_argument("--out", help="file for the results, JSON")
    return parser.parse_args()


class Model(nn.Sequential):
    """A stack of decoder layers."""

    def __init__(self, options: argparse.Namespace, dtype: torch.dtype, device: torch.device) -> None:
        common = {
            "num_gqa_groups": options.groups,
            "normalization": "RMSNorm",
            "activation": "swiglu",
            "bias": False,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "attn_input_format": "bshd",
            "params_dtype": dtype,
            "device": device,
            "fuse_qkv_params": True,
        }
        super().__init__(
            *(
                te.TransformerLayer(options.hidden, options.ffn, options.heads, **common)
                for _ in range(options.layers)
            )
        )


def build_te_fsdp(variant: Variant, options: argparse.Namespace, fp8: bool, device: torch.device) -> Any:
    """te_fsdp's model, optimizer and context of a microbatch."""
    meshes = te_fsdp.Meshes.build(dp_replicate=OUTER if variant.outer else 1, device_type=device.type)
    with te.quantized_model_init(enabled=fp8, recipe=Float8CurrentScaling()):
        model = Model(options, torch.bfloat16, device)
    te_fsdp.fully_shard(
        model,
        meshes,
        strategy=variant.strategy,
        outer_strategy=variant.outer or "no_shard",
        precision=te_fsdp.MixedPrecisionPolicy(),
    )
    optimizer = make_optimizer(model, fp8)
    te_fsdp.main_weights(model, optimizer)
    if variant.outer == "optim":
        te_fsdp.shard_optimizer(optimizer)
    return model, optimizer, lambda is_last: te_fsdp.microbatch(model, is_last=is_last)


def build_fsdp2(variant: Variant, options: argparse.Namespace, fp8: bool, device: torch.device) -> Any:
    """Torch's own: FSDP2 with the closest setting, DDP where nothing is sharded."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.nn.parallel import DistributedDataParallel

    with te.quantized_model_init(enabled=fp8, recipe=Float8CurrentScaling()):
        model: Any = Model(options, torch.bfloat16 if fp8 else torch.float32, device)
    if variant.strategy == "no_shard":
        model = DistributedDataParallel(model)
        optimizer = make_optimizer(model, fp8)

        @contextmanager
        def whole_microbatch(is_last: bool) -> Iterator[None]:
            unsynced = nullcontext() if is_last else model.no_sync()
            with unsynced, torch.autocast(device.type, torch.bfloat16, enabled=not fp8):
                yield

        return model, optimizer, whole_microbatch
    shape, names = ((OUTER, dist.get_world_size() // OUTER), ("replicate", "shard"))
    if variant.outer is None:
        shape, names = (dist.get_world_size(),), ("shard",)
    mesh = dist.init_device_mesh(device.type, shape, mesh_dim_names=names)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    whole = variant.strategy == "optim_grads_params"
    for unit in [*model, model]:
        fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=whole)
    optimizer = make_optimizer(model, fp8)

    def microbatch(is_last: bool) -> Any:
        model.set_requires_all_reduce(is_last)
        model.set_is_last_backward(is_last)
        if not whole:
            model.set_reshard_after_backward(is_last)
        return nullcontext()

    return model, optimizer, microbatch


def build_megatron(variant: Variant, options: argparse.Namespace, fp8: bool, device: torch.device) -> Any:
    """megatron-fsdp's."""
    from megatron_fsdp import MixedPrecisionPolicy, fully_shard

    with te.quantized_model_init(
        enabled=fp8, recipe=Float8CurrentScaling(), preserve_high_precision_init_val=fp8
    ):
        model: Any = Model(options, torch.bfloat16, device)
    outer = OUTER if variant.outer else 1
    shape = (outer, dist.get_world_size() // outer, 1)
    mesh = dist.init_device_mesh(device.type, shape, mesh_dim_names=("outer", "shard", "tp"))
    extra: dict[str, Any] = {}
    if variant.outer:
        extra = {
            "dp_outer_dim": "outer",
            "hybrid_fsdp_group": mesh["outer", "shard"]._flatten("hybrid").get_group(),
        }
        extra["outer_dp_sharding_strategy"] = variant.outer
    model, optimizer = fully_shard(
        model,
        make_optimizer(model, fp8, unfused_master=True),
        device_mesh=mesh,
        dp_shard_dim="shard",
        tp_dim="tp",
        fsdp_unit_modules=[te.TransformerLayer],
        zero_dp_strategy=variant.strategy,
        mixed_precision_policy=MixedPrecisionPolicy(torch.float32, torch.float32),
        sync_model_each_microbatch=False,
        **extra,
    )

    def microbatch(is_last: bool) -> Any:
        model.set_model_auto_sync(is_last)
        return nullcontext()

    return model, optimizer, microbatch


def make_optimizer(model: nn.Module, fp8: bool, *, unfused_master: bool = False) -> torch.optim.Optimizer:
    """Fused AdamW; TE's with main weights over FP8 weights, unless the library keeps main weights itself."""
    if fp8 and not unfused_master:
        from transformer_engine.pytorch.optimizers import FusedAdam

        return FusedAdam(model.parameters(), lr=1e-4, master_weights=True)
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


BUILDERS: dict[str, Callable[..., Any]] = {
    "te_fsdp": build_te_fsdp,
    "FSDP2": build_fsdp2,
    "megatron-fsdp": build_megatron,
}


def measure(
    variant: Variant, options: argparse.Namespace, fp8: bool, device: torch.device
) -> dict[str, float]:
    """Milliseconds of a step and peak bytes, the worst rank's of each. Collective over the world."""
    torch.manual_seed(0)
    model, optimizer, microbatch = BUILDERS[variant.library](variant, options, fp8, device)
    shape = (options.batch, options.sequence, options.hidden)
    torch.manual_seed(dist.get_rank())
    batches = [torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(options.microbatches)]

    def step() -> None:
        for number, batch in enumerate(batches):
            with (
                microbatch(number == len(batches) - 1),
                te.autocast(enabled=fp8, recipe=Float8CurrentScaling()),
            ):
                output = model(batch)
            output.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(options.steps):
        dist.barrier()
        synchronize(device)
        began = time.perf_counter()
        step()
        synchronize(device)
        times.append(1e3 * (time.perf_counter() - began))
    peak = float(torch.cuda.max_memory_allocated()) if device.type == "cuda" else 0.0
    worst = torch.tensor([statistics.median(times), peak], dtype=torch.float64, device=device)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return {"ms": worst[0].item(), "bytes": worst[1].item()}


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def attempt(variant: Variant, options: argparse.Namespace, fp8: bool, device: torch.device) -> dict[str, Any]:
    """A measurement, or the library's reason against it, on which all ranks agree: a refusal comes before any step."""
    try:
        found: dict[str, Any] = measure(variant, options, fp8, device)
    except Exception as error:
        found = {
            "refused": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300]
        }
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    return next((other for other in everyone if "refused" in other), found)


def table(results: dict[str, dict[str, Any]], weights: str) -> Table:
    """Rows by setting; ratios to FSDP2's row of the same setting."""
    shown = Table(title=f"{weights} weights")
    for header in ("setting", "library", "step, ms", "time / FSDP2", "peak, GiB", "memory / FSDP2"):
        shown.add_column(header, justify="left" if header in ("setting", "library") else "right")
    for variant in sorted(VARIANTS, key=lambda v: SETTINGS.index((v.strategy, v.outer))):
        row = results.get(f"{weights} {variant.setting} {variant.library}")
        if row is None:
            continue
        if "refused" in row:
            shown.add_row(variant.setting, variant.library, row["refused"][:60], "", "", "")
            continue
        base = results.get(f"{weights} {variant.setting} FSDP2", {})
        ratios = [f"{row[key] / base[key]:.2f}" if base.get(key) else "" for key in ("ms", "bytes")]
        gib = f"{row['bytes'] / 2**30:.2f}"
        shown.add_row(variant.setting, variant.library, f"{row['ms']:.1f}", ratios[0], gib, ratios[1])
    return shown


def main() -> None:
    """Measure, print, write down."""
    options = arguments()
    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    rounds: dict[str, list[dict[str, Any]]] = {}
    chosen = [v for v in VARIANTS if v.library in options.libraries]
    for number in range(options.rounds):
        for weights in options.weights:
            for variant in chosen[:: 1 if number % 2 == 0 else -1]:
                key = f"{weights} {variant.setting} {variant.library}"
                if any("refused" in found for found in rounds.get(key, [])):
                    continue
                rounds.setdefault(key, []).append(attempt(variant, options, weights == "fp8", device))
                if dist.get_rank() == 0:
                    print(f"round {number}: {key}: {rounds[key][-1]}", flush=True)
        if dist.get_rank() == 0:  # after every round: a machine may be taken away
            write_down(options, device, rounds)
    if dist.get_rank() == 0:
        for weights in options.weights:
            Console(width=140).print(table(medians(rounds), weights))
    dist.barrier()
    dist.destroy_process_group()


def medians(rounds: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Of each variant the medians over the rounds so far, or the reason against it."""
    return {
        key: next((f for f in found if "refused" in f), None)
        or {name: statistics.median(f[name] for f in found) for name in ("ms", "bytes")}
        for key, found in rounds.items()
    }


def write_down(
    options: argparse.Namespace, device: torch.device, rounds: dict[str, list[dict[str, Any]]]
) -> None:
    """The results as JSON."""
    if options.out:
        sizes = {key: value for key, value in vars(options).items() if key != "out"}
        whole = {"machine": machine(device), "ranks": dist.get_world_size(), "options": sizes}
        text = json.dumps({**whole, "results": medians(rounds), "rounds": rounds}, indent=1)
        Path(options.out).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
