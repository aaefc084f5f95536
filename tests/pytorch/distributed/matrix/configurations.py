"""Draw training configurations at random, for `matrix.search`. Imports neither torch nor TE."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, fields

from matrix.definitions import CHECKPOINTS_ITSELF, FORMATS, MODULES
from matrix.tolerances import GEMMS

#: Meshes of 2 and 4 ranks, as `te_fsdp.Meshes.build` takes them.
MESHES: dict[str, dict[str, int]] = {
    "dp2": {"dp_shard": 2},
    "tp2": {"dp_shard": 1, "tp": 2},
    "replicate2": {"dp_replicate": 2, "dp_shard": 1},
    "dp4": {"dp_shard": 4},
    "tp4": {"dp_shard": 1, "tp": 4},
    "dp2xtp2": {"dp_shard": 2, "tp": 2},
    "hsdp2x2": {"dp_replicate": 2, "dp_shard": 2},
    "replicate2xtp2": {"dp_replicate": 2, "dp_shard": 1, "tp": 2},
}
STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
SCHEDULES = ("plain", "no_sync", "microbatch", "by hand", "setter")


@dataclass(frozen=True)
class Configuration:
    """One training configuration; `strategy` is that of the whole model."""

    arch: str = "10.0"
    recipe: str = "none"
    weights: str = "bf16"
    modules: tuple[str, ...] = ("linear",)
    mesh: str = "dp2"
    sequence_parallel: bool = False
    strategy: str = "optim_grads_params"
    outer: str = "no_shard"
    units: tuple[str, ...] = ()
    exempt: tuple[str, ...] = ()
    schedule: str = "plain"
    microbatches: int = 1
    optimizer: str = "fused"
    checkpointing: str = "off"
    zero_copy: bool | str = "auto"
    side: str = "none"
    evaluates: bool = False
    abandons: bool = False

    @property
    def ranks(self) -> int:
        """Processes that the mesh takes."""
        return math.prod(MESHES[self.mesh].values())

    @property
    def gemms(self) -> int:
        """GEMMs from the input to the output."""
        return sum(GEMMS[kind] for kind in self.modules) + (GEMMS["linear"] if self.side != "none" else 0)

    def __str__(self) -> str:
        plain = Configuration()
        changed = {f.name: getattr(self, f.name) for f in fields(self)}
        return ", ".join(f"{n}={v!r}" for n, v in changed.items() if v != getattr(plain, n))


def draw(seed: int, number: int) -> Configuration:
    """Return the configuration of a number; the same for the same seed on every machine."""
    chance = random.Random(f"{seed} {number}")
    while (found := _draw(chance)) is None:
        pass
    return found


def _draw(chance: random.Random) -> Configuration | None:
    """Return a configuration, or ``None`` for one that te_fsdp or TE refuses (docs/support.md)."""
    # Quantized weights twice as often as others: they have found the most.
    recipe, weights = chance.choice([*FORMATS, *(f for f in FORMATS if f[1] == "quantized")])
    arch = chance.choice(["9.0", "10.0"])
    if arch == "9.0" and recipe in ("mxfp8", "nvfp4"):
        return None
    mesh = chance.choice(list(MESHES))
    axes = MESHES[mesh]
    modules = tuple(chance.choice(MODULES) for _ in range(chance.choice([1, 1, 1, 2, 2, 3])))
    split = axes.get("tp", 1) > 1
    if split and "grouped" in modules and (recipe == "current" or weights == "quantized"):
        return None
    checkpointing = chance.choice(["off", "off", "off", "te", "torch", "own"])
    if checkpointing == "own" and not all(kind in CHECKPOINTS_ITSELF for kind in modules):
        checkpointing = "off"
    side = chance.choice(["none", "none", "never", "in the second step"])
    if checkpointing == "own" and side != "none":
        side = "none"
    outer = chance.choice(["no_shard", "optim"]) if axes.get("dp_replicate", 1) > 1 else "no_shard"
    strategy = chance.choice(STRATEGIES)
    if outer == "optim" and strategy == "no_shard":
        return None
    schedule = chance.choice(SCHEDULES)
    fused = ["fused", "fused, main weights"]
    optimizers = fused if weights == "quantized" or outer == "optim" else [*fused, "sgd", "adamw"]
    blocks = [f"blocks.{at}" for at in range(len(modules))] + (["side"] if side != "none" else [])
    return Configuration(
        arch=arch,
        recipe=recipe,
        weights=weights,
        modules=modules,
        mesh=mesh,
        sequence_parallel=split and "grouped" not in modules and chance.random() < 0.4,
        strategy=strategy,
        outer=outer,
        units=tuple(blocks) if chance.random() < 0.7 else (),
        exempt=(chance.choice([*blocks, *(f"{block}.inner" for block in blocks)]),)
        if chance.random() < 0.35
        else (),
        schedule=schedule,
        microbatches=1 if schedule == "plain" and chance.random() < 0.5 else chance.choice([2, 2, 3]),
        optimizer=chance.choice(optimizers),
        checkpointing=checkpointing,
        zero_copy=chance.choice(["auto", "auto", True]),
        side=side,
        evaluates=chance.random() < 0.3,
        abandons=chance.random() < 0.15,
    )
