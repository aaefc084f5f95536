"""Bodies: a weight that is frozen before the backward of a forward, compared with one process."""

from __future__ import annotations

import harness
import torch
from strategies.models import batch, one_process, sharded
from torch import nn
from torch.distributed.tensor import DTensor


def _gradients(model: nn.Module, x: torch.Tensor, frozen: str) -> dict[str, torch.Tensor | None]:
    """Return the full gradients of a backward before which a parameter was frozen; ``None`` for missing ones."""
    loss = model(x).square().mean()
    model.get_parameter(frozen).requires_grad_(False)
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in gradients.items()}


def count_gradients_after_freezing(name: str, **axes: int) -> int:
    """Compare all gradients, and return the number of those that are not ``None``."""
    import te_fsdp

    meshes = te_fsdp.Meshes.build(**axes, device_type=harness.device_type())
    x = batch(0, meshes.data_size, 1)[0]
    actual = _gradients(sharded(meshes, "optim_grads_params"), x[meshes.data_rank], name)
    expected = _gradients(one_process(), x.flatten(0, 1), name)
    assert actual.keys() == expected.keys()
    for key, wanted in expected.items():
        mine = actual[key]
        assert (mine is None) == (wanted is None), key
        if mine is not None and wanted is not None:
            assert float((mine - wanted).norm() / wanted.norm()) < 1e-5, (
                key
            )  # sums of fp32 in a different order
    return sum(gradient is not None for gradient in actual.values())
