"""Cost of `te_fsdp.huggingface.iter_weights`, compared with a plain broadcast of the same bytes.

    torchrun --nproc-per-node 4 benchmarks/rollout.py --out benchmarks/results/rollout-MACHINE.json
    TE_FSDP_EMULATION=9.0 torchrun --nproc-per-node 2 benchmarks/rollout.py --size small      # a check of the script

A Llama-style model of TransformerLayers, sharded by te_fsdp over all ranks, in bf16 and with weights under
Float8BlockScaling. Each row streams all weights in one format to all ranks or to rank 0, in buckets of --bucket-mib.
The comparison sends the same number of bytes from one rank in messages of the same size, to all ranks (broadcast) or to
rank 0 (send). "peak" is the largest allocation of a rank above the model's memory. "unchanged" is a stream with
`since=` of a model that did not change.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
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
from transformer_engine.common.recipe import Float8BlockScaling  # noqa: E402

import te_fsdp.huggingface  # noqa: E402
from te_fsdp.checkpoint.portable.huggingface import read_config  # noqa: E402

COMMON = {"model_type": "llama", "tie_word_embeddings": False, "torch_dtype": "bfloat16"}
SIZES: dict[str, dict[str, Any]] = {
    "large": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "small": {
        "vocab_size": 512,
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
    },
}


class Llama(nn.Module):
    """The parts of a Llama model, under the default names of te_fsdp. It is not run."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        about, plain = read_config(config), {"dtype": torch.bfloat16, "device": "meta"}
        layer = {"fuse_qkv_params": True, "qkv_weight_interleaved": False, "set_parallel_mode": True}
        layer |= {"params_dtype": torch.bfloat16, "device": "meta"}
        self.embedding = nn.Embedding(about.vocabulary, about.hidden, **plain)
        self.layers = nn.ModuleList(
            te.TransformerLayer(**about.te_kwargs(), **layer) for _ in range(about.layers)
        )
        self.norm = te.RMSNorm(about.hidden, eps=about.norm_eps, **plain)
        self.head = nn.Linear(about.hidden, about.vocabulary, bias=False, **plain)


def build(config: dict[str, Any], quantized: bool, device: torch.device) -> nn.Module:
    """Return the sharded model."""
    with te.quantized_model_init(enabled=quantized, recipe=Float8BlockScaling()):
        model = Llama(config)
    meshes = te_fsdp.Meshes.build(dp_shard=-1, device_type=device.type)
    te_fsdp.fully_shard(model, meshes, units=[te.TransformerLayer])
    return te_fsdp.materialize(model, seed=0)


class Meter:
    """Time and peak memory of a call on all ranks."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.on_gpu = device, device.type == "cuda"

    def __call__(self, call: Callable[[], Any]) -> tuple[Any, float, float]:
        """Return the result, the slowest rank's seconds and the largest peak in bytes above what was allocated."""
        self._synchronize()
        before = torch.cuda.memory_allocated() if self.on_gpu else 0
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        dist.barrier()
        began = time.perf_counter()
        result = call()
        self._synchronize()
        seconds = time.perf_counter() - began
        peak = torch.cuda.max_memory_allocated() - before if self.on_gpu else 0
        worst = torch.tensor([seconds, float(peak)], dtype=torch.float64, device=self.device)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        return result, *worst.tolist()

    def _synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()


def consume(stream: Any) -> int:
    """Iterate over a stream and drop the tensors; return the bytes that this rank received."""
    return sum(tensor.numel() * tensor.itemsize for _, tensor in stream if tensor is not None)


def plain(size: int, message_bytes: int, receiver: int | None, device: torch.device) -> None:
    """Send ``size`` bytes from a rank, in messages of a bucket's assembled tensors."""
    source = 0 if receiver is None else dist.get_world_size() - 1
    for first in range(0, size, message_bytes):
        count = min(message_bytes, size - first)
        if receiver is None:
            dist.broadcast(torch.empty(count, dtype=torch.uint8, device=device), src=source)
        elif dist.get_rank() == source:
            dist.send(torch.empty(count, dtype=torch.uint8, device=device), receiver)
        elif dist.get_rank() == receiver:
            dist.recv(torch.empty(count, dtype=torch.uint8, device=device), source)


def row(
    model: nn.Module, meter: Meter, options: argparse.Namespace, config: dict[str, Any], format: str, to: str
) -> dict[str, Any]:
    """Measure a format and a kind of receiver. Collective over the world."""
    bucket = int(options.bucket_mib * 2**20)
    receiver = None if to == "all ranks" else 0

    def stream(since: Any = None) -> Any:
        return te_fsdp.huggingface.iter_weights(
            model, config=config, format=format, receiver=receiver, bucket_bytes=bucket, since=since
        )

    times, peaks, compared = [], [], []
    for _ in range(options.rounds + 1):  # the first is not counted: connections, memory
        whole = stream()
        box, seconds, peak = meter(lambda s=whole: consume(s))
        size = torch.tensor([box], device=meter.device)
        dist.all_reduce(size, op=dist.ReduceOp.MAX)
        times.append(seconds)
        peaks.append(peak)
        compared.append(meter(lambda n=int(size): plain(n, bucket // 2, receiver, meter.device))[1])
    _, prepared, _ = meter(stream)
    _, unchanged, _ = meter(lambda: consume(stream(since=whole)))
    best, best_plain, sent = min(times[1:]), min(compared[1:]), int(size)
    return {
        "format": format,
        "receiver": to,
        "bytes": sent,
        "seconds": times[1:],
        "GB/s": sent / best / 1e9,
        "plain seconds": compared[1:],
        "plain GB/s": sent / best_plain / 1e9,
        "relative to plain": best / best_plain,
        "seconds before the first tensor": prepared,
        "seconds of an unchanged stream": unchanged,
        "peak / bucket": max(peaks) / bucket,
    }


def main() -> None:
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="large")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--bucket-mib", type=float, default=1024)
    parser.add_argument("--out", help="file for the results, JSON")
    options = parser.parse_args()
    device = join()
    config, meter, rows = COMMON | SIZES[options.size], Meter(device), []
    for quantized in (False, True):
        model = build(config, quantized, device)
        for format in ("fp8-block", "bf16") if quantized else ("native", "bf16", "fp8-block"):
            for to in ("all ranks", "rank 0"):
                result = row(model, meter, options, config, format, to)
                rows.append({"weights": "Float8BlockScaling" if quantized else "bf16", **result})
                if dist.get_rank() == 0:
                    print(json.dumps(rows[-1]), flush=True)
        del model
    if dist.get_rank() == 0 and options.out:
        results = {"machine": machine(device), "ranks": dist.get_world_size(), "model": config, "rows": rows}
        Path(options.out).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
