"""Draw training configurations at random, for `matrix.search`. Imports neither torch nor TE."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, fields

from matrix.definitions import CHECKPOINTS_ITSELF, FORMATS, MODULES
from matrix.tolerances import GEMMS
from te_fsdp.layout import STRATEGIES

#: Meshes of 2 and 4 ranks, as `te_fsdp.Meshes.build` takes them.
MESHES: dict[str, dict[str, int]] = {
    "dp2": {"dp_shard": 2},
    "tp2": {"dp_shard": 1, "tp": 2},
    "replicate2": {"dp_replicate": 2, "dp_shard": 1},
    "ep2": {"dp_shard": 1, "ep": 2},
    "dp4": {"dp_shard": 4},
    "tp4": {"dp_shard": 1, "tp": 4},
    "dp2xtp2": {"dp_shard": 2, "tp": 2},
    "hsdp2x2": {"dp_replicate": 2, "dp_shard": 2},
    "replicate2xtp2": {"dp_replicate": 2, "dp_shard": 1, "tp": 2},
    "ep4": {"dp_shard": 1, "ep": 4},
    "ep2xdp2": {"dp_shard": 2, "ep": 2},
    "ep2xtp2": {"dp_shard": 1, "ep": 2, "tp": 2},
    "replicate2xep2": {"dp_replicate": 2, "dp_shard": 1, "ep": 2},
}
SCHEDULES = ("plain", "no_sync", "microbatch", "by hand", "setter", "auto sync", "start", "sync")
#: Options of `te_fsdp.MixedPrecisionPolicy` by name; the last two are for fp32 weights, computed in bf16.
POLICIES: dict[str, dict[str, str | None]] = {
    "default": {},
    "bf16 wire": {"grad_comm_dtype": "bfloat16"},
    "fp32 sum": {"grad_comm_dtype": "bfloat16", "grad_reduce_dtype": "float32"},
    "model's weights": {"main_params_dtype": None},
    "model's gradients": {"main_grads_dtype": None},
    "model's dtypes": {"main_params_dtype": None, "main_grads_dtype": None},
    "bf16 compute": {"param_dtype": "bfloat16"},
    "FSDP2's bf16 compute": {"main_params_dtype": None},
}
#: Policies by the dtype of weights.
ALLOWED = {
    "quantized": ("default", "bf16 wire", "fp32 sum"),
    "bf16": tuple(POLICIES)[:6],
    "fp32": ("bf16 compute", "FSDP2's bf16 compute"),
}
KINDS = (*MODULES, "experts")


@dataclass(frozen=True)
class Configuration:
    """One training configuration.

    Attributes:
        strategy: Strategy of the model; `first` is that of the first block, "" for the same.
        exempt: Modules passed to `fsdp_no_shard`; "name:1" is the second parameter of a module.
        vector: Whether the first block has an fp32 vector parameter.
        frozen: Name of a block without trained parameters.
        route: Distribution of tokens over experts.
    """

    arch: str = "10.0"
    recipe: str = "none"
    weights: str = "bf16"
    modules: tuple[str, ...] = ("linear",)
    mesh: str = "dp2"
    sequence_parallel: bool = False
    strategy: str = "optim_grads_params"
    first: str = ""
    outer: str = "no_shard"
    units: tuple[str, ...] = ()
    exempt: tuple[str, ...] = ()
    schedule: str = "plain"
    microbatches: int = 1
    optimizer: str = "fused"
    precision: str = "none"
    checkpointing: str = "off"
    zero_copy: bool | str = "auto"
    side: str = "none"
    vector: bool = False
    frozen: str = ""
    route: str = "every"
    clips: bool = False
    evaluates: bool = False
    abandons: bool = False

    @property
    def ranks(self) -> int:
        """Return the number of processes that the mesh takes."""
        return math.prod(MESHES[self.mesh].values())

    @property
    def gemms(self) -> int:
        """Return GEMMs from the input to the output."""
        kinds = ["grouped" if kind == "experts" else kind for kind in self.modules]
        return sum(GEMMS[kind] for kind in kinds) + (GEMMS["linear"] if self.side != "none" else 0)

    @property
    def computes_in(self) -> str:
        """Return the dtype of the weights in forward: that of the model, or of a policy."""
        return "bf16" if self.weights != "fp32" or self.precision != "none" else "fp32"

    @property
    def draws_fp32(self) -> bool:
        """Return whether weights are initialized in fp32 though the model computes in bf16."""
        main = POLICIES.get(self.precision, {"main_params_dtype": None}).get("main_params_dtype", "float32")
        return main is not None or (self.weights == "fp32" and self.computes_in == "bf16")

    def __str__(self) -> str:
        plain = Configuration()
        changed = {f.name: getattr(self, f.name) for f in fields(self)}
        return ", ".join(f"{n}={v!r}" for n, v in changed.items() if v != getattr(plain, n))


def draw(seed: int, number: int) -> Configuration:
    """Return the configuration of a number; the same for the same seed on every machine."""
    chance = random.Random(f"{seed} {number}")
    while (result := _draw(chance)) is None:
        pass
    return result


def _draw(chance: random.Random) -> Configuration | None:
    """Return a configuration, or ``None`` for one that te_fsdp or TE refuses (docs/support.md)."""
    # Quantized weights twice as often as others: they have found the most.
    recipe, weights = chance.choice([*FORMATS, *(f for f in FORMATS if f[1] == "quantized")])
    arch = chance.choice(["9.0", "10.0"])
    if arch == "9.0" and recipe in ("mxfp8", "nvfp4"):
        return None
    mesh = chance.choice(list(MESHES))
    axes = MESHES[mesh]
    modules = tuple(chance.choice(KINDS) for _ in range(chance.choice([1, 1, 1, 2, 2, 3])))
    grouped, split = bool({"grouped", "experts"} & {*modules}), axes.get("tp", 1) > 1
    if ("ep" in axes and "experts" not in modules) or (split and grouped and recipe == "current"):
        return None
    side = chance.choice(["none", "none", "never", "in the second step"])
    checkpointing = _checkpointing(chance, modules, side)
    outer = chance.choice(["no_shard", "optim"]) if axes.get("dp_replicate", 1) > 1 else "no_shard"
    strategy, first = chance.choice(STRATEGIES), chance.choice(["", "", "", *STRATEGIES])
    if outer == "optim" and strategy == "no_shard":
        return None
    schedule = chance.choice(SCHEDULES)
    blocks = [f"blocks.{at}" for at in range(len(modules))] + (["side"] if side != "none" else [])
    exempt = _exempt(chance, blocks)
    allowed = ALLOWED[weights]
    if weights == "fp32" and (exempt or "no_shard" in (strategy, first)):
        allowed = ()  # replicated parameters keep fp32, which TE refuses together with bf16 inputs
    fused = ["fused", "fused, main weights"]
    return Configuration(
        arch=arch,
        recipe=recipe,
        weights=weights,
        modules=modules,
        mesh=mesh,
        sequence_parallel=split and not grouped and chance.random() < 0.4,
        strategy=strategy,
        first=first,
        outer=outer,
        units=tuple(blocks) if chance.random() < 0.7 else (),
        exempt=exempt,
        schedule=schedule,
        microbatches=1 if schedule == "plain" and chance.random() < 0.5 else chance.choice([2, 2, 3]),
        optimizer=chance.choice(fused if weights == "quantized" else [*fused, "sgd", "adamw"]),
        precision=chance.choice(["none"] * len(allowed) + [*allowed]) if allowed else "none",
        checkpointing=checkpointing,
        zero_copy=chance.choice(["auto", "auto", True]),
        side=side,
        vector=chance.random() < 0.25,
        frozen=chance.choice(blocks) if len(modules) > 1 and chance.random() < 0.2 else "",
        route=chance.choice(["every", "some"]) if "experts" in modules else "every",
        clips=chance.random() < 0.3,
        evaluates=chance.random() < 0.3,
        abandons=chance.random() < 0.15,
    )


def _checkpointing(chance: random.Random, modules: Sequence[str], side: str) -> str:
    """Draw activation checkpointing; a module's own only where all modules have it."""
    result = chance.choice(["off", "off", "off", "te", "torch", "own"])
    can = side == "none" and all(kind in CHECKPOINTS_ITSELF for kind in modules)
    return result if can or result != "own" else "off"


def _exempt(chance: random.Random, blocks: Sequence[str]) -> tuple[str, ...]:
    """Draw modules and parameters that are not sharded: none, one or two."""
    options = [
        name for block in blocks for name in (block, f"{block}.inner.inner", f"{block}:0", f"{block}:1")
    ]
    count = chance.choice([0, 0, 0, 0, 1, 1, 2])
    return tuple(sorted(chance.sample(options, count)))
