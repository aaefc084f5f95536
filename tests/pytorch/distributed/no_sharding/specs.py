"""Bodies: the specs of reduced gradients of replicated parameters."""

from __future__ import annotations

import harness
import torch
from strategies.models import batch, sharded


def changed_specs() -> list[str]:
    """Return parameters whose gradient's spec changes in the second step, or has a different dtype."""
    import te_fsdp

    meshes = te_fsdp.Meshes.build(dp_shard=1, tp=2, device_type=harness.device_type())
    policy = te_fsdp.MixedPrecisionPolicy(main_grads_dtype=torch.float32)
    model = sharded(meshes, "no_shard", dtype=torch.bfloat16, precision=policy)
    seen = []
    for step in range(2):
        model(batch(step, 1, 1)[0, 0].bfloat16()).float().square().mean().backward()
        grads = {name: p.grad for name, p in model.named_parameters() if hasattr(p.grad, "_spec")}
        seen.append(
            {name: (g._spec, g._spec.tensor_meta.dtype == g._local_tensor.dtype) for name, g in grads.items()}
        )
        model.zero_grad()
    assert seen[0], "no DTensors"
    return [name for name, (spec, fits) in seen[0].items() if spec is not seen[1][name][0] or not fits]
