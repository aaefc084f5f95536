"""Experts as FSDP2 units, compared with weights that gather themselves by TransformerEngine's `DistributedWeight`.

    torchrun --nproc-per-node 4 benchmarks/weight_gathers.py --out benchmarks/results/weight-gathers-MACHINE.json
    TE_FSDP_EMULATION=9.0 torchrun --nproc-per-node 2 benchmarks/weight_gathers.py     # a check of the script

Layers of experts (GroupedLinear, SiLU, GroupedLinear), forward and backward, bf16 weights sharded over all ranks:

    units           te_fsdp, one FSDP2 unit per layer, NCCL
    units default   te_fsdp with its own choice of transport
    weights         the first weight of each GroupedLinear gathers all of them in one collective when the GEMM needs
                    them, again in backward, and reduce-scatters the gradients
    weights ahead   the same, with the next module's all-gather and each reduction on separate streams

In the last two rows every rank stores complete experts, so all-gathers and reductions need no copies. Before a row is
timed, its gradients are compared with those of unsharded layers. `host_ms` is the time to issue a step from an idle
device.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from machine import join, machine
from torch import nn
from torch.distributed.tensor import DTensor

import te_fsdp
import te_fsdp.emulation

te_fsdp.emulation.install_from_env()

import transformer_engine.pytorch as te  # noqa: E402

ROWS = ("units", "units default", "weights", "weights ahead")
#: Relative distance of bf16 gradients: a sum of at most 8 ranks is rounded 8 times, by 2^-9 each.
NEAR = 8 * 2**-9


class Experts(nn.Module):
    """A layer of experts with a residual connection; each expert gets the same number of tokens."""

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        super().__init__()
        common = {"bias": False, "params_dtype": torch.bfloat16, "device": device}
        self.up = te.GroupedLinear(options.experts, options.hidden, options.ffn, **common)
        self.down = te.GroupedLinear(options.experts, options.ffn, options.hidden, **common)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (tokens, hidden) to the same shape."""
        splits = [x.shape[0] // self.up.num_gemms] * self.up.num_gemms
        return x + self.down(F.silu(self.up(x, splits)), splits)


class Group:
    """The weights of one GroupedLinear. This rank stores consecutive complete experts.

    Args:
        module: The GroupedLinear, whose parameters are replaced.
        order: Groups in the order of forward, to which this one is added.
        ahead: Streams of gathers and of reductions; ``None``: all runs on the current stream.
    """

    def __init__(self, module: Any, order: list[Group], ahead: tuple[Any, Any] | None) -> None:
        self.order, self.place, self.ahead = order, len(order), ahead
        order.append(self)
        ranks, rank = dist.get_world_size(), dist.get_rank()
        weights = [getattr(module, f"weight{n}") for n in range(module.num_gemms)]
        self.shape, own = weights[0].shape, len(weights) // ranks
        self.shard = torch.stack([w.detach() for w in weights[rank * own : (rank + 1) * own]])
        self.parameters: list[Any] = []
        for n in range(len(weights)):
            is_own = n // own == rank
            local = self.shard[n - rank * own] if is_own else self.shard.new_empty(0, self.shape[1])
            parameter: Any = nn.Parameter(local.as_subclass(Weight))
            parameter.group = self
            module.register_parameter(f"weight{n}", parameter)
            self.parameters.append(parameter)
        self.own = self.parameters[rank * own : (rank + 1) * own]
        self._pending: tuple[torch.Tensor, Any] | None = None

    def start(self) -> None:
        """Start the all-gather of the weights. Collective over the world."""
        stream = self.ahead[0] if self.ahead else None
        if stream:  # else a host that is ahead gathers all modules at once
            stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream) if stream else nullcontext():
            full = self.shard.new_empty(len(self.parameters), *self.shape)
            dist.all_gather_into_tensor(full, self.shard)
            self._pending = full, stream.record_event() if stream else None

    def take(self, following: int) -> list[torch.Tensor]:
        """Return all weights; start the gather of the group that is ``following`` places further."""
        if self._pending is None:
            self.start()
        assert self._pending is not None
        (full, event), self._pending = self._pending, None
        place = self.place + following
        if self.ahead and 0 <= place < len(self.order):
            self.order[place].start()
        if event is not None:
            torch.cuda.current_stream().wait_event(event)
            full.record_stream(torch.cuda.current_stream())
        return [weight.requires_grad_() for weight in full.unbind()]

    def reduce(self, gradients: list[torch.Tensor]) -> list[None]:
        """Reduce-scatter gradients, and assign the mean to this rank's parameters. Collective over the world."""
        stream = self.ahead[1] if self.ahead else None
        if stream:
            stream.wait_stream(torch.cuda.current_stream())
        # TransformerEngine computes the gradients of a module in one buffer, which needs no copy.
        strides = self.shape.numel(), self.shape[1], 1
        full = gradients[0].as_strided((len(gradients), *self.shape), strides)
        with torch.cuda.stream(stream) if stream else nullcontext():
            mean = torch.empty_like(self.shard)
            dist.reduce_scatter_tensor(mean, full, op=dist.ReduceOp.SUM)
            mean /= dist.get_world_size()
        if stream:
            full.record_stream(stream)
        for parameter, gradient in zip(self.own, mean.unbind(), strict=True):
            parameter.grad = gradient
        return [None] * len(gradients)


class Weight(torch.Tensor):
    """A parameter that implements TransformerEngine's ``DistributedWeight``; the first of a module acts for all."""

    is_distributed_weight = True
    group: Group

    def materialize_group_for_forward(self) -> list[torch.Tensor]:
        """Return all weights of the module."""
        return self.group.take(1)

    def materialize_group_for_backward(self) -> list[torch.Tensor]:
        """Return all weights of the module again."""
        return self.group.take(-1)

    def finalize_group_grads(self, wgrads: list[torch.Tensor]) -> list[None]:
        """Reduce the gradients of all weights of the module."""
        return self.group.reduce(wgrads)

    def grad_buffer(self) -> torch.Tensor:
        """Return a buffer for fused accumulation, an option that this benchmark does not set."""
        return torch.empty(self.group.shape, dtype=self.dtype, device=self.device)


def build(
    row: str, options: argparse.Namespace, device: torch.device
) -> tuple[nn.Module, Callable[[], None]]:
    """Return the model of a row, and a function that waits for its reductions."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Experts(options, device) for _ in range(options.layers)))
    if row.startswith("units"):
        meshes = te_fsdp.Meshes.build(device_type=device.type)
        transport = "auto" if row == "units default" else "nccl"
        te_fsdp.fully_shard(model, meshes, units=[Experts], transport=transport, checks="setup")
        return model, lambda: None
    streams = None
    if row == "weights ahead" and device.type == "cuda":
        streams = torch.cuda.Stream(), torch.cuda.Stream()
    order: list[Group] = []
    for layer in model:
        for module in (layer.up, layer.down):
            Group(module, order, streams)

    def wait() -> None:
        for stream in streams or ():
            torch.cuda.current_stream().wait_stream(stream)

    return model, wait


def compare(model: nn.Module, options: argparse.Namespace, x: torch.Tensor) -> None:
    """Raise if a gradient is missing, differs from the mean of unsharded layers, or equals this rank's own."""
    torch.manual_seed(0)
    reference = nn.Sequential(*(Experts(options, x.device) for _ in range(options.layers)))
    reference(x).float().square().mean().backward()
    wrong, compared = [], 0
    for name, expected in reference.named_parameters():
        assert expected.grad is not None
        own = expected.grad.float()
        mean = own.clone()
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
        parameter: Any = model.get_parameter(name)
        if not parameter.numel():  # another rank has the expert
            continue
        if parameter.grad is None:
            wrong.append(f"{name}: no gradient")
            continue
        gradient = parameter.grad
        if isinstance(gradient, DTensor):
            gradient = gradient.full_tensor()
        compared += 1
        distance, control = (float((g - mean).norm() / mean.norm()) for g in (gradient.float(), own))
        if distance > NEAR:
            wrong.append(f"{name}: {distance:.3g}")
        if control < 2 * NEAR:  # the comparison would not notice a reduction that is left out
            wrong.append(f"{name}: this rank's own gradient is as near as {control:.3g}")
    if wrong or not compared:
        raise AssertionError(f"{compared} gradients compared, wrong: {wrong}")


def measure(row: str, options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Return times and peak memory of a row. Collective over the world."""
    cuda = device.type == "cuda"
    synchronize = torch.cuda.synchronize if cuda else lambda: None
    gc.collect()
    base = torch.cuda.memory_allocated() if cuda else 0
    model, wait = build(row, options, device)
    torch.manual_seed(1 + dist.get_rank())
    x = torch.randn(options.tokens, options.hidden, device=device, dtype=torch.bfloat16)

    def step() -> None:
        model.zero_grad()
        model(x).float().square().mean().backward()
        wait()

    step()
    compare(model, options, x)
    for _ in range(10 if cuda else 1):
        step()
    synchronize()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    gc.collect()
    gc.disable()
    times, hosts = [], []
    for _ in range(options.steps):
        dist.barrier()
        synchronize()
        began = time.perf_counter()
        step()
        hosts.append(1e3 * (time.perf_counter() - began))
        synchronize()
        times.append(1e3 * (time.perf_counter() - began))
    gc.enable()
    peak = (torch.cuda.max_memory_allocated() - base) / 2**30 if cuda else 0.0
    if row.startswith("units"):  # torch does not count memory that other ranks read
        peak += te_fsdp.report(model).shared_bytes / 2**30
    result = torch.tensor([*times, statistics.median(hosts), peak], dtype=torch.float64, device=device)
    dist.all_reduce(result, op=dist.ReduceOp.MAX)
    *times, host, peak = result.tolist()
    return {"times_ms": times, "host_ms": host, "peak_gib": peak}


def main() -> None:
    """Measure all rows in turns; rank 0 prints and writes them."""
    large = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name, size, small in (
        ("layers", 8, 2),
        ("experts", 8, 4),
        ("hidden", 2048, 64),
        ("ffn", 5632, 64),
        ("tokens", 4096, 64),
        ("steps", 20, 2),
        ("rounds", 3, 1),
    ):
        parser.add_argument(f"--{name}", type=int, default=size if large else small)
    parser.add_argument("--out", type=Path, help="file for the results, JSON")
    options = parser.parse_args()
    device = join()
    results: dict[str, list[dict[str, Any]]] = {row: [] for row in ROWS}
    for number in range(options.rounds):
        for row in ROWS[:: -1 if number % 2 else 1]:
            results[row].append(measure(row, options, device))
    rows = []
    for row, measured in results.items():
        times = [ms for entry in measured for ms in entry["times_ms"]]
        summary = {"row": row, "ms": statistics.median(times), "best_ms": min(times)}
        summary |= {
            key: statistics.median(entry[key] for entry in measured) for key in ("host_ms", "peak_gib")
        }
        rows.append({**summary, "rounds": [statistics.median(entry["times_ms"]) for entry in measured]})
    if dist.get_rank() == 0:
        for item in rows:
            print(*(f"{value:.2f}" if isinstance(value, float) else value for value in item.values()))
        if options.out:
            sizes = {key: value for key, value in vars(options).items() if key != "out"}
            ranks = {"ranks": dist.get_world_size()}
            document = {"machine": machine(device) | ranks, "options": sizes, "rows": rows}
            options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
