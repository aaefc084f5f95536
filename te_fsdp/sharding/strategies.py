"""Sharding strategies as data: what is cut over ``dp_shard``, when weights are gathered, when gradients are reduced.

                         held between steps            gathered          gathered weights     gradients are reduced,
                         weights  grads   optimizer    (all-gather)      are released after   several microbatches
    no_shard             whole    whole   whole        never             -                    with the last one
    optim                cut      whole   cut          once per step     the last backward    with the last one
    optim_grads          cut      cut     cut          once per step     the last backward    with each one
    optim_grads_params   cut      cut     cut          in each forward   forward, and         with each one
                                                       and backward      backward

The two middle columns are what a training loop gets that says which microbatch is the last one
(``te_fsdp.microbatch``). A plain loop cannot say it: there each backward counts as the last one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Any

from te_fsdp.errors import PlacementError, meant

__all__ = ["DEFAULT", "OUTER_STRATEGIES", "STRATEGIES", "Pace", "Strategy", "check_outer", "strategy_of"]


class Pace(Enum):
    """How a backward counts.

    Attributes:
        LAST: As the last one of its optimizer step: all gradients are reduced, gathered weights released. The default.
        MORE: Others follow: gradients are reduced where that saves memory, weights kept where the strategy keeps them.
        LOCAL: Others follow, and none of this one's gradients is reduced.
    """

    LAST = "last"
    MORE = "more"
    LOCAL = "local"


@dataclass(frozen=True)
class Strategy:
    """One row of the table.

    Attributes:
        name: The user's word for it.
        shards: Whether FSDP2 cuts the weights, and with them the optimizer's state, over ``dp_shard``.
        release_after_forward: Whether gathered weights are released between forward and backward.
        keep_between: Whether gathered weights outlive a backward that is not the last of its step.
        reduce_each: Whether gradients are reduced in a backward that is not the last of its step; otherwise they
            add up unreduced, in whole gradients.
    """

    name: str
    shards: bool
    release_after_forward: bool
    keep_between: bool
    reduce_each: bool

    def reduces(self, pace: Pace) -> bool:
        """Whether a backward ends with gradients reduced over ``dp_shard``."""
        return pace is Pace.LAST or (pace is Pace.MORE and self.reduce_each)

    def releases(self, pace: Pace) -> bool:
        """Whether a backward ends with weights released."""
        return pace is Pace.LAST or not self.keep_between

    def __str__(self) -> str:
        return self.name


#: The table. ``no_shard`` is the only row without FSDP2.
STRATEGIES: Mapping[str, Strategy] = MappingProxyType(
    {
        row.name: row
        for row in (
            Strategy("no_shard", False, False, True, False),
            Strategy("optim", True, False, True, False),
            Strategy("optim_grads", True, False, True, True),
            Strategy("optim_grads_params", True, True, False, True),
        )
    }
)
#: What a model gets that names no strategy.
DEFAULT = STRATEGIES["optim_grads_params"]
#: Over ``dp_replicate``: every rank has the whole state of its ``dp_shard`` group (HSDP), or main weights and
#: optimizer state are cut over both axes (HFSDP).
OUTER_STRATEGIES = ("no_shard", "optim")

_HYBRID = "'{}' on Meshes.build(dp_replicate=...), whose outer axis copies the model"
_HFSDP = "'optim_grads_params' and outer_strategy='optim' on Meshes.build(dp_replicate=...)"
#: Words of DeepSpeed, FSDP1 and others, as :func:`te_fsdp.errors.meant` compares them, and what to write here.
_ELSEWHERE = {
    **dict.fromkeys(
        ("0", "zero0", "stage0", "zerostage0", "ddp", "no", "none", "false", "replicate"), "no_shard"
    ),
    **dict.fromkeys(("1", "zero1", "stage1", "zerostage1", "optimizer", "zero", "os"), "optim"),
    **dict.fromkeys(("2", "zero2", "stage2", "zerostage2", "shardgradop", "osg", "gradop"), "optim_grads"),
    **dict.fromkeys(("3", "zero3", "stage3", "zerostage3", "fullshard", "fullyshard"), "optim_grads_params"),
    **dict.fromkeys(("full", "fsdp", "fsdp2", "params", "true", "osgp"), "optim_grads_params"),
    **dict.fromkeys(("hybridshard", "hsdp", "hybrid"), _HYBRID.format("optim_grads_params")),
    "hybridshardzero2": _HYBRID.format("optim_grads"),
    "hfsdp": _HFSDP,
}
_OUTER_ELSEWHERE = {
    **dict.fromkeys(
        ("0", "zero0", "ddp", "no", "none", "false", "replicate", "hsdp", "hybridshard"), "no_shard"
    ),
    **dict.fromkeys(
        ("1", "2", "3", "zero1", "zero2", "zero3", "hfsdp", "full", "fullshard", "true"), "optim"
    ),
    **dict.fromkeys(("optimgrads", "optimgradsparams", "shardgradop", "optimizer", "zero"), "optim"),
}


def strategy_of(name: Any) -> Strategy:
    """The row of a name; a :class:`Strategy` is returned as it is.

    Raises:
        PlacementError: No such strategy.
    """
    if isinstance(name, Strategy):
        return name
    if not isinstance(name, str) or name not in STRATEGIES:
        raise _no_such("strategy", name, tuple(STRATEGIES), _ELSEWHERE)
    return STRATEGIES[name]


def check_outer(outer: Any) -> str:
    """``outer`` if it is one of :data:`OUTER_STRATEGIES`.

    Raises:
        PlacementError: It is not.
    """
    if not isinstance(outer, str) or outer not in OUTER_STRATEGIES:
        raise _no_such("outer_strategy", outer, OUTER_STRATEGIES, _OUTER_ELSEWHERE)
    return outer


def _no_such(option: str, given: Any, words: tuple[str, ...], elsewhere: Mapping[str, str]) -> PlacementError:
    """The error of a word that is none of ours, with the one that it probably stands for."""
    near = meant(given, words, elsewhere)
    fix = f"{option}={near if near is None or near.startswith(chr(39)) else repr(near)}"
    return PlacementError(
        f"fully_shard: {option}",
        expected=f"one of {words}",
        got=repr(given),
        fix=fix if near is not None else f"one of these; {option} may be left out",
    )
