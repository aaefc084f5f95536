"""One rank of a process group that trains cases.

It records a digest of the bytes of every value. It uses public APIs of te_fsdp and TransformerEngine only, and no code
of the tests, so that it runs on any commit.
"""

from __future__ import annotations

import gc
import hashlib
import os
import traceback
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cases import Case
from collectives import RecordCollectives
from torch import nn

STEPS = 2
SEED = 5
SEQUENCE, BATCH, HEADS, EXPERTS = 32, 4, 4, 4
#: Wide enough that a shard of four ranks has full blocks of every format.
WIDTH = {"block": 512}
DEFAULT_WIDTH = 128

#: Name of a value -> digest, in the order of computation.
Seen = dict[str, str]


def run(case: Case, rank: int, store: Path) -> Seen:
    """Train a case as one rank of its process group. An exception is recorded as a result."""
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=case.ranks)
    seen: Seen = {}
    try:
        with RecordCollectives(seen):
            _train(case, seen)
    except Exception as error:
        seen["error"] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        if os.environ.get("SAME_BITS_VERBOSE"):
            traceback.print_exc()
    finally:
        dist.destroy_process_group()
        FP8GlobalStateManager.reset()
        gc.collect()
    return seen


def _train(case: Case, seen: Seen) -> None:
    """Train two steps of two microbatches (one with the loop ``one``)."""
    import te_fsdp

    meshes = te_fsdp.Meshes.build(**case.axes, device_type="cpu")
    model = _model(case, meshes)
    if case.exempt:
        te_fsdp.fsdp_no_shard(model.inner.get_submodule(case.exempt))
    options: dict[str, Any] = {"strategy": case.strategy, "outer_strategy": case.outer}
    if case.precision is not None:
        named = {f"{name}_dtype": dtype and getattr(torch, dtype) for name, dtype in case.precision.items()}
        options["precision"] = te_fsdp.MixedPrecisionPolicy(**named)
    te_fsdp.fully_shard(model, meshes, units=["inner"], **options)
    te_fsdp.materialize(model, seed=SEED)
    _record(seen, "initial", dict(model.named_parameters()))
    optimizer = _optimizer(case, model)
    microbatches = 1 if case.loop == "one" else 2
    for step in range(STEPS):
        for index in range(microbatches):
            x = _input(case, f"{step}.{index}")
            torch.manual_seed(SEED)  # NVFP4 rounds gradients at random
            with _told(case, model, index == microbatches - 1):
                loss = model(x).float().square().mean() / microbatches
                loss.backward()
            seen[f"loss {step}.{index}"] = loss.item().hex()
            _record(seen, f"input gradient {step}.{index}", {"": x.grad})
        if case.loop == "by hand":
            te_fsdp.finish_grad_reduce(model)
        if case.outer == "no_shard":  # else ``.grad`` is averaged only in the step and cannot be read
            grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
            _record(seen, f"gradient {step}", grads)
        seen[f"norm {step}"] = _digest(te_fsdp.clip_grad_norm_(model, 0.05))
        optimizer.step()
        te_fsdp.zero_grad(model)
        _record(seen, f"parameter {step}", dict(model.named_parameters()))
    model.eval()
    with torch.no_grad():
        _record(seen, "evaluation", {"": model(_input(case, "evaluation"))})


def _told(case: Case, model: nn.Module, last: bool) -> AbstractContextManager[Any]:
    """Return the loop's context of a microbatch."""
    import te_fsdp

    if case.loop == "microbatch":
        return te_fsdp.microbatch(model, is_last=last)
    if case.loop == "by hand" or (case.loop == "no_sync" and not last):
        return te_fsdp.no_sync(model)
    return nullcontext()


def _optimizer(case: Case, model: nn.Module) -> Any:
    """Return the case's optimizer over the sharded parameters."""
    from transformer_engine.pytorch.optimizers import FusedAdam

    import te_fsdp

    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if case.optimizer == "adamw":
        return torch.optim.AdamW(parameters, lr=0.01)
    if case.optimizer == "shard_optimizer":
        return te_fsdp.shard_optimizer(FusedAdam(parameters, lr=0.01, master_weights=True))
    optimizer = FusedAdam(parameters, lr=0.01, master_weights=True)
    if case.outer == "optim":
        optimizer = te_fsdp.shard_optimizer(optimizer)
    if case.optimizer == "fused, main weights":
        te_fsdp.main_weights(model, optimizer)
    return optimizer


def _input(case: Case, place: str) -> torch.Tensor:
    """Return this rank's activations: different on every data-parallel rank, the same within tp."""
    tp = case.axes.get("tp", 1)
    generator = torch.Generator().manual_seed(sum(place.encode()) * 64 + dist.get_rank() // tp)
    width = WIDTH.get(case.recipe, DEFAULT_WIDTH)
    x = torch.randn(SEQUENCE, BATCH, width, generator=generator)
    if case.sequence_parallel and tp > 1:
        x = x.chunk(tp)[dist.get_rank() % tp]
    return x.to(torch.float32 if case.weights == "fp32" else torch.bfloat16).contiguous().requires_grad_()


def _record(seen: Seen, what: str, tensors: dict[str, torch.Tensor]) -> None:
    """Record digests of this rank's local tensors."""
    for name, tensor in tensors.items():
        seen[f"{what} {name}".strip()] = _digest(tensor)


def _digest(tensor: torch.Tensor) -> str:
    """Return a digest of shape, dtype and data; for a quantized tensor, of its values in fp32."""
    local = tensor.detach()
    local = local.to_local() if hasattr(local, "to_local") else local
    kind = type(local).__name__
    if hasattr(local, "dequantize") and kind.endswith("Tensor") and kind != "Tensor":
        local = local.dequantize(dtype=torch.float32)
    data = local.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes() if local.numel() else b""
    return hashlib.blake2b(f"{kind} {tuple(local.shape)} ".encode() + data, digest_size=8).hexdigest()


# --- models ----------------------------------------------------------------------------------------------------------


class Trunk(nn.Module):
    """A module that runs under a recipe."""

    def __init__(self, inner: nn.Module, recipe: Any) -> None:
        super().__init__()
        self.inner, self.recipe = inner, recipe

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map activations (sequence, batch, hidden) to the same shape."""
        import transformer_engine.pytorch as te

        with te.autocast(enabled=True, recipe=self.recipe) if self.recipe is not None else nullcontext():
            out = self.inner(x)
        return out[0] if isinstance(out, tuple) else out


class Pair(nn.Module):
    """A column-parallel and a row-parallel linear."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map activations to activations."""
        return self.second(self.first(x))


class Experts(nn.Module):
    """Experts of this rank, each with an equal number of the rank's tokens."""

    def __init__(self, own: int, width: int, **options: Any) -> None:
        super().__init__()
        import transformer_engine.pytorch as te

        self.own = own
        self.experts = te.GroupedLinear(own, width, width, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map activations to activations."""
        rows = x.reshape(-1, x.shape[-1])
        return self.experts(rows, [rows.shape[0] // self.own] * self.own).view(x.shape)


def _recipe(name: str) -> Any:
    """Return TE's recipe of this name."""
    from transformer_engine.common import recipe

    classes = {
        "delayed": recipe.DelayedScaling,
        "current": recipe.Float8CurrentScaling,
        "block": recipe.Float8BlockScaling,
        "mxfp8": recipe.MXFP8BlockScaling,
        "nvfp4": recipe.NVFP4BlockScaling,
    }
    return None if name == "none" else classes[name]()


def _model(case: Case, meshes: Any) -> Trunk:
    """Return the case's model on meta."""
    import transformer_engine.pytorch as te

    recipe = _recipe(case.recipe)
    with te.quantized_model_init(recipe=recipe) if case.weights == "quantized" else nullcontext():
        return Trunk(_inner(case, meshes), recipe)


def _inner(case: Case, meshes: Any) -> nn.Module:
    """Return the module under test."""
    import transformer_engine.pytorch as te

    width = WIDTH.get(case.recipe, DEFAULT_WIDTH)
    dtype = torch.float32 if case.weights == "fp32" else torch.bfloat16
    common: dict[str, Any] = {"params_dtype": dtype, "device": "meta"}
    if case.module == "grouped":
        return Experts(EXPERTS // meshes.size("ep"), width, bias=False, **common)
    common |= {**meshes.te_kwargs(), "sequence_parallel": case.sequence_parallel}
    if case.module in ("linear", "layernorm_linear"):
        first = te.Linear if case.module == "linear" else te.LayerNormLinear
        return Pair(
            first(width, 2 * width, parallel_mode="column", **common),
            te.Linear(2 * width, width, parallel_mode="row", **common),
        )
    if case.module.startswith("mlp_"):
        return te.LayerNormMLP(width, 2 * width, activation=case.module[4:], set_parallel_mode=True, **common)
    common |= {"attention_dropout": 0.0, "fuse_qkv_params": True, "set_parallel_mode": True}
    if case.module == "attention":
        common |= {"attn_mask_type": "causal", "input_layernorm": True, "num_gqa_groups": 2}
        return te.MultiheadAttention(width, HEADS, **common)
    common |= {"self_attn_mask_type": "causal", "hidden_dropout": 0.0, "activation": "swiglu"}
    return te.TransformerLayer(width, 2 * width, HEADS, **common)
