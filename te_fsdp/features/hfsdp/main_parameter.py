"""``MainParameter``: record of one parameter of an optimizer with main parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from te_fsdp.tensor_version import TensorVersion


@dataclass(eq=False)
class MainParameter:
    """A parameter of an optimizer, and the main parameter that the optimizer updates in its place."""

    parameter: torch.Tensor
    shard: Any = (
        None  #: This rank's ``OptimizerShard``; ``None`` if the optimizer state is not sharded further
    )
    main: Any = None  #: The main parameter; ``None`` if the parameter needs none
    local: Any = None  #: The local tensor that ``main`` belongs to
    low: bool = False  #: Whether the parameter is of low precision, so that ``main`` is its main weight
    #: The gradient whose average over the replicas is the gradient of ``main``; ``None`` without an average.
    source: TensorVersion | None = None
