"""Bodies: a recorded step against the plain loop, bit for bit."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable
from typing import Any

import harness
import torch
import torch.distributed as dist
from hfsdp.zero_copy import send_small_gradients_directly
from strategies.models import HIDDEN, batch, sharded
from torch import nn

from graphed.recorders import recording

STEPS, MICROBATCHES, MAX_NORM = 6, 2, 0.5


class LogCapture(logging.Handler):
    """Return te_fsdp's log messages."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []
        self._logger, self._level = logging.getLogger("te_fsdp"), 0

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line."""
        self.lines.append(record.getMessage())

    def __enter__(self) -> LogCapture:
        self._level = self._logger.level
        self._logger.addHandler(self)
        self._logger.setLevel(logging.INFO)
        return self

    def __exit__(self, *_: object) -> None:
        self._logger.removeHandler(self)
        self._logger.setLevel(self._level)


def model_of(meshes: Any, case: dict[str, Any]) -> nn.Module:
    """Return a sharded model of two blocks and a head."""
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import Float8CurrentScaling

    import te_fsdp

    policy = te_fsdp.MixedPrecisionPolicy() if case.get("bf16") else None
    dtype = torch.bfloat16 if case.get("bf16") else torch.float32
    with te.quantized_model_init(enabled=bool(case.get("quantized")), recipe=Float8CurrentScaling()):
        strategy, outer = case.get("strategy", "optim_grads_params"), case.get("outer", "no_shard")
        moved = ("copy_engine", True) if case.get("zero_copy") else ("auto", "auto")
        model = sharded(meshes, strategy, outer, dtype, policy, *moved)
    if case.get("nan"):
        te_fsdp.report_nan(model)
    return model


def optimizer_of(model: nn.Module, case: dict[str, Any]) -> torch.optim.Optimizer:
    """Return the optimizer, with main weights and sharded state if any; its rate is a tensor for recordings."""
    from transformer_engine.pytorch.optimizers import FusedAdam

    import te_fsdp

    params = [parameter for parameter in model.parameters() if parameter.requires_grad]
    rate = torch.tensor(1e-2, device=harness.device())
    optimizer: torch.optim.Optimizer
    if case.get("optimizer") == "FusedAdam":
        optimizer = FusedAdam(params, lr=1e-2, capturable=not case.get("reads_host"), master_weights=True)
    elif case.get("optimizer") == "SGD":
        optimizer = torch.optim.SGD(params, lr=1e-2, momentum=0.9)
    else:
        optimizer = torch.optim.AdamW(params, lr=rate, eps=1e-3, fused=True, capturable=True)
    te_fsdp.main_weights(model, optimizer)
    return te_fsdp.shard_optimizer(optimizer)


def loop_of(model: nn.Module, case: dict[str, Any]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the forward and backward of all microbatches."""
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import Float8CurrentScaling

    import te_fsdp

    def forward_backward(inputs: torch.Tensor) -> torch.Tensor:
        losses = []
        for number, x in enumerate(inputs):
            with te_fsdp.microbatch(model, is_last=number == len(inputs) - 1):
                with te.autocast(enabled=bool(case.get("quantized")), recipe=Float8CurrentScaling()):
                    output = model(x)
                loss = output.float().square().mean() / len(inputs)
                loss.backward()
            losses.append(loss)
        return torch.stack(losses)

    return forward_backward


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, loop: Any, inputs: torch.Tensor) -> Any:
    """Run the same step as a plain loop."""
    import te_fsdp

    losses = loop(inputs).detach()
    norm = te_fsdp.clip_grad_norm_(model, MAX_NORM)
    optimizer.step()
    optimizer.zero_grad()
    return losses, norm


def inputs_of(meshes: Any, step: int, case: dict[str, Any]) -> torch.Tensor:
    """Return microbatches of this rank; steps 3 and 4 have fewer rows."""
    copies = dist.get_world_size() // meshes.size("tp")
    x = batch(step, copies, MICROBATCHES)[:, dist.get_rank() // meshes.size("tp")]
    x = x.repeat(1, 4, 1) if case.get("quantized") else x  # FP8's products want multiples of 8
    x = x[:, : x.shape[1] // 2] if step in (3, 4) and case.get("shapes") else x
    return x.to(torch.bfloat16 if case.get("bf16") else torch.float32)


def values_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return local parameters and optimizer state."""
    results = {}
    for name, parameter in model.named_parameters():
        results[name] = harness.full(parameter.detach())
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                results[f"{name}, {key}"] = harness.full(value.detach())
    return results


def _train(meshes: Any, case: dict[str, Any], recorded: bool) -> tuple[dict[str, torch.Tensor], Any]:
    import te_fsdp

    model = model_of(meshes, case)
    optimizer = optimizer_of(model, case)
    loop, results, step, evaluation = loop_of(model, case), {}, None, {}
    if recorded:
        with recording(model):
            step = te_fsdp.graphed_step(model, optimizer, loop, max_norm=MAX_NORM, warmup=2)
    for number in range(STEPS):
        inputs = inputs_of(meshes, number, case)
        if step is not None:
            (losses, norm), _ = step(inputs), None
        else:
            losses, norm = plain_step(model, optimizer, loop, inputs)
        results |= {f"losses {number}": losses, f"norm {number}": norm}
        if number == 3:  # an evaluation in between leaves weights gathered under some strategies
            with torch.no_grad():
                evaluation["evaluation"] = model(inputs[0])
        for group in optimizer.param_groups:
            rate = group["lr"]
            group["lr"] = rate.mul_(0.9) if isinstance(rate, torch.Tensor) else rate * 0.9
    return results | values_of(model, optimizer) | evaluation, step


def bitwise_equal(cases: dict[str, dict[str, Any]], axes: dict[str, int]) -> dict[str, list[Any]]:
    """Train with the plain loop and with recorded steps: losses, norms, weights and state are the same.

    Returns:
        Of each case why steps, or the optimizer's, ran eagerly, how many recordings and replays there were.
    """
    import te_fsdp

    meshes = te_fsdp.Meshes.build(**axes, device_type=harness.device_type())
    checks, facts = harness.Comparisons(), {}
    for name, case in cases.items():
        if case.get("shapes") and harness.device_type() == "cuda":
            # TE compiles parts of its backward: the second shape makes kernels for any, whose sums have other last
            # bits, and the first shape has these too from then on. So a first and a second plain training differ.
            _train(meshes, case, False)
        with send_small_gradients_directly() if case.get("zero_copy") else contextlib.nullcontext():
            expected, _ = _train(meshes, case, False)
            result, step = _train(meshes, case, True)
        assert expected.keys() == result.keys()
        for key, value in expected.items():
            checks.bitwise_equal(f"{name}: {key}", result[key], value)
        facts[name] = [step.why_eager, step.why_step_eager, step.recordings, step.replays]
    checks.require(len(cases) * 20)
    return facts


def _recorded(meshes: Any, case: dict[str, Any], failing: int = -1, **options: Any) -> Any:
    """Return a model, its optimizer, its step and inputs; after the recording, unless it fails."""
    import te_fsdp

    model = model_of(meshes, case)
    optimizer = optimizer_of(model, case)
    with recording(model, failing):
        step = te_fsdp.graphed_step(model, optimizer, loop_of(model, case), **{"warmup": 2, **options})
    inputs = inputs_of(meshes, 0, case)
    for _ in range(3):
        step(inputs)
    return model, optimizer, step, inputs


def recordings_after_changes() -> dict[str, list[int]]:
    """Return the effect of several changes on a recorded step: recordings before, and after two more calls."""
    import te_fsdp

    meshes = te_fsdp.Meshes.build(device_type=harness.device_type())
    results: dict[str, list[int]] = {}

    def replaced_state(model: Any, optimizer: Any) -> None:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))

    def replaced_parameter(model: Any, optimizer: Any) -> None:
        with torch.no_grad():
            parameter = model.blocks[0].fc1_weight
            parameter._local_tensor.set_(parameter._local_tensor.clone())

    changes: dict[str, Callable[[Any, Any], Any]] = {
        "nothing": lambda model, optimizer: None,
        "state dict": lambda model, optimizer: optimizer.state_dict(),
        "learning rate": lambda model, optimizer: optimizer.param_groups[0].update(lr=3e-3),
        "replaced state": replaced_state,
        "option": lambda model, optimizer: optimizer.param_groups[0].update(weight_decay=0.5),
        "training mode": lambda model, optimizer: model.eval(),
        "frozen": lambda model, optimizer: model.head.weight.requires_grad_(False),
        "moved": replaced_parameter,
        "module": lambda model, optimizer: setattr(model, "extra", nn.Identity()),
        "watched": lambda model, optimizer: te_fsdp.report_nan(model),
        "pace": lambda model, optimizer: te_fsdp.set_auto_sync(model, False),
    }
    for name, change in changes.items():
        model, optimizer, step, inputs = _recorded(meshes, {})
        before = step.recordings
        change(model, optimizer)
        step(inputs)
        step(inputs)
        results[name] = [before, step.recordings]
    return results


def reasons() -> dict[str, Any]:
    """Return why steps run eagerly, and the log's lines about it: once each."""
    import te_fsdp

    meshes = te_fsdp.Meshes.build(device_type=harness.device_type())
    results: dict[str, Any] = {}
    for name, case, failing in (
        ("SGD", {"optimizer": "SGD"}, -1),
        ("FusedAdam", {"optimizer": "FusedAdam", "quantized": True, "bf16": True, "reads_host": True}, -1),
        ("gradients fail", {}, 0 if dist.get_rank() == 1 else -1),
        ("update fails", {}, 1 if dist.get_rank() == 1 else -1),
    ):
        with LogCapture() as heard:
            _, _, step, inputs = _recorded(meshes, case, failing)
            step(inputs)
        said = [line for line in heard.lines if "run eagerly" in line or "runs eagerly" in line]
        results[name] = [step.why_eager, step.why_step_eager, step.recordings, len(said)]
    _, optimizer, step, inputs = _recorded(meshes, {})
    optimizer.register_step_post_hook(lambda *_: None)
    step(inputs)
    step(inputs)
    results["hook"] = [step.why_eager, step.why_step_eager, step.recordings]
    _, _, step, inputs = _recorded(meshes, {})
    for rows in (1, 2, 3, 1, 2, 3, 5, 5):
        step(inputs[:, :1].repeat(1, rows, 1))
    results["shapes"] = [step.why_eager, step.recordings]
    return results


def failed_capture() -> dict[str, Any]:
    """Check that training continues as the plain loop after a capture fails within a forward, and is recorded later.

    Returns:
        Of the step: why it ran eagerly, why it does at the end, recordings, replays; whether draws are as before.
    """
    import te_fsdp

    meshes = te_fsdp.Meshes.build(device_type=harness.device_type())
    model, plain = model_of(meshes, {}), model_of(meshes, {})
    optimizer, other = optimizer_of(model, {}), optimizer_of(plain, {})
    with recording(model):
        step = te_fsdp.graphed_step(model, optimizer, loop_of(model, {}), max_norm=MAX_NORM, warmup=2)
    broken = True

    def read_the_device(module: nn.Module, arguments: Any) -> None:
        if broken and harness.device_type() != "cpu":
            arguments[0].sum().item()
        elif broken and step._recorder.underway:
            raise RuntimeError("operation not permitted when stream is capturing")

    model.blocks[1].register_forward_pre_hook(read_the_device)
    checks, why, draws = harness.Comparisons(), "", []
    for number in range(STEPS + 2):
        inputs = inputs_of(meshes, number, {})
        torch.manual_seed(number)
        losses, norm = step(inputs)
        draws.append(torch.rand(3, device=harness.device()))
        torch.manual_seed(number)
        expected, expected_norm = plain_step(plain, other, loop_of(plain, {}), inputs)
        checks.bitwise_equal(f"draw {number}", draws[-1], torch.rand(3, device=harness.device()))
        checks.bitwise_equal(f"losses {number}", losses, expected)
        checks.bitwise_equal(f"norm {number}", norm, expected_norm)
        if number == 3:
            why, broken = step.why_eager, False
            step.forget()
    values = values_of(model, optimizer)
    for name, value in values_of(plain, other).items():
        checks.bitwise_equal(name, values[name], value)
    checks.require(STEPS * 3)
    return {"why": why, "now": step.why_eager, "recordings": step.recordings, "replays": step.replays}


def report_nan_between_graphs() -> list[Any]:
    """Check that ``report_nan`` raises between the graphs: weights stay, and training continues."""
    import te_fsdp

    meshes = te_fsdp.Meshes.build(device_type=harness.device_type())
    model, optimizer, step, inputs = _recorded(meshes, {"nan": True}, max_norm=MAX_NORM)
    before = {name: value.clone() for name, value in values_of(model, optimizer).items()}
    poisoned = inputs.clone()
    if dist.get_rank() == 1:
        poisoned[1, 0, 0] = float("nan")
    raised = ""
    try:
        step(poisoned)
    except te_fsdp.GradientError as error:
        raised = str(error)
    after = values_of(model, optimizer)
    kept = all(torch.equal(after[name], value) for name, value in before.items())
    optimizer.zero_grad()
    losses, norm = step(inputs)
    finite = bool(torch.isfinite(losses).all()) and bool(torch.isfinite(norm))
    return [raised, kept, finite, step.recordings, step.replays]


def evaluations() -> list[bool]:
    """Evaluate before and after a replay under a strategy that keeps weights unsharded: the second reads new ones.

    Returns:
        Whether they are equal, whether the second is that of newly gathered weights, whether an evaluation leaves
        weights gathered, and whether a replay begins with some: on the CPU, where its Python runs.
    """
    import te_fsdp
    from te_fsdp.sharded_model import get_sharded_model

    meshes = te_fsdp.Meshes.build(device_type=harness.device_type())
    model, _, step, inputs = _recorded(meshes, {"strategy": "optim"})
    seen, left, begun, loop = [], [], [], step._call

    def gathered() -> bool:
        return bool(get_sharded_model(model).gathered())

    step._call = lambda inputs: begun.append(gathered()) or loop(inputs)
    for _ in range(2):
        with torch.no_grad():
            seen.append(model(inputs[0]).clone())
        left.append(gathered())
        step(inputs)
        with torch.no_grad():
            seen.append(model(inputs[0]).clone())
    te_fsdp.release_params(model)
    with torch.no_grad():
        again = model(inputs[0])
    return [torch.equal(seen[0], seen[1]), torch.equal(seen[3], again), all(left), any(begun)]


def outputs_are_copies() -> bool:
    """Check that the result of a step does not change when the next step runs."""
    import te_fsdp

    meshes = te_fsdp.Meshes.build(device_type=harness.device_type())
    _, _, step, inputs = _recorded(meshes, {}, max_norm=MAX_NORM)
    first = step(inputs)
    kept = first.output.clone(), first.grad_norm.clone()
    step(inputs * 2)
    return torch.equal(first.output, kept[0]) and torch.equal(first.grad_norm, kept[1])


def mistakes() -> list[str]:
    """Return the errors of invalid arguments."""
    import te_fsdp

    meshes = te_fsdp.Meshes.build(device_type=harness.device_type())
    model = model_of(meshes, {})
    optimizer, texts = optimizer_of(model, {}), []
    plain = nn.Linear(HIDDEN, HIDDEN)
    for arguments, options in (
        ((plain, optimizer, print), {}),
        ((model, torch.optim.SGD(plain.parameters()), print), {}),
        ((model, optimizer, print), {"warmup": 0}),
        ((model, optimizer, print), {"max_norm": -1.0}),
    ):
        try:
            te_fsdp.graphed_step(*arguments, **options)
        except (te_fsdp.OrderError, ValueError) as error:
            texts.append(f"{type(error).__name__}: {error}")
    return texts


def steps_after_forget(failing: int) -> dict[str, list[Any]]:
    """Check steps after ``forget()`` where a capture has failed before: both graphs are recorded then, and replayed.

    Args:
        failing: Number of the recording that fails on rank 1: 0 that of the gradients, 1 that of the update.

    Returns:
        Reasons, recordings and whether the update is recorded: before ``forget()``, and two steps after it.
    """
    import te_fsdp

    meshes = te_fsdp.Meshes.build(device_type=harness.device_type())
    _, _, step, inputs = _recorded(meshes, {}, failing if dist.get_rank() == 1 else -1)
    results = {}
    for when in ("before", "after"):
        recorded = [item.update is not None for item in step._recorded]
        results[when] = [bool(step.why_eager), bool(step.why_step_eager), step.recordings, recorded]
        if when == "before":
            step.forget()
            for _ in range(3):
                step(inputs)
    return results
