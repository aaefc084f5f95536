"""Bodies: gradients reduced without a copy, compared bit for bit with gradients that FSDP2 copies to a buffer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import harness
import torch
from torch import nn

from hfsdp.wgrad_fusion import BATCH, HIDDEN, SEQUENCE, Model

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class Branch(nn.Module):
    """A unit in which some ranks leave out what TE computes."""

    def __init__(self, dtype: torch.dtype, **kwargs: Any) -> None:
        import transformer_engine.pytorch as te

        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN, dtype=dtype, device=kwargs["device"])
        self.linear = te.LayerNormLinear(HIDDEN, HIDDEN, params_dtype=dtype, **kwargs)

    def forward(self, x: torch.Tensor, is_taken: bool) -> torch.Tensor:
        x = self.norm(x)
        return self.linear(x) if is_taken else x


class Mixed(Model):
    """A model with uneven rows, user modules, experts, and a branch that only some ranks take."""

    def __init__(
        self, device: Any, dtype: torch.dtype, fused: bool, tp: bool, width: int, **kwargs: Any
    ) -> None:
        import transformer_engine.pytorch as te

        super().__init__(device, dtype, fused, **kwargs)
        plain = {"params_dtype": dtype, "device": device}
        self.branch = Branch(dtype, device=device, fuse_wgrad_accumulation=fused)
        self.uneven = te.Linear(HIDDEN, width, fuse_wgrad_accumulation=fused, **plain)
        self.users = nn.Linear(width, HIDDEN, dtype=dtype, device=device)
        # Replicated over tp, ranks would have to agree on who takes the branch.
        self.experts = None if tp else te.GroupedLinear(2, HIDDEN, HIDDEN, bias=False, **plain)

    def forward(self, x: torch.Tensor, takes_branch: bool) -> torch.Tensor:
        y = self.branch(super().forward(x), takes_branch)
        y = self.users(self.uneven(y))
        if self.experts is not None:
            rows = y.shape[0] * y.shape[1]
            y = self.experts(y.flatten(0, 1), [rows // 4, rows - rows // 4]).view(y.shape)
        return y


@contextlib.contextmanager
def copied_elements(fault: str = "") -> Iterator[dict[str, int]]:
    """Count elements of gradients that were reduced in parts, and those of them that were copied.

    Args:
        fault: ``"lost"``: negative control, gradients that are sent without a copy are empty.
    """
    from te_fsdp.upstream import symmetric_memory as _torch_transport

    seen, stock = {"reduced": 0, "copied": 0}, _torch_transport.ZeroCopyInput._fill

    def fill(self: Any, gradients: Any, chunk_cat: Any) -> None:
        stock(self, gradients, chunk_cat)
        memory = {gradient.untyped_storage().data_ptr() for gradient in gradients}
        for part in self.sent:
            is_copy = part.untyped_storage().data_ptr() not in memory
            seen["copied"] += part.numel() * is_copy
            seen["reduced"] += part.numel()
            if fault == "lost" and not is_copy:
                part.zero_()

    _torch_transport.ZeroCopyInput._fill = fill
    try:
        yield seen
    finally:
        _torch_transport.ZeroCopyInput._fill = stock


@contextlib.contextmanager
def send_small_gradients_directly() -> Iterator[None]:
    """Send gradients of models as small as these as large ones are sent."""
    from te_fsdp.upstream import symmetric_memory as _torch_transport

    stock, _torch_transport.LARGE = _torch_transport.LARGE, 512
    try:
        yield
    finally:
        _torch_transport.LARGE = stock


@send_small_gradients_directly()
def compare_with_copied_gradients(
    axes: dict[str, int],
    dtype: str = "bf16",
    microbatches: int = 1,
    strategy: str = "optim_grads_params",
    outer: str = "no_shard",
    policy: dict[str, Any] | None = None,
    recipe: str = "none",
    fused: bool = False,
    fault: str = "",
) -> dict[str, Any]:
    """Compare two steps with those of a model whose gradients are copied.

    Args:
        axes: Sizes of the mesh.
        dtype: Of parameters.
        microbatches: Of a step, marked in te_fsdp.
        strategy: Of ``fully_shard``.
        outer: Its outer strategy.
        fused: TE adds weight gradients up (``fuse_wgrad_accumulation``), in both models.
        policy: Of ``MixedPrecisionPolicy``, dtypes by name; ``None``: without one.
        recipe: That weights are quantized by.
        fault: Of :func:`copied_elements`.

    Returns:
        Comparisons; elements reduced and copied, of each step of each model; the report.
    """
    from quantization.models import recipe_of

    import te_fsdp
    from te_fsdp.upstream.torch_dtensor import local_of

    meshes = te_fsdp.Meshes.build(**axes, device_type=harness.device_type())
    chosen = recipe_of(recipe) if recipe != "none" else None
    options: dict[str, Any] = {"strategy": strategy, "outer_strategy": outer}
    if policy is not None:
        options["precision"] = te_fsdp.MixedPrecisionPolicy(**{k: DTYPES[v] for k, v in policy.items()})
    kinds = [{**options, "zero_copy_gradients": zero_copy} for zero_copy in (True, False)]
    models = [_sharded(meshes, chosen, DTYPES[dtype], fused, kind) for kind in kinds]
    te_fsdp.report_nan(models[0])
    optimizers = [_optimizer(model) for model in models]
    checks, counts, norms = harness.Comparisons(), [], []
    # New memory is filled with NaN, so that reads of uninitialized memory are detected.
    torch.use_deterministic_algorithms(True, warn_only=True)
    for step in range(2):
        for which, model in enumerate(models):
            with copied_elements("" if which else fault) as seen:
                _microbatches(model, step, microbatches, meshes, DTYPES[dtype], chosen)
                te_fsdp.finish_grad_reduce(model)
            counts.append(seen)
            norms.append(te_fsdp.clip_grad_norm_(model, 1024.0))
        for (name, actual), expected in zip(
            models[0].named_parameters(), models[1].parameters(), strict=True
        ):
            checks.bitwise_equal(f"{step} {name}", local_of(actual.grad), local_of(expected.grad))
        checks.bitwise_equal(f"{step} norm", *norms[-2:])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return {"compared": checks.require(20), "counts": counts, "report": str(te_fsdp.report(models[0]))}


def compare_without_root_parameters() -> dict[str, Any]:
    """Compare a model with all parameters in units with a copying one: gradients of one backward, and the report."""
    import te_fsdp

    meshes = te_fsdp.Meshes.build(dp_shard=2, device_type=harness.device_type())
    checks, models = harness.Comparisons(), []
    for zero_copy in (True, False):
        layers = [nn.Linear(256, 256, bias=False, device="meta") for _ in range(2)]
        models.append(nn.Sequential(*layers))
        te_fsdp.fully_shard(models[-1], meshes, units=["0", "1"], zero_copy_gradients=zero_copy)
        te_fsdp.materialize(models[-1], seed=0)
        models[-1](torch.linspace(-1, 1, 512, device=meshes.device).view(2, 256)).square().sum().backward()
    for (name, actual), expected in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        checks.bitwise_equal(name, actual.grad, expected.grad)
    return {"compared": checks.require(2), "report": str(te_fsdp.report(models[0]))}


@send_small_gradients_directly()
def automatic_choices() -> dict[str, Any]:
    """Return the report by transport and policy, elements reduced in parts, and copied elements."""
    import te_fsdp

    meshes, results = te_fsdp.Meshes.build(dp_shard=2, device_type=harness.device_type()), {}
    for transport in ("nccl", "copy_engine"):
        for policy in (None, te_fsdp.MixedPrecisionPolicy()):
            model = nn.Linear(64, 64, dtype=torch.bfloat16, device="meta")
            te_fsdp.fully_shard(model, meshes, transport=transport, precision=policy)
            te_fsdp.materialize(model, seed=0)
            with copied_elements() as seen:
                model(torch.ones(2, 64, dtype=torch.bfloat16, device=meshes.device)).sum().backward()
            report = te_fsdp.report(model).gradients
            results[transport, "none" if policy is None else "fp32"] = report, *seen.values()
    return results


def _sharded(meshes: Any, recipe: Any, dtype: torch.dtype, fused: bool, options: dict[str, Any]) -> Any:
    import transformer_engine.pytorch as te

    import te_fsdp

    with te.quantized_model_init(recipe=recipe) if recipe else contextlib.nullcontext():
        # FP8 products want multiples of 16.
        width = 48 if recipe else 37
        model = Mixed("meta", dtype, fused, meshes.size("tp") > 1, width, **meshes.te_kwargs())
    te_fsdp.fully_shard(model, meshes, units=["layer", "branch"], **options)
    return te_fsdp.materialize(model, seed=4)


def _optimizer(model: Any) -> torch.optim.Optimizer:
    import te_fsdp

    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    te_fsdp.main_weights(model, optimizer)
    te_fsdp.shard_optimizer(optimizer)
    return optimizer


def _microbatches(model: Any, step: int, count: int, meshes: Any, dtype: torch.dtype, recipe: Any) -> None:
    import transformer_engine.pytorch as te

    import te_fsdp

    rank = meshes.device_mesh.get_rank() // meshes.size("tp")
    for number in range(count):
        generator = torch.Generator().manual_seed(100 * step + 10 * number + rank)
        x = torch.randn(2 * SEQUENCE, BATCH // 2, HIDDEN, generator=generator).to(harness.device(), dtype)
        with te_fsdp.microbatch(model, is_last=number == count - 1):
            with te.autocast(enabled=recipe is not None, recipe=recipe):
                loss = model(x, rank == 0 or number > 0).float().square().mean()
            (1024 * loss).backward()  # fp16 has little range


def error_of_different_settings() -> None:
    """Return the error of ranks with different settings."""
    import te_fsdp

    meshes = te_fsdp.Meshes.build(device_type=harness.device_type())
    model = Model("meta", torch.float32, False)
    te_fsdp.fully_shard(model, meshes, zero_copy_gradients=meshes.device_mesh.get_rank() == 0)
