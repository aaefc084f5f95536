"""Private lists of torch's optimizers, checked with torch 2.11 to 2.15."""

from __future__ import annotations

import torch
from torch.optim import optimizer
from torch.utils import _foreach_utils


def support_foreach(cls: type[torch.Tensor]) -> None:
    """Let torch's optimizers use foreach kernels for a subclass of DTensor, as torch does for DTensor itself.

    Optimizers compare exact classes (``_foreach_supported_types``). One parameter of an unknown subclass would
    make them update its group parameter by parameter.
    """
    for types in (optimizer._foreach_supported_types, _foreach_utils._foreach_supported_types):
        if cls not in types:
            types.append(cls)  # type: ignore[arg-type]
