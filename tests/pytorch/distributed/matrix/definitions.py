"""The matrix: its factors, with the refused combinations. Imports neither torch nor TE.

The tests run these definitions, and `scripts/support_table.py` writes `docs/support.md` from them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, NamedTuple

from matrix.covering import all_cases, covering
from matrix.rotation import COVER_DAYS

#: TE's recipes; "hybrid" is a custom recipe: 8-bit blocks forward, high precision backward.
RECIPES = ("none", "delayed", "current", "block", "mxfp8", "nvfp4", "hybrid")
WEIGHTS = ("fp32", "bf16", "quantized")
MODULES = (
    "linear",
    "layernorm_linear",
    "mlp_gelu",
    "mlp_swiglu",
    "attention",
    "transformer",
    "grouped",
)


class Mesh(NamedTuple):
    """Sizes of the axes."""

    dp_replicate: int
    dp_shard: int
    tp: int

    @property
    def ranks(self) -> int:
        """Return the number of processes that it takes."""
        return self.dp_replicate * self.dp_shard * self.tp


MESHES = {
    "dp4": Mesh(1, 4, 1),
    "tp4": Mesh(1, 1, 4),
    "dp2xtp2": Mesh(1, 2, 2),
    "hsdp2x2": Mesh(2, 2, 1),
    "hsdp2x2xtp2": Mesh(2, 2, 2),
}
#: Micro-batches in a step, and whether their gradients are reduced each time or once, with the last one.
ACCUMULATION = {"1": (1, True), "3": (3, True), "3-deferred": (3, False)}

#: Formats of weights that go with a recipe: fp32 shows what is not rounding, quantized ones need a format.
FORMATS = tuple(
    (recipe, weights)
    for recipe in RECIPES
    for weights in (("fp32", "bf16") if recipe == "none" else ("bf16", "quantized"))
)

FACTORS: dict[str, tuple[Any, ...]] = {
    "arch": ("10.0", "9.0"),
    "recipe": RECIPES,
    "weights": WEIGHTS,
    "module": MODULES,
    "mesh": tuple(MESHES),
    "sequence_parallel": (False, True),
    "accumulation": tuple(ACCUMULATION),
    "reshard": (True, False),
    "checkpointing": ("off", "te", "torch", "own"),
}


@dataclass(frozen=True)
class Case:
    """One combination: a value of each factor."""

    arch: str = "10.0"
    recipe: str = "none"
    weights: str = "bf16"
    module: str = "transformer"
    mesh: str = "dp2xtp2"
    sequence_parallel: bool = False
    accumulation: str = "1"
    reshard: bool = True
    checkpointing: str = "off"

    def __str__(self) -> str:
        marks = {
            "sp": self.sequence_parallel,
            f"accumulate{self.accumulation}": self.accumulation != "1",
            "keep": not self.reshard,
            f"{self.checkpointing}_checkpoint": self.checkpointing != "off",
        }
        return "-".join(
            [self.recipe, self.weights, self.module, self.mesh, *(mark for mark, on in marks.items() if on)]
        )

    @property
    def kwargs(self) -> dict[str, Any]:
        """Return all factors but the architecture, which the worker pool has."""
        values = asdict(self)
        del values["arch"]
        return values


assert tuple(field.name for field in fields(Case)) == tuple(FACTORS)


class Refusal(NamedTuple):
    """An expected error of a combination.

    Attributes:
        error: Class of the error.
        text: Part of its message.
        reason: For the support table.
    """

    error: str
    text: str
    reason: str


NO_MXFP8 = Refusal(
    "RuntimeError",
    "compute capability 10.0 or higher required",
    "`te.autocast` refuses it, naming the device",
)
NO_NVFP4 = Refusal("AssertionError", "compute capability 10.0 or higher required", NO_MXFP8.reason)
NO_FORMAT = Refusal("PrecisionError", "on this device", "the device does not have the format")
NO_CONSTRUCTOR = Refusal(
    "ValueError",
    "GroupedLinear doesn't support TP > 1",
    "GroupedLinear under tensor parallelism: TE's constructor refuses it",
)
NO_COMMON_SCALE = Refusal(
    "PrecisionError",
    "(GroupedLinear): recipe Float8CurrentScaling with tp_size",
    "GroupedLinear under tensor parallelism: TE refuses it in forward",
)
NO_SEQUENCE = Refusal(
    "PlacementError",
    "sequence_parallel=True is not supported",
    "GroupedLinear with `sequence_parallel=True`: it communicates nothing over tp, so that the option would do nothing",
)
#: Modules that can run a part of their forward again themselves: LayerNormMLP all of it, others the core attention.
CHECKPOINTS_ITSELF = ("mlp_gelu", "mlp_swiglu", "attention", "transformer")


def exists(case: Case) -> bool:
    """Return whether the combination is meaningful."""
    split = MESHES[case.mesh].tp > 1
    own = case.checkpointing != "own" or case.module in CHECKPOINTS_ITSELF
    return (case.recipe, case.weights) in FORMATS and own and (split or not case.sequence_parallel)


def refusal(case: Case) -> Refusal | None:
    """Return the expected error of a combination, `None` if it trains; in the order in which the calls raise."""
    quantized, split = case.weights == "quantized", MESHES[case.mesh].tp > 1
    grouped = case.module == "grouped"
    missing = case.arch == "9.0" and case.recipe in ("mxfp8", "nvfp4")
    rules = (
        (NO_CONSTRUCTOR, grouped and case.recipe == "current" and quantized and split),
        (NO_SEQUENCE, grouped and case.sequence_parallel),
        (NO_MXFP8, missing and case.recipe == "mxfp8" and not quantized),
        (NO_NVFP4, missing and not quantized),
        (NO_FORMAT, missing),
        (NO_COMMON_SCALE, grouped and case.recipe == "current" and split),
    )
    return next((result for result, holds in rules if holds), None)


def supported(case: Case) -> bool:
    """Return whether a combination trains."""
    return exists(case) and refusal(case) is None


def full() -> Iterator[Case]:
    """Return the full product of what trains."""
    return (Case(**values) for values in all_cases(FACTORS, lambda values: supported(Case(**values))))


@functools.cache  # once for each of two tests
def default(seed: int = 0) -> list[Case]:
    """Return a pairwise covering: every pair of values of two factors occurs, unless it never can.

    `COVER_DAYS` seeds in a row, from a multiple of it, have the same cases; others have other cases.
    """
    chosen = covering(
        FACTORS,
        lambda values: supported(Case(**values)),
        lambda values: MESHES[values["mesh"]].ranks,
        seed // COVER_DAYS,
    )
    return [Case(**values) for values in chosen]


def every_format() -> list[Case]:
    """Return the same with a recipe and its weights as one factor: every such pair in every module and mesh."""
    factors = {"format": FORMATS, **{n: v for n, v in FACTORS.items() if n not in ("recipe", "weights")}}
    chosen = covering(
        factors, lambda values: supported(_case(values)), lambda values: MESHES[values["mesh"]].ranks
    )
    return [_case(values) for values in chosen]


def _case(values: dict[str, Any]) -> Case:
    recipe, weights = values["format"]
    return Case(recipe=recipe, weights=weights, **{n: v for n, v in values.items() if n != "format"})


def subset() -> list[Case]:
    """Return cases for 4 Hopper GPUs: each of their formats, bf16 and quantized weights, on every mesh, thrice.

    The other factors cover the pairs with these, and the modules take turns.
    """
    factors = {
        "format": tuple(
            (recipe, weights) for recipe, weights in FORMATS if recipe in ("delayed", "current", "block")
        ),
        "mesh": tuple(name for name, mesh in MESHES.items() if mesh.ranks == 4),
    }
    places = tuple(
        (recipe, weights, mesh) for recipe, weights in factors["format"] for mesh in factors["mesh"]
    )
    rest = ("sequence_parallel", "accumulation", "reshard", "checkpointing")

    def plain(values: dict[str, Any]) -> Case:
        recipe, weights, mesh = values["place"]
        others = {name: values[name] for name in rest}
        return Case(arch="9.0", recipe=recipe, weights=weights, mesh=mesh, **others)

    chosen = covering(
        {"place": places, **{n: FACTORS[n] for n in rest}}, lambda values: supported(plain(values))
    )
    cases = []
    for turn, values in enumerate(chosen):
        in_turn = (*MODULES[turn % len(MODULES) :], *MODULES)
        options = (replace(plain(values), module=module) for module in in_turn)
        cases.append(next(case for case in options if supported(case)))
    return cases


@functools.cache
def refused() -> list[tuple[Case, Refusal]]:
    """Return one case of every error for each format that can have it, the simplest one."""
    results: dict[tuple[Any, ...], Case] = {}
    for values in all_cases(FACTORS, lambda values: exists(Case(**values))):
        case = Case(**values)
        reason = refusal(case)
        if reason is not None:
            key = (reason, case.recipe, case.weights)
            results[key] = min(results.get(key, case), case, key=_plainness)
    return [(case, key[0]) for key, case in results.items()]


def _plainness(case: Case) -> int:
    """Return the number of options that are not the default, 8 ranks counting as several."""
    plain = Case(arch=case.arch, recipe=case.recipe, weights=case.weights, module=case.module)
    return sum(getattr(case, name) != getattr(plain, name) for name in FACTORS) + MESHES[case.mesh].ranks
