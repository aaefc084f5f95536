"""Operations that run out of memory anywhere in a step: afterwards the model trains on as if nothing had been."""

from __future__ import annotations

import random
from typing import Any

import harness
import torch
from quantization.models import recipe_of
from torch.utils._python_dispatch import TorchDispatchMode

import te_fsdp

HIDDEN, ROWS, SEED = 64, 32, 3


class AllocationFailure(TorchDispatchMode):
    """Counts tensor operations; the one of number `at` raises what an allocation on a full device raises."""

    def __init__(self, at: int = -1) -> None:
        super().__init__()
        self.seen, self.at = 0, at

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += 1
        if self.seen - 1 == self.at:
            raise torch.OutOfMemoryError("out of memory")
        return func(*args, **(kwargs or {}))


class Model(torch.nn.Module):
    """Two units and a root with its own weight, whose 7 rows no mesh divides."""

    def __init__(self, **options: Any) -> None:
        import transformer_engine.pytorch as te

        super().__init__()
        self.blocks = torch.nn.ModuleList(te.LayerNormMLP(HIDDEN, HIDDEN, **options) for _ in range(2))
        self.head = torch.nn.Linear(HIDDEN, 7, device="meta", dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class Job:
    """A model, its optimizer and this rank's two microbatches."""

    def __init__(self, recipe: str, meshes: Any, **options: Any) -> None:
        import transformer_engine.pytorch as te

        self.recipe = None if recipe == "none" else recipe_of(recipe)
        with te.quantized_model_init(enabled=self.recipe is not None, recipe=self.recipe):
            self.model = Model(
                device="meta", set_parallel_mode=True, params_dtype=torch.bfloat16, **meshes.te_kwargs()
            )
        te_fsdp.fully_shard(self.model, meshes, units="blocks.*", **options)
        te_fsdp.materialize(self.model, seed=SEED)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        main = te_fsdp.shard_optimizer if "outer_strategy" in options else self._main_weights
        main(self.optimizer)
        generator = torch.Generator().manual_seed(meshes.data_rank)
        draw = [torch.randn(ROWS, HIDDEN, generator=generator) for _ in range(2)]
        self.inputs = [x.to(harness.device(), torch.bfloat16) for x in draw]

    def _main_weights(self, optimizer: Any) -> None:
        te_fsdp.main_weights(self.model, optimizer)

    def backward(self) -> None:
        import transformer_engine.pytorch as te

        for number, x in enumerate(self.inputs):
            with te_fsdp.microbatch(self.model, is_last=number == 1):
                with te.autocast(enabled=self.recipe is not None, recipe=self.recipe):
                    loss = self.model(x).float().square().mean()
                loss.backward()

    def update(self) -> None:
        te_fsdp.clip_grad_norm_(self.model.parameters(), 0.5)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self) -> None:
        self.backward()
        self.update()


def compare_with_undisturbed(
    recipe: str, points: int, axes: dict[str, int], mended: bool = True, **options: Any
) -> dict[str, Any]:
    """Compare two equal jobs; in one, operations of a step's passes run out of memory, and the step is repeated.

    Args:
        recipe: Of the quantized weights, or "none".
        points: How many operations fail, each in its own step, drawn from all operations of the two microbatches:
            gathers, products, reductions.
        axes: Of the meshes.
        mended: False for the control: nothing is restored.
        **options: Of `te_fsdp.fully_shard`.
    """
    from strategies.bodies import patch_attributes
    from te_fsdp.upstream import fsdp2_state as _fsdp2

    meshes = te_fsdp.Meshes.build(**axes)
    calm, job = (Job(recipe, meshes, **options) for _ in range(2))
    for each in (calm, job):
        each.step()
    with AllocationFailure() as counted:
        job.backward()
    job.update()
    calm.step()
    failing = sorted(random.Random(SEED).sample(range(counted.seen), points))
    checks = harness.Comparisons()
    with patch_attributes(_fsdp2, **({} if mended else {"reset_iteration": lambda root: None})):
        for at in failing:
            _run_out(job, at)
            job.step()
            calm.step()
            expected = dict(calm.model.named_parameters())
            for name, parameter in job.model.named_parameters():
                checks.bitwise_equal(f"{name} after operation {at}", parameter, expected[name])
    return checks.require(points * len(expected))


def _run_out(job: Job, at: int) -> None:
    raised = False
    try:
        with AllocationFailure(at):
            job.backward()
    except torch.OutOfMemoryError:
        raised = True
    assert raised, f"operation {at} did not run"
    te_fsdp.zero_grad(job.model)
    job.optimizer.zero_grad()
