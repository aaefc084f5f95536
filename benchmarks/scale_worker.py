"""Measurement of one process of scale.py: scale_worker.py MODEL RANKS {te_fsdp,materialize,fsdp2}."""

from __future__ import annotations

import cProfile
import json
import os
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable
from types import CodeType
from typing import Any

import te_fsdp.emulation

te_fsdp.emulation.install_from_env()
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import transformer_engine.pytorch as te  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

import te_fsdp  # noqa: E402

#: Tensor parallelism of the dense models, expert parallelism (at most) of the other.
TP, EP = 8, 64
PACKAGE = os.path.dirname(te_fsdp.__file__) + os.sep


class Traffic(TorchDispatchMode):
    """Counts collectives by the number of ranks that take part, and the bytes that this rank has or gets after them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[tuple[str, int]] = Counter()  # by name of the process group, and its size
        self.bytes: Counter[tuple[str, int]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            boxed = next(arg for arg in args if isinstance(arg, torch.ScriptObject))
            group = dist.ProcessGroup.unbox(boxed)
            key = group.group_name, group.size()
            self.calls[key] += 1
            self.bytes[key] += max(_bytes(arg) for arg in args)
        return result

    def rows(self, meshes: te_fsdp.Meshes) -> list[dict[str, Any]]:
        """Return the number of calls and the bytes per process group."""
        names = {dist.group.WORLD.group_name: "world"}
        for mesh in filter(None, (meshes.expert_mesh, meshes.device_mesh)):
            for axis in mesh.mesh_dim_names or ():
                kind = "expert_dp_shard" if mesh is meshes.expert_mesh and axis == "dp_shard" else axis
                names.setdefault(mesh[axis].get_group().group_name, kind)
        return [
            {"over": names.get(name, name), "ranks": ranks, "calls": calls, "bytes": self.bytes[name, ranks]}
            for (name, ranks), calls in sorted(self.calls.items())
        ]


def _bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return sum(map(_bytes, value)) if isinstance(value, list | tuple) else 0


def peak_gib() -> float:
    """Return the peak memory of this process since its start."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


class ExpertLayer(nn.Module):
    """Attention, router, a shared MLP and routed experts, like DeepSeek-V3's, but with attention of 8 groups."""

    def __init__(self, meshes: te_fsdp.Meshes, hidden: int, ffn: int) -> None:
        super().__init__()
        experts = 256
        common: dict[str, Any] = {"bias": False, "params_dtype": torch.bfloat16, "device": "meta"}
        self.attention = te.MultiheadAttention(
            hidden,
            128,
            hidden // 56,
            num_gqa_groups=8,
            input_layernorm=True,
            normalization="RMSNorm",
            **common,
        )
        self.norm = te.RMSNorm(hidden, dtype=torch.bfloat16, device="meta")
        self.router = nn.Linear(hidden, experts, bias=False, device="meta", dtype=torch.bfloat16)
        self.shared = te.LayerNormMLP(hidden, ffn, activation="swiglu", normalization="RMSNorm", **common)
        num_local = len(meshes.experts(experts))
        self.fc1 = te.GroupedLinear(num_local, hidden, 2 * ffn, **common)
        self.fc2 = te.GroupedLinear(num_local, ffn, hidden, **common)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Raise: only shapes are measured."""
        raise AssertionError


def dense(meshes: te_fsdp.Meshes, layers: int, hidden: int, ffn: int, heads: int) -> nn.Sequential:
    """Return decoder layers, sharded for tensor parallelism."""
    options: dict[str, Any] = {
        "num_gqa_groups": 8,
        "normalization": "RMSNorm",
        "activation": "swiglu",
        "bias": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": torch.bfloat16,
        "device": "meta",
        "fuse_qkv_params": True,
        "set_parallel_mode": True,
        "sequence_parallel": True,
        **meshes.te_kwargs(),
    }
    return nn.Sequential(*[te.TransformerLayer(hidden, ffn, heads, **options) for _ in range(layers)])


def build(model: str, meshes: te_fsdp.Meshes, *, narrow: bool = False) -> tuple[nn.Module, Any]:
    """Return the meta model and the class of its units. ``narrow``: 1/64 of its width, with all its layers."""
    width = 64 if narrow else 1
    if model == "405b":
        return dense(
            meshes, 126, 16384 // width, 53248 // width, 128 // (8 if narrow else 1)
        ), te.TransformerLayer
    return nn.Sequential(*[ExpertLayer(meshes, 7168 // width, 2048 // width) for _ in range(61)]), ExpertLayer


def start(ranks: int, model: str) -> te_fsdp.Meshes:
    """Initialize torch.distributed with ``ranks`` simulated ranks, and return the model's mesh."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    if model == "671b-moe":
        return te_fsdp.Meshes.build(ep=min(EP, ranks))
    return te_fsdp.Meshes.build(tp=TP)


def measure_set_up(model: str, ranks: int) -> dict[str, Any]:
    """Measure meshes, meta modules, and fully_shard (with set_device_mesh)."""
    row: dict[str, Any] = {"model": model, "ranks": ranks, "seconds": {}, "peak_gib": {}, "traffic": {}}

    def phase(name: str, call: Callable[[], Any]) -> Any:
        traffic, began = Traffic(), time.process_time()
        with traffic:
            result = call()
        row["seconds"][name] = time.process_time() - began
        row["peak_gib"][name] = peak_gib()
        row["traffic"][name] = traffic
        return result

    row["peak_gib"]["imports"] = peak_gib()
    meshes = phase("meshes", lambda: start(ranks, model))
    whole, units = phase("modules", lambda: build(model, meshes))
    phase("fully_shard", lambda: te_fsdp.fully_shard(whole, meshes, units=units))
    row["weights_gib"] = sum(local(p).nbytes for p in whole.parameters()) / 2**30
    # On the device, for a moment: one original tensor, which every rank takes its part of.
    row["largest_gib"] = max(p.element_size() * p.numel() for p in whole.parameters()) / 2**30
    row["traffic"] = {name: traffic.rows(meshes) for name, traffic in row["traffic"].items()}
    row["groups"] = len(dist.distributed_c10d._world.pg_map)
    return row


def local(parameter: nn.Parameter) -> torch.Tensor:
    """Return this rank's part."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def measure_materialize(model: str, ranks: int) -> dict[str, Any]:
    """Measure host seconds and collectives of materialize."""
    meshes = start(ranks, model)
    whole, units = build(model, meshes, narrow=True)
    te_fsdp.fully_shard(whole, meshes, units=units)
    traffic, began = Traffic(), time.process_time()
    with traffic:
        te_fsdp.materialize(whole, seed=0)
    return {"seconds": time.process_time() - began, "traffic": traffic.rows(meshes)}


def measure_fsdp2(model: str, ranks: int) -> dict[str, Any]:
    """Return the seconds of plain FSDP2 on the same modules, with a rank's experts and tp shards."""
    meshes = start(ranks, model)
    whole, _ = build(model, meshes)
    mesh, began = meshes.fsdp_with_size_one, time.process_time()
    for layer in whole.children():
        fully_shard(layer, mesh=mesh)
    fully_shard(whole, mesh=mesh)
    return {"model": model, "ranks": ranks, "fsdp2_seconds": time.process_time() - began}


def own_work(step: Callable[[], None]) -> tuple[int, float]:
    """Return the calls of te_fsdp's functions in a step, and the CPU seconds in them without callees (profiled)."""
    profile = cProfile.Profile(time.process_time)
    profile.runcall(step)
    own = [
        row
        for row in profile.getstats()
        if isinstance(row.code, CodeType)
        and row.code.co_filename.startswith(PACKAGE)
        and not row.code.co_filename.startswith(PACKAGE + "emulation")
    ]
    return sum(row.callcount for row in own), sum(row.inlinetime for row in own)


def measure_step(ranks: int, steps: int) -> dict[str, Any]:
    """Measure steps of a small model: te_fsdp's own calls, CPU time, and traffic of one step."""
    meshes = start(ranks, "step")
    model = dense(meshes, 4, 256, 512, 8)
    set_up = Traffic()
    with set_up:
        te_fsdp.fully_shard(model, meshes)
        te_fsdp.materialize(model, seed=0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        te_fsdp.main_weights(model, optimizer)
    x = torch.randn(32 // TP, 1, 256, dtype=torch.bfloat16)

    def step() -> None:
        model(x).float().square().mean().backward()
        te_fsdp.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    seconds = []
    for _ in range(steps):
        began = time.process_time()
        step()
        seconds.append(time.process_time() - began)
    traffic = Traffic()
    with traffic:
        step()
    own = [own_work(step) for _ in range(3 * steps)]
    return {
        "model": "step",
        "ranks": ranks,
        "calls": own[-1][0],
        "own_seconds": min(spent for _, spent in own),
        "best_seconds": min(seconds),
        "traffic": {"set-up": set_up.rows(meshes), "step": traffic.rows(meshes)},
    }


def one(model: str, ranks: int, library: str) -> dict[str, Any]:
    """Run the measurement of one process."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if model == "step":
        return measure_step(ranks, 8)
    measures = {"fsdp2": measure_fsdp2, "materialize": measure_materialize, "te_fsdp": measure_set_up}
    return measures[library](model, ranks)


if __name__ == "__main__":
    print(json.dumps(one(sys.argv[1], int(sys.argv[2]), sys.argv[3])))
