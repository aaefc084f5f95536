"""The ranks of benchmarks/step.py: rows one after the other, each one written down when it is known.

    torchrun --nproc-per-node N benchmarks/step_worker.py OPTIONS RESULTS

OPTIONS is a JSON object with the driver's options, `rows` (library, weights, setting of each) and `deadline`
(seconds since 1970 after which no row begins). Rank 0 appends JSON lines to RESULTS: {"begins": place} before and
{"place": place, ...} after each row.
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
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from machine import join
from step import Variant
from step_profile import profile

import te_fsdp
import te_fsdp.emulation

te_fsdp.emulation.install_from_env()

import transformer_engine.pytorch as te  # noqa: E402
from step_models import BUILDERS, Trained  # noqa: E402
from transformer_engine.common.recipe import Float8CurrentScaling  # noqa: E402


def loop_of(variant: Variant, trained: Trained) -> Callable[..., torch.Tensor]:
    """Return a function that runs forward and backward of all microbatches and returns the last loss."""
    enabled, recipe = variant.weights != "bf16", Float8CurrentScaling()

    def forward_backward(*batches: torch.Tensor) -> torch.Tensor:
        for number, batch in enumerate(batches):
            with trained.microbatch(number == len(batches) - 1):
                with te.autocast(enabled=enabled, recipe=recipe):
                    loss = trained.model(batch)
                loss.backward()
        return loss.detach()

    return forward_backward


def batches_of(variant: Variant, options: argparse.Namespace, device: torch.device) -> list[torch.Tensor]:
    """Return this rank's microbatches: tokens with a vocabulary, else activations (sequence first)."""
    tp = variant.asked.tp
    torch.manual_seed(dist.get_rank())  # over tp, too, each has its part of the tokens
    length = options.sequence // tp  # sequence parallel
    shape = (length, options.batch)
    if options.vocabulary:
        make = lambda: torch.randint(options.vocabulary, shape, device=device)  # noqa: E731
    else:
        make = lambda: torch.randn(*shape, options.hidden, device=device, dtype=torch.bfloat16)  # noqa: E731
    return [make() for _ in range(options.microbatches)]


def step_of(
    variant: Variant, trained: Trained, batches: list[torch.Tensor]
) -> tuple[Callable[[], Any], te_fsdp.GraphedStep | None]:
    """Return a step, and what records it."""
    loop = loop_of(variant, trained)
    if variant.library == "te_fsdp graph":
        recorded = te_fsdp.graphed_step(trained.model, trained.optimizer, loop, warmup=2)
        return lambda: recorded(*batches), recorded

    def step() -> None:
        loop(*batches)
        if trained.updated is not None:
            for parameter in trained.model.parameters():
                if parameter not in trained.updated:
                    parameter.grad = None
        trained.optimizer.step()
        trained.optimizer.zero_grad()

    return step, None


def measure(variant: Variant, options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Return the slowest rank's step times, host times and peak GiB. Collective over the world.

    Python's garbage collector does not run in timed steps: it would stop one rank, for which all others wait.
    """
    gc.collect()  # a second time: DDP's reference cycles need two collections
    synchronize(device)
    before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
    torch.manual_seed(0)
    trained = BUILDERS[variant.library](variant, options, device)
    step, recorded = step_of(variant, trained, batches_of(variant, options, device))
    # Two of a recorded step are eager, the third records. On GPUs te_fsdp delays its eighth eager step once, to measure
    # whether the host sets the pace, and the step after it finds the host ahead.
    watched = device.type == "cuda" and variant.library in ("te_fsdp", "te_fsdp units")
    for _ in range(options.warmup or (10 if watched else 4)):
        step()
    if recorded is not None and recorded.why_eager:
        return {"reason": f"not recorded: {recorded.why_eager}"}
    if trained.graphed is not None and trained.graphed.why_eager:
        return {"reason": f"not recorded: {next(iter(trained.graphed.why_eager.values()))}"}
    synchronize(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    gc.collect()
    gc.disable()
    times, hosts = timed(step, options.steps, device), issued(step, device, min(3, options.steps))
    peak = (torch.cuda.max_memory_allocated() - before) / 2**30 if device.type == "cuda" else 0.0
    if variant.library.startswith("te_fsdp"):  # torch does not count what other ranks read
        peak += te_fsdp.report(trained.model).shared_bytes / 2**30
    worst = torch.tensor([*times, statistics.median(hosts), peak], dtype=torch.float64, device=device)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    *times, host, peak = worst.tolist()
    results = {"times_ms": times, "host_ms": host, "peak_gib": peak}
    if options.profiled:
        results["profile"] = profile(step)
        synchronize(device)
    if recorded is not None:
        results["optimizer_eager"] = recorded.why_step_eager
        recorded.forget()
    if trained.graphed is not None:
        trained.graphed.forget()
    return results


def timed(step: Callable[[], Any], count: int, device: torch.device) -> list[float]:
    """Return the milliseconds from the end of one step to the end of the next, on the device.

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


def issued(step: Callable[[], Any], device: torch.device, count: int = 3) -> list[float]:
    """Return the milliseconds that Python needs to issue a step, from an idle device. Collective over the world."""
    results = []
    for _ in range(count):
        synchronize(device)
        dist.barrier()
        began = time.perf_counter()
        step()
        results.append(1e3 * (time.perf_counter() - began))
    synchronize(device)
    return results


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def attempt(variant: Variant, options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Return a measurement, or a reason on which all ranks agree."""
    try:
        result = measure(variant, options, device)
    except Exception as error:
        lines = str(error).splitlines() or [""]
        result = {"reason": f"{type(error).__name__}: {lines[0]}"[:300]}
    gc.enable()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, result)
    return next((other for other in everyone if "reason" in other), result)


def main() -> None:
    """Measure rows until none is left, or the time is up."""
    options = argparse.Namespace(**json.loads(sys.argv[1]))
    device = join()

    def say(line: dict[str, Any]) -> None:
        if dist.get_rank() == 0:
            with Path(sys.argv[2]).open("a", encoding="utf-8") as results:
                print(json.dumps(line), file=results)

    for place, words in enumerate(options.rows):
        late = [time.time() > options.deadline]
        dist.broadcast_object_list(late, src=0)
        if late[0]:
            break
        say({"begins": place})
        say({"place": place, **attempt(Variant(*words), options, device)})
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
