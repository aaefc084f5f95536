"""Bodies: every byte of a rank for a model with quantized weights, compared with the expected bytes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import harness
import torch
import torch.distributed as dist
from harness.memory import allocated as bytes_allocated, size_of, storages

from quantization import bodies
from quantization.alignment import Pair, pair

HIDDEN, MIDDLE = 256, 512
BATCH = 8
#: Of torch's CUDA allocator: every tensor takes full blocks of this size.
CUDA_BLOCK = 512
#: Bytes of a module with one weight, without the weight. Delayed scaling: 1024 amaxes and a scale, fp32, of input,
#: weight and output, and of two gradients. Other recipes keep nothing.
PER_WEIGHT = {"delayed": (1024 + 1) * (3 + 2) * 4, "current": 0, "block": 0, "mxfp8": 0, "nvfp4": 0}
#: FusedAdam's overflow flag and two scalars.
OPTIMIZER = 12
#: Tensors of the last few integers or pickled objects that went through gloo: its threads hold them until they are
#: given the next ones.
COLLECTIVES = 128


def unaccounted_bytes(
    recipe: str,
    *,
    dp_replicate: int = 1,
    tp: int = 1,
    reshard: bool = True,
    evaluate: bool = False,
    meta: bool = True,
    route: str = "ours",
    fault: str = "",
    hidden: int = HIDDEN,
    middle: int = MIDDLE,
) -> dict[str, Any]:
    """Compare the bytes of live tensors after initialization and after a training step with the expected bytes.

    Args:
        recipe: Format of the weights.
        dp_replicate: Copies.
        tp: Tensor-parallel size.
        reshard: FSDP2's ``reshard_after_forward``.
        evaluate: Whether an evaluation, which leaves weights gathered, comes last.
        meta: Whether the model is built on meta, or on the device.
        route: ``"ours"`` (te_fsdp.fully_shard) or ``"torch's"`` (set_device_mesh, then FSDP2 by the user).
        fault: ``"flat"``: FSDP2 keeps its flat shards; ``"derived"``: what TE derives from gathered bytes stays.
        hidden: Columns of the first weight.
        middle: Its rows.

    Returns:
        For ``"init"`` and ``"step"``: ``live`` (bytes of tensors on this rank that were not there before), ``held``
        (bytes of the parameters' components and of the optimizer's state), ``overhead`` (what may come on top),
        ``allocated`` (the CUDA allocator's answer, ``None`` on the CPU), ``tensors``, and the largest of the rest.
    """
    import te_fsdp

    meshes = te_fsdp.Meshes.build(dp_replicate=dp_replicate, tp=tp, device_type=harness.device_type())
    _warm_up(recipe, hidden)
    before, allocated = storages(), bytes_allocated()
    with _broken(fault):
        torch.manual_seed(bodies.SEED)
        model = pair(recipe, hidden, middle, "meta" if meta else harness.device(), **meshes.te_kwargs())
        if route == "ours":
            te_fsdp.fully_shard(model, meshes, reshard_after_forward=reshard, transport="nccl")
        else:
            from torch.distributed.fsdp import fully_shard

            te_fsdp.set_device_mesh(model, tp_mesh=meshes.tp, weight_mesh=meshes.weight)
            fully_shard(model, mesh=meshes.fsdp_with_size_one, reshard_after_forward=reshard)
        te_fsdp.materialize(model, seed=bodies.SEED)
        outcome = {"init": _compare(recipe, model, None, before, allocated)}
        step = bodies.Stepper(model, recipe, meshes, False)
        generator = torch.Generator().manual_seed(5)
        batch = torch.randn((2, 32, BATCH, hidden), generator=generator).bfloat16().to(harness.device())
        for _ in range(2):
            step(batch[0], batch[1])
        model.load_state_dict(model.state_dict())  # FSDP2 creates its flat shards again
        if evaluate:
            step.evaluate(batch[0])
        del batch
        outcome["step"] = _compare(recipe, model, step.optimizer, before, allocated)
    return outcome


def _compare(
    recipe: str, model: Pair, optimizer: Any, before: dict[int, torch.Tensor], allocated: int
) -> dict[str, Any]:
    """Live bytes against those of the model and the optimizer."""
    import te_fsdp

    for module in (model, model.first, model.second):
        if hasattr(module, "reshard"):
            module.reshard()  # type: ignore[operator]
    overhead = 2 * PER_WEIGHT[recipe] + (0 if optimizer is None else OPTIMIZER)
    held = {storage.data_ptr(): storage.nbytes() for storage in _held(model, optimizer)}
    live = {ptr: t for ptr, t in storages().items() if ptr not in before}
    rest = sorted((t.untyped_storage().nbytes(), ptr) for ptr, t in live.items() if ptr not in held)
    # The report's bytes are those of the buffers: the same sum, computed differently.
    reported = te_fsdp.report(model).total_bytes
    own = sum({s.data_ptr(): s.nbytes() for s in _held(model, None)}.values())
    return {
        "live": size_of(live),
        "held": sum(held.values()),
        "parameters": own,
        "reported": reported,
        "overhead": overhead,
        "allocated": None if harness.device_type() == "cpu" else bytes_allocated() - allocated,
        "tensors": len(live),
        "rest": [(tuple(live[ptr].shape), str(live[ptr].dtype), size) for size, ptr in rest[:-7:-1]],
        "full": math.prod(model.first.weight.shape) + math.prod(model.second.weight.shape),
    }


def _held(model: Pair, optimizer: Any) -> Iterator[torch.UntypedStorage]:
    """Yield storages of parameters, buffer by buffer, and of the optimizer's state."""
    from te_fsdp.upstream import te as _te, torch_dtensor as _torch

    tensors = list(model.parameters())
    if optimizer is not None:
        tensors += [v for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
    for tensor in tensors:
        local = _torch.local_of(tensor)
        for buffer in _te.buffers_of(local) if _te.is_quantized(local) else [local]:
            yield buffer.untyped_storage()


def _warm_up(recipe: str, hidden: int) -> None:
    """Return the tensors that TE and torch allocate once per process: workspaces, constants, communication buffers."""
    model = pair(recipe, hidden, hidden, harness.device())
    step = bodies.Stepper(model, recipe, None, False)
    batch = torch.zeros((2, 32, BATCH, hidden), dtype=torch.bfloat16, device=harness.device())
    step(batch[0], batch[1])
    dist.all_reduce(torch.zeros(1, device=harness.device()))


class _broken:
    """Within the context one of te_fsdp's savings is missing: the negative controls."""

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def __enter__(self) -> None:
        from te_fsdp.modules import mixin
        from te_fsdp.upstream import fsdp2_patches as _fsdp2_patches

        self.kept = (_fsdp2_patches.disable_flat_shard, mixin.release_function_of)
        if self.fault == "flat":
            _fsdp2_patches.disable_flat_shard = lambda managed: None
        elif self.fault == "derived":
            stock = mixin.release_function_of
            mixin.release_function_of = lambda *args: None if stock(*args) is None else lambda: None

    def __exit__(self, *error: object) -> None:
        from te_fsdp.modules import mixin
        from te_fsdp.upstream import fsdp2_patches as _fsdp2_patches

        _fsdp2_patches.disable_flat_shard, mixin.release_function_of = self.kept
