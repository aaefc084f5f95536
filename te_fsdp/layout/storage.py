"""Sharding strategies as data: where each kind of tensor rests, when weights are gathered, when gradients are reduced.

                         held between steps            gathered          gathered weights     gradients are reduced,
                         weights  grads   optimizer    (all-gather)      are released after   several microbatches
    no_shard             whole    whole   whole        never             -                    with the last one
    optim                cut      whole   cut          once per step     the last backward    with the last one
    optim_grads          cut      cut     cut          once per step     the last backward    with each one
    optim_grads_params   cut      cut     cut          in each forward   forward, and         with each one
                                                       and backward      backward

The two middle columns are what a training loop gets that says which microbatch is the last one
(``te_fsdp.microbatch``). A plain loop cannot say it: there each backward counts as the last one. :data:`STORAGE` is the
same with ``dp_replicate``, over which main weights and optimizer state may be cut too (HFSDP).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING

from te_fsdp.axes import AXES

if TYPE_CHECKING:
    import torch

    from te_fsdp.layout.rules import ParameterRule


class SyncMode(Enum):
    """How a backward counts.

    Attributes:
        LAST: As the last one of its optimizer step: all gradients are reduced, gathered weights released. The default.
        ACCUMULATE: Others follow: gradients are reduced where that saves memory, weights kept where the strategy keeps
            them.
        NO_SYNC: Others follow, and none of this one's gradients is reduced.
    """

    LAST = "last"
    ACCUMULATE = "accumulate"
    NO_SYNC = "no_sync"


@dataclass(frozen=True)
class Storage:
    """How parameters of one kind are stored: a row of :data:`STORAGE`.

    Placements have a letter for each of (``dp_replicate``, ``dp_shard``): ``R`` where every rank of the axis holds the
    whole, ``S`` where each holds a piece, ``P`` where each holds a contribution that is still to be added up.

    Attributes:
        strategy: The user's word for what is cut over ``dp_shard``, or :data:`REPLICATED`.
        outer: The user's word for what is cut over ``dp_replicate``.
        parameter: Of the parameter between two steps.
        gradient: Of its gradient after a backward that reduces.
        optimizer: Of its main weight and of the optimizer's states.
        gather: When it is gathered: ``"never"``, once per ``"step"``, or in each ``"pass"`` (forward and backward).
        reduce: With which backward of a step its gradient is reduced: the ``"last"`` or ``"each"``.
    """

    strategy: str
    outer: str
    parameter: str
    gradient: str
    optimizer: str
    gather: str
    reduce: str

    @functools.cached_property
    def is_whole(self) -> bool:
        """Whether every data-parallel rank holds the whole parameter: FSDP2 knows nothing of it."""
        return self.parameter == "RR"

    @functools.cached_property
    def cut_further(self) -> tuple[str, ...]:
        """The axes that cut main weight and optimizer state, though every rank of them holds the parameter alike."""
        columns = zip(AXES, self.parameter, self.optimizer, strict=False)
        return tuple(axis for axis, parameter, optimizer in columns if parameter != optimizer)

    def reduces(self, mode: SyncMode) -> bool:
        """Whether a backward ends with gradients reduced over ``dp_shard``."""
        return mode is SyncMode.LAST or (mode is SyncMode.ACCUMULATE and self.reduce == "each")

    def releases(self, mode: SyncMode) -> bool:
        """Whether a backward ends with weights released."""
        return mode is SyncMode.LAST or self.gather == "pass"

    def __str__(self) -> str:
        return self.strategy


#: What users write. ``no_shard`` is the only one without FSDP2.
STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
#: Over ``dp_replicate``: every rank has the whole state of its ``dp_shard`` group (HSDP), or main weights and
#: optimizer state are cut over both axes (HFSDP).
OUTER_STRATEGIES = ("no_shard", "optim")
#: Of parameters that stay whole in a unit that is cut (:func:`te_fsdp.fsdp_no_shard`).
REPLICATED = "fsdp_no_shard"

_ROWS = (
    #        strategy              outer       parameter gradient optimizer gather   reduce
    Storage("no_shard",           "no_shard",  "RR",     "RR",    "RR",     "never", "last"),
    Storage("optim",              "no_shard",  "RS",     "RS",    "RS",     "step",  "last"),
    Storage("optim_grads",        "no_shard",  "RS",     "RS",    "RS",     "step",  "each"),
    Storage("optim_grads_params", "no_shard",  "RS",     "RS",    "RS",     "pass",  "each"),
    Storage(REPLICATED,               "no_shard",  "RR",     "RR",    "SS",     "never", "last"),
    Storage("no_shard",           "optim",     "RR",     "RR",    "RR",     "never", "last"),
    Storage("optim",              "optim",     "RS",     "PS",    "SS",     "step",  "last"),
    Storage("optim_grads",        "optim",     "RS",     "PS",    "SS",     "step",  "each"),
    Storage("optim_grads_params", "optim",     "RS",     "PS",    "SS",     "pass",  "each"),
    Storage(REPLICATED,               "optim",     "RR",     "RR",    "SS",     "never", "last"),
)  # fmt: skip

#: The table, by strategy and outer strategy.
STORAGE: Mapping[tuple[str, str], Storage] = MappingProxyType({(r.strategy, r.outer): r for r in _ROWS})


@dataclass(frozen=True)
class ParameterPlan:
    """What ``fully_shard`` settles for one place where a parameter is registered, before anything changes.

    Attributes:
        label: Full name, once its module is bound: experts then count globally, and may be one parameter.
        name: Its last part.
        unit: Name of the innermost unit around it.
        storage: Where it rests, and what belongs to it.
        owners: Full names of all places of this very parameter, that of the first in front: several if it is tied.
        rule: How tp cuts it; ``None`` if it does not.
        experts: Whether it is dealt out over ``ep``.
        cut_dim: The dim that FSDP2 is told to cut, of weights that are quantized or hold all experts.
        gradient_dtype: Dtype of its gradient, if that is to be another than its own.
    """

    label: str
    name: str
    unit: str
    storage: Storage
    owners: tuple[str, ...]
    rule: ParameterRule | None = None
    experts: bool = False
    cut_dim: int | None = None
    gradient_dtype: torch.dtype | None = None
