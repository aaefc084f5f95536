"""What benchmarks/strategies.py measures: variants one after the other, on all ranks of a torchrun.

    torchrun --nproc-per-node N benchmarks/strategies_worker.py OPTIONS RESULTS

OPTIONS is a JSON object with the driver's options, and `chosen` (names of libraries), `chosen_weights` and
`backwards` (whether the last variant comes first). Rank 0 appends one JSON line to RESULTS for each variant.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from machine import join
from strategies import OUTER, Variant, variants_of
from torch import nn

import te_fsdp
import te_fsdp.emulation

te_fsdp.emulation.install_from_env()

import transformer_engine.pytorch as te  # noqa: E402
from transformer_engine.common.recipe import Float8CurrentScaling  # noqa: E402


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


class CastModel(Model):
    """The same with fp32 weights, computing in bf16 by torch's autocast."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """All layers, under autocast."""
        with torch.autocast(x.device.type, torch.bfloat16):
            return super().forward(x)


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
        te_fsdp.shard_optimizer(optimizer, overlap_gather=True)
    return model, optimizer, lambda is_last: te_fsdp.microbatch(model, is_last=is_last)


def build_fsdp2(variant: Variant, options: argparse.Namespace, fp8: bool, device: torch.device) -> Any:
    """Torch's own: FSDP2 with the closest setting, DDP where nothing is sharded."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.nn.parallel import DistributedDataParallel

    with te.quantized_model_init(enabled=fp8, recipe=Float8CurrentScaling()):
        ddp = variant.strategy == "no_shard"
        kind = CastModel if ddp and not fp8 else Model
        model: Any = kind(options, torch.bfloat16 if fp8 else torch.float32, device)
    if ddp:
        model = DistributedDataParallel(model)
        optimizer = make_optimizer(model, fp8)
        return model, optimizer, lambda is_last: nullcontext() if is_last else model.no_sync()
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
    """Of the worst rank: milliseconds of a step, peak bytes over those before, and seconds of setting up.

    Python's garbage collector does not run in timed steps: it would stop one rank, for which all others wait.
    Collective over the world.
    """
    gc.collect()  # once more: DDP's garbage goes in two steps
    synchronize(device)
    before = held(device)
    began = time.perf_counter()
    torch.manual_seed(0)
    model, optimizer, microbatch = BUILDERS[variant.library](variant, options, fp8, device)
    shape = (options.batch, options.sequence, options.hidden)
    torch.manual_seed(dist.get_rank())
    batches = [torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(options.microbatches)]

    def step() -> None:
        for number, batch in enumerate(batches):
            with microbatch(number == len(batches) - 1):
                with te.autocast(enabled=fp8, recipe=Float8CurrentScaling()):
                    output = model(batch)
                output.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    synchronize(device)
    setup = time.perf_counter() - began
    for _ in range(3):
        step()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    gc.collect()
    gc.disable()
    times = timed(step, options.steps, device)
    peak = torch.cuda.max_memory_allocated() - before if device.type == "cuda" else 0
    found = {"ms": statistics.median(times), "bytes": peak, "setup_s": setup}
    worst = torch.tensor(list(found.values()), dtype=torch.float64, device=device)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return dict(zip(found, worst.tolist(), strict=True)) | {"held_before": float(before)}


def timed(step: Callable[[], None], count: int, device: torch.device) -> list[float]:
    """Milliseconds from the end of one step to the end of the next, on the device.

    Nothing waits for the device in between: what a step leaves to do while the next one begins is in that one's time.
    Collective over the world.
    """
    dist.barrier()
    synchronize(device)
    ends: list[Any] = []
    for _ in range(count + 1):
        step()
        if device.type == "cuda":
            ends.append(torch.cuda.Event(enable_timing=True))
            ends[-1].record()
        else:
            ends.append(time.perf_counter())
    synchronize(device)
    pairs = itertools.pairwise(ends)
    if device.type == "cuda":
        return [before.elapsed_time(after) for before, after in pairs]
    return [1e3 * (after - before) for before, after in pairs]


def held(device: torch.device) -> int:
    """Bytes that the allocator has given out: what earlier variants have not let go of is not the next one's."""
    return torch.cuda.memory_allocated() if device.type == "cuda" else 0


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
    gc.enable()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    return next((other for other in everyone if "refused" in other), found)


def main() -> None:
    """Measure each variant, write each down."""
    options = argparse.Namespace(**json.loads(sys.argv[1]))
    device = join()
    for variant in variants_of(options.chosen)[:: -1 if options.backwards else 1]:
        found = attempt(variant, options, options.chosen_weights == "fp8", device)
        if dist.get_rank() == 0:
            line = json.dumps({"variant": variant.key(options.chosen_weights), **found})
            with Path(sys.argv[2]).open("a", encoding="utf-8") as results:
                print(line, file=results)
            print(line, flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
