"""Levels of `fully_shard(..., checks=...)`."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import Any

import harness
import torch

import te_fsdp
from te_fsdp.collectives import rendezvous

ROOT = Path(__file__).resolve().parents[4]
#: Options of a model without random numbers.
OPTIONS = {
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "fuse_qkv_params": True,
    "set_parallel_mode": True,
    "params_dtype": torch.bfloat16,
}


class _Training:
    """A model of one TransformerLayer, sharded with a level of checks, and its optimizer."""

    def __init__(
        self,
        axes: dict[str, int],
        checks: Any,
        *,
        device: str = "meta",
        seed: int = 0,
        recipe: str | None = None,
        is_fused: bool = False,
    ) -> None:
        import transformer_engine.pytorch as te
        from transformer_engine.common import recipe as recipes

        self.meshes = te_fsdp.Meshes.build(**axes)
        torch.manual_seed(seed)
        where = harness.device() if device != "meta" else device
        options = {**OPTIONS, "device": where, **self.meshes.te_kwargs()}
        self.recipe = None if recipe is None else getattr(recipes, recipe)()
        with te.quantized_model_init(enabled=recipe is not None, recipe=self.recipe):
            self.model = torch.nn.Sequential(te.TransformerLayer(64, 128, 4, **options))
        level = {"check_inputs": False} if checks is False else {"checks": checks}
        te_fsdp.fully_shard(self.model, self.meshes, **level)
        te_fsdp.materialize(self.model, seed=0)
        if is_fused:
            self.optimizer = te.optimizers.FusedAdam(self.model.parameters(), lr=1e-3, master_weights=True)
            return
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        if recipe is not None:
            te_fsdp.main_weights(self.model, self.optimizer)

    def loss(self, seed: int = 0) -> torch.Tensor:
        import transformer_engine.pytorch as te

        torch.manual_seed(seed)
        inputs = torch.randn(16, 2, 64, dtype=torch.bfloat16, device=harness.device())
        with te.autocast(enabled=self.recipe is not None, recipe=self.recipe):
            output = self.model(inputs)
        return output.float().square().mean()

    def backward(self, seed: int = 0) -> None:
        self.loss(seed).backward()

    def step(self, seed: int = 0) -> None:
        self.backward(seed)
        self.optimizer.step()
        self.optimizer.zero_grad()


def calls_of_checks(axes: dict[str, int], checks: str | None) -> list[tuple[str, int]]:
    """Return functions of te_fsdp.checks that set-up, three steps, accumulation, an evaluation and a report call."""
    root = os.path.join(os.path.dirname(te_fsdp.__file__), "checks") + os.sep
    calls: Counter[str] = Counter()

    def count(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(root):
            calls[frame.f_code.co_name] += frame.f_code.co_name != "<module>"

    sys.setprofile(count)
    try:
        training = _Training(axes, checks)
        for seed in range(3):
            training.step(seed)
        with te_fsdp.microbatch(training.model, is_last=False):
            training.backward()
        with te_fsdp.microbatch(training.model, is_last=True):
            training.backward()
        te_fsdp.clip_grad_norm_(training.model, 1.0)
        training.optimizer.step()
        training.optimizer.zero_grad()
        training.model.eval()
        with torch.no_grad():
            training.model(torch.zeros(4, 2, 64, dtype=torch.bfloat16, device=harness.device()))
        te_fsdp.report(training.model)
    finally:
        sys.setprofile(None)
    return calls.most_common()


def calls_of_step(axes: dict[str, int], checks: str, **options: Any) -> dict[str, int]:
    """Return te_fsdp's own calls in the fourth step: in all of it, and in the call of the optimizer."""
    training = _Training(axes, checks, **options)
    root, calls = os.path.dirname(te_fsdp.__file__) + os.sep, 0

    def count(frame: FrameType, event: str, _: Any) -> None:
        nonlocal calls
        name = frame.f_code.co_filename
        calls += event == "call" and name.startswith(root) and not name.startswith(f"{root}emulation")

    for seed in range(3):
        training.step(seed)
    sys.setprofile(count)
    try:
        training.backward()
        before = calls
        training.optimizer.step()
        in_step = calls - before
        training.optimizer.zero_grad()
    finally:
        sys.setprofile(None)
    return {"all": calls, "optimizer": in_step}


# --- mistakes


def _values_by_rank(checks: Any) -> None:
    """Build the models of data-parallel ranks from different seeds."""
    _Training({"dp_shard": 2}, checks, device="device", seed=torch.distributed.get_rank())


def _inputs_by_rank(checks: Any) -> None:
    """Read different batches on ranks of tp."""
    _Training({"dp_shard": 1, "tp": 2}, checks).step(torch.distributed.get_rank())


def _stale_backward(checks: Any) -> None:
    """Write to a sharded weight between forward and backward."""
    training = _Training({"dp_shard": 2}, checks)
    training.step()
    loss = training.loss()
    with torch.no_grad():
        training.optimizer.param_groups[0]["params"][0].add_(1.0)
    loss.backward()


def _later_inputs_by_rank(checks: Any) -> None:
    """Read different batches on ranks of tp from the fourth step on, in shapes that were compared."""
    training = _Training({"dp_shard": 1, "tp": 2}, checks)
    for _ in range(3):
        training.step()
    training.step(torch.distributed.get_rank())


def _later_copies_by_rank(checks: Any) -> None:
    """Write different values on ranks of tp to a weight that both replicate, after the first steps."""
    training = _Training({"dp_shard": 1, "tp": 2}, checks)
    for _ in range(3):
        training.step()
    norm = next(p for name, p in training.model.named_parameters() if "layer_norm_weight" in name)
    with torch.no_grad():
        norm.add_(float(torch.distributed.get_rank()))
    training.step()


def _later_options_by_rank(checks: Any) -> None:
    """Step with different learning rates after the first steps."""
    training = _Training({"dp_shard": 2}, checks)
    training.step()
    training.optimizer.param_groups[0]["lr"] = 1e-3 * (1 + torch.distributed.get_rank())
    training.step()


def _later_gradients_by_rank(checks: Any) -> None:
    """Drop a gradient on one rank before a later step."""
    training = _Training({"dp_shard": 2}, checks)
    training.step()
    training.backward()
    if torch.distributed.get_rank() == 0:
        next(training.model.parameters()).grad = None
    training.optimizer.step()


MISTAKES: dict[str, Callable[[Any], None]] = {
    "values": _values_by_rank,
    "inputs": _inputs_by_rank,
    "stale backward": _stale_backward,
    "later inputs": _later_inputs_by_rank,
    "later copies": _later_copies_by_rank,
    "later options": _later_options_by_rank,
    "later gradients": _later_gradients_by_rank,
}


def found_without_inputs() -> dict[str, str]:
    """Return :func:`found_at` of two mistakes with `check_inputs=False`."""
    return found_at(False, ["inputs", "stale backward"])


def found_at(checks: Any, mistakes: Iterable[str] = MISTAKES) -> dict[str, str]:
    """Map each mistake to the class of te_fsdp's error at a level, "" without an error."""
    results = {}
    for name in mistakes:
        try:
            MISTAKES[name](checks)
            results[name] = ""
        except te_fsdp.TeFsdpError as error:
            results[name] = type(error).__name__
    return results


def right_programs(checks: str) -> list[torch.Tensor]:
    """Train over dp_shard and tp with a level; return this rank's weights, which no level changes."""
    held = []
    for axes in ({"dp_shard": 2}, {"dp_shard": 1, "tp": 2}, {"dp_replicate": 2, "dp_shard": 1}):
        training = _Training(axes, checks)
        for seed in range(3):
            training.step(seed)
        held += [p.to_local().detach().float().cpu() for p in training.model.parameters()]
    return held


def levels_by_rank() -> str:
    """Return the error of `fully_shard` with a different level on each rank."""
    te_fsdp.set_collective_timeout(5)
    try:
        _Training({"dp_shard": 2}, ["off", "full"][torch.distributed.get_rank()])
        return ""
    except te_fsdp.CollectiveError as error:
        return str(error)
    finally:
        te_fsdp.set_collective_timeout(rendezvous.DEFAULT_TIMEOUT)


def alias(check_inputs: bool) -> dict[str, Any]:
    """Return warnings of `check_inputs`, and whether inputs that differ over tp are found with it."""
    import warnings

    import transformer_engine.pytorch as te

    meshes = te_fsdp.Meshes.build(dp_shard=1, tp=2)
    model = te.Linear(
        32, 64, parallel_mode="column", params_dtype=torch.float32, device="meta", **meshes.te_kwargs()
    )
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        te_fsdp.fully_shard(model, meshes, check_inputs=check_inputs)
    te_fsdp.materialize(model, seed=0)
    texts = [str(item.message) for item in seen if item.category is FutureWarning]
    try:
        model(torch.full((4, 32), float(meshes.tp.get_local_rank() + 1), device=harness.device()))
        error = ""
    except te_fsdp.TeFsdpError as problem:
        error = type(problem).__name__
    return {"warnings": [text for text in texts if "check_inputs" in text], "error": error}


def costs() -> str:
    """Measure the table of docs/checks.md."""
    spec = importlib.util.spec_from_file_location("check_costs", ROOT / "scripts" / "check_costs.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.measure_all()
