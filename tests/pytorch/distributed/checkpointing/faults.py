"""Bodies of faults in files or replicas."""

from __future__ import annotations

import math
import os
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import harness
import torch
import torch.distributed as dist

from checkpointing.mistakes import Small, adam, error_of, shard
from checkpointing.models import Case, Run

MANIFEST, METADATA = "te_fsdp.json", ".metadata"


class Corruption:
    """A random change to a directory; rank 0 makes it and takes it back."""

    KINDS = (
        "flip",
        "flip manifest",
        "flip metadata",
        "truncate",
        "extend",
        "delete",
        "swap",
        "foreign",
        "zero",
    )

    def __init__(self, chance: random.Random, path: Path, foreign: Path) -> None:
        self.kind = chance.choice(self.KINDS)
        names = sorted(p.name for p in path.iterdir())
        data = [name for name in names if name.endswith(".distcp")]
        self.path, self.other = path, foreign
        self.name = {"flip manifest": MANIFEST, "flip metadata": METADATA, "flip": chance.choice(data)}.get(
            self.kind, chance.choice(names)
        )
        if self.kind == "swap":
            self.name, self.second = chance.sample(names, 2)
        size = (path / self.name).stat().st_size
        self.place, self.bit, self.length = (
            chance.randrange(size),
            chance.randrange(8),
            chance.randrange(1, 64),
        )

    @classmethod
    def drawn(cls, chance: random.Random, path: Path, foreign: Path) -> Corruption:
        """Return rank 0's choice, on all ranks. Collective over the world."""
        box = [cls(chance, path, foreign) if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(box)
        assert box[0] is not None
        return box[0]

    def __str__(self) -> str:
        return f"{self.kind} {self.name} at {self.place}, bit {self.bit}"

    @contextmanager
    def made(self) -> Iterator[None]:
        """Create the object for the context. Collective over the world."""
        backup = self.path.with_name("backup")
        if dist.get_rank() == 0:
            shutil.copytree(self.path, backup)
            self._make()
        dist.barrier()
        try:
            yield
        finally:
            dist.barrier()
            if dist.get_rank() == 0:
                shutil.rmtree(self.path)
                backup.rename(self.path)
            dist.barrier()

    def _make(self) -> None:
        file = self.path / self.name
        data = bytearray(file.read_bytes())
        if self.kind.startswith("flip"):
            data[self.place] ^= 1 << self.bit
        elif self.kind == "truncate":
            del data[self.place :]
        elif self.kind == "extend":
            data += os.urandom(self.length)
        elif self.kind == "zero":
            changed = bytearray(data)
            changed[self.place : self.place + self.length] = bytes(
                len(data[self.place : self.place + self.length])
            )
            data = changed if changed != data else data[:-1]
        elif self.kind == "foreign":
            data = bytearray((self.other / self.name).read_bytes())
        elif self.kind == "swap":
            second = self.path / self.second
            data, other = bytearray(second.read_bytes()), bytes(data)
            second.write_bytes(other)
        if self.kind == "delete":
            file.unlink()
        else:
            file.write_bytes(data)


def corruptions(directory: str, start: int, count: int) -> dict[str, Any]:
    """Check that each of several random corruptions is detected before anything changes, on all ranks.

    Args:
        directory: Where checkpoints go.
        start: Seed of the choices.
        count: How many.

    Returns:
        Missed corruptions, and the number of each kind.
    """
    import te_fsdp

    chance, path, foreign = random.Random(start), Path(directory, "step-1"), Path(directory, "step-2")
    model = shard(Small(width=64))
    optimizer = adam(model)
    te_fsdp.checkpoint.save(path, model, optimizer, extra={"step": 1, "lr": 1e-5})
    optimizer.step()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    te_fsdp.checkpoint.save(foreign, model, optimizer, extra={"step": 2, "lr": 1e-5})
    victim = shard(Small(width=64))
    before = [p.to_local().detach().clone() for p in victim.parameters()]
    kinds: dict[str, int] = {}
    missed: list[str] = []
    for _ in range(count):
        corruption = Corruption.drawn(chance, path, foreign)
        kinds[corruption.kind] = kinds.get(corruption.kind, 0) + 1
        with corruption.made():
            fresh = torch.optim.AdamW(victim.parameters())
            if not _refuses(lambda opt=fresh: te_fsdp.checkpoint.load(path, victim, opt)):
                missed.append(str(corruption))
        assert not fresh.state
        now = [p.to_local() for p in victim.parameters()]
        assert all(torch.equal(a, b) for a, b in zip(before, now, strict=True)), f"changed by {corruption}"
    extra = te_fsdp.checkpoint.load(path, victim, torch.optim.AdamW(victim.parameters()), verify=True)
    assert extra == {"step": 1, "lr": 1e-5}, "put back, it loads"
    return {"missed": missed, "kinds": kinds}


def _refuses(load: Any) -> bool:
    """Return whether a load raises CheckpointError with the same text on all ranks."""
    try:
        load()
        told = ("", "")
    except Exception as error:
        told = (type(error).__name__, str(error))
    seen: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(seen, told)
    return told[0] == "CheckpointError" and all(other == told for other in seen)


def save_different_replicas(directory: str, axes: dict[str, int], name: str, of: str) -> tuple[str, str]:
    """Change one rank's replica of a parameter or state. The save raises and names it.

    Args:
        directory: Where checkpoints go.
        axes: The mesh.
        name: The parameter.
        of: "model" or a key of the optimizer's state.
    """
    import te_fsdp
    from te_fsdp.upstream import torch_dtensor as _torch

    run = Run(Case(stacked=True, optimizer="fused"), axes, seed=0)
    run.steps(1)
    te_fsdp.checkpoint.save(f"{directory}/good", run.model, run.optimizer)
    parameter = dict(run.model.named_parameters())[name]
    value = parameter if of == "model" else run.optimizer.state[parameter][of]
    if dist.get_rank() == dist.get_world_size() - 1:
        with torch.no_grad():
            local = _torch.local_of(value)
            local.view(-1)[-1] = torch.nextafter(
                local.view(-1)[-1], torch.tensor(9.0, dtype=local.dtype).to(local)
            )
    result = error_of(lambda: te_fsdp.checkpoint.save(f"{directory}/bad", run.model, run.optimizer))
    dist.barrier()
    assert sorted(p.name for p in Path(directory).iterdir()) == ["good"]
    return result


def bytes_on_disk(directory: str, axes: dict[str, int], case: Case) -> dict[str, Any]:
    """Compare the files with the logical values of the model and its optimizer.

    Returns:
        ``logical``: bytes of all original tensors; ``stored``: bytes of all chunks; ``written``: the sum of what the
        ranks wrote; ``files``: bytes of the data files; ``chunks``; ``overlap``: tensors not tiled exactly once.
    """
    import te_fsdp
    from te_fsdp.checkpoint.manifest import Manifest

    run = Run(case, axes, seed=0)
    run.steps(1)
    handle = te_fsdp.checkpoint.save(f"{directory}/a", run.model, run.optimizer)
    written = torch.tensor([handle.bytes], device=harness.device())
    dist.all_reduce(written)
    metadata = torch.distributed.checkpoint.FileSystemReader(f"{directory}/a").read_metadata()
    logical, stored, chunks, wrong = 0, 0, 0, []
    for key, tensor in metadata.state_dict_metadata.items():
        size = tensor.properties.dtype.itemsize
        parts = sum(math.prod(chunk.sizes) for chunk in tensor.chunks)
        chunks += len(tensor.chunks)
        logical += math.prod(tensor.size) * size
        stored += parts * size
        if parts != math.prod(tensor.size):
            wrong.append(key)
    files = {p.name: p.stat().st_size for p in Path(directory, "a").glob("*.distcp")}
    manifest = Manifest.read(Path(directory, "a"))
    parameters = sum(
        math.prod(d["shape"]) * getattr(torch, d["dtype"]).itemsize for d in manifest.parameters.values()
    )
    keys = [key for key in metadata.state_dict_metadata if key.startswith("model.")]
    return {
        "logical": logical,
        "stored": stored,
        "written": int(written),
        "files": sum(files.values()),
        "chunks": chunks,
        "wrong": wrong,
        "parameters": parameters,
        "keys": len(keys),
    }


def extra_state(directory: str, axes: dict[str, int], start: int | None) -> dict[str, Any]:
    """Save a run's position and generators, or (no start) load them and go on drawing numbers.

    Returns:
        The next numbers of each generator, and what was loaded.
    """
    import random as python_random

    import te_fsdp

    model = te_fsdp.fully_shard(Small(), te_fsdp.Meshes.build(**axes, device_type=harness.device_type()))
    order = torch.Generator()
    extra: dict[str, Any] = {}
    if start is not None:
        order.manual_seed(start)
        torch.randperm(10, generator=order)
        torch.manual_seed(start + dist.get_rank())
        python_random.seed(start + dist.get_rank())
        torch.rand(3)
        own = te_fsdp.checkpoint.PerRank({"rank": dist.get_rank(), "sampler": [dist.get_rank()] * 3})
        extra = {
            "step": 7,
            "order": order.get_state(),
            "rng": te_fsdp.checkpoint.rng_state(),
            "data": [{"own": own, "epoch": (1, 2)}],
        }
        te_fsdp.checkpoint.save(f"{directory}/a", model, extra=extra)
    else:
        torch.manual_seed(99)
        extra = te_fsdp.checkpoint.load(f"{directory}/a", model, verify=True)
        order.set_state(extra["order"])
        if extra["rng"] is not None:
            te_fsdp.checkpoint.set_rng_state(extra["rng"])
    drawn = {
        "order": torch.randperm(10, generator=order).tolist(),
        "torch": torch.rand(3).tolist(),
        "device": torch.rand(3, device=harness.device()).tolist(),
        "python": python_random.random(),
    }
    data = extra["data"][0]
    return {
        "drawn": drawn,
        "step": extra["step"],
        "own": data["own"],
        "epoch": data["epoch"],
        "rng": extra["rng"] is None,
    }
