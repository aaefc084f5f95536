"""The trainings that are compared.

Every module kind, format, strategy, loop, optimizer and mesh occurs at least once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["Case", "cases"]

MODULES = ("linear", "layernorm_linear", "mlp_gelu", "mlp_swiglu", "attention", "transformer", "grouped")
#: Recipe and format of the weights; ``quantized``: the recipe's own format.
FORMATS = (
    ("none", "bf16"),
    ("none", "fp32"),
    ("current", "bf16"),
    ("delayed", "quantized"),
    ("current", "quantized"),
    ("block", "quantized"),
    ("mxfp8", "quantized"),
    ("nvfp4", "quantized"),
)
STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
LOOPS = ("one", "plain", "microbatch", "no_sync", "by hand")
OPTIMIZERS = ("adamw", "fused", "fused, main weights", "shard_optimizer")
MESHES: dict[str, dict[str, int]] = {
    "dp2": {"dp_shard": 2},
    "dp2 tp2": {"dp_shard": 2, "tp": 2},
    "tp2": {"dp_shard": 1, "tp": 2},
    "hsdp 2x2": {"dp_replicate": 2, "dp_shard": 2},
    "replicas 2": {"dp_replicate": 2, "dp_shard": 1},
    "hsdp 2x2 tp2": {"dp_replicate": 2, "dp_shard": 2, "tp": 2},
    "ep2": {"dp_shard": 1, "ep": 2},
    "dp2 ep2": {"dp_shard": 2, "ep": 2},
}


@dataclass(frozen=True)
class Case:
    """One training.

    Attributes:
        module: Of :data:`MODULES`.
        recipe: TE's recipe, or ``"none"``.
        weights: ``"bf16"``, ``"fp32"`` or ``"quantized"``.
        mesh: Of :data:`MESHES`.
        strategy: te_fsdp's.
        outer: te_fsdp's ``outer_strategy``.
        loop: How the loop marks microbatches, one of :data:`LOOPS`.
        optimizer: Of :data:`OPTIMIZERS`.
        sequence_parallel: TE's option, where there is tp.
        precision: Arguments of ``te_fsdp.MixedPrecisionPolicy``; ``None``: no policy.
        exempt: Name of a submodule that is passed to ``fsdp_no_shard``.
    """

    module: str = "mlp_swiglu"
    recipe: str = "none"
    weights: str = "bf16"
    mesh: str = "dp2"
    strategy: str = "optim_grads_params"
    outer: str = "no_shard"
    loop: str = "plain"
    optimizer: str = "fused"
    sequence_parallel: bool = False
    precision: dict[str, Any] | None = field(default=None, hash=False)
    exempt: str = ""

    @property
    def axes(self) -> dict[str, int]:
        """Return the arguments of ``te_fsdp.Meshes.build``."""
        return MESHES[self.mesh]

    @property
    def ranks(self) -> int:
        """Return the number of processes."""
        return math.prod(self.axes.values())

    def __str__(self) -> str:
        """Return module, format and mesh, and all differences from the default case."""
        words = [self.module, f"{self.recipe}/{self.weights}", self.mesh]
        default = Case()
        for name, value in asdict(self).items():
            if name not in ("module", "recipe", "weights", "mesh") and value != getattr(default, name):
                words.append(f"{name}={value}")
        return ", ".join(words)


def cases() -> list[Case]:
    """Return all cases without duplicates."""
    return list(dict.fromkeys(itertools.chain(_modules(), _strategies(), _loops(), _optimizers(), _others())))


def _formats(*wanted: str) -> Iterator[dict[str, str]]:
    """Return the recipe and weights of the formats that are wanted, as arguments."""
    for recipe, weights in FORMATS:
        if not wanted or f"{recipe}/{weights}" in wanted:
            yield {"recipe": recipe, "weights": weights}


def _modules() -> Iterator[Case]:
    """Return every module in every format, over dp and tp; experts also over ep."""
    for module, how in itertools.product(MODULES, _formats()):
        if module != "grouped":
            yield Case(module, mesh="dp2 tp2", sequence_parallel=how["recipe"] != "none", loop="one", **how)
        else:
            for mesh in ("dp2", "ep2", "dp2 ep2"):
                yield Case(module, mesh=mesh, loop="one", **how)
    yield Case("transformer", "mxfp8", "quantized", "tp2")


def _strategies() -> Iterator[Case]:
    """Return every strategy on every kind of data-parallel mesh; sharded replicas where there are replicas."""
    chosen = ("none/bf16", "current/quantized", "mxfp8/quantized")
    for strategy, mesh, how in itertools.product(STRATEGIES, ("dp2", "hsdp 2x2"), _formats(*chosen)):
        yield Case(mesh=mesh, strategy=strategy, **how)
    for strategy, mesh in itertools.product(STRATEGIES, ("hsdp 2x2", "replicas 2")):
        for how in _formats(*chosen, "block/quantized"):
            yield Case(mesh=mesh, strategy=strategy, outer="optim", optimizer="fused, main weights", **how)
    yield Case("transformer", mesh="hsdp 2x2 tp2", sequence_parallel=True)
    yield Case("transformer", mesh="hsdp 2x2 tp2", outer="optim", optimizer="shard_optimizer")
    yield Case("grouped", mesh="ep2", strategy="no_shard")


def _loops() -> Iterator[Case]:
    """Return every way to mark microbatches, under every strategy and with sharded replicas."""
    for loop, strategy in itertools.product(LOOPS, STRATEGIES):
        for how in _formats("none/bf16", "delayed/quantized"):
            yield Case(loop=loop, strategy=strategy, **how)
    for loop in LOOPS:
        for strategy in ("optim_grads", "optim_grads_params"):
            yield Case(
                mesh="hsdp 2x2", loop=loop, strategy=strategy, outer="optim", optimizer="shard_optimizer"
            )


def _optimizers() -> Iterator[Case]:
    """Return every optimizer on plain and quantized weights."""
    for optimizer, mesh in itertools.product(OPTIMIZERS, ("dp2 tp2", "hsdp 2x2")):
        for how in _formats("none/bf16", "none/fp32", "current/quantized"):
            if optimizer == "shard_optimizer" and mesh != "hsdp 2x2":
                continue
            outer = "optim" if optimizer == "shard_optimizer" else "no_shard"
            yield Case(mesh=mesh, optimizer=optimizer, outer=outer, **how)


def _others() -> Iterator[Case]:
    """Yield precision policies, and a replicated module."""
    policies: tuple[dict[str, Any], ...] = (
        {},
        {"grad_comm": "bfloat16"},
        {"main_params": None, "main_grads": None},
        {"param": "bfloat16", "output": "float32"},
    )
    for policy, strategy in itertools.product(policies, STRATEGIES):
        yield Case(strategy=strategy, precision=policy, optimizer="adamw")
    for mesh in ("dp2", "hsdp 2x2"):
        for how in _formats("none/bf16", "mxfp8/quantized"):
            yield Case("linear", mesh=mesh, exempt="second", **how)
