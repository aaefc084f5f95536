"""Bodies: HFSDP against one process."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import harness
import torch
import torch.distributed as dist
from harness.collectives import recorded
from torch import nn
from torch.distributed.tensor import DTensor, Partial

from hfsdp.models import ADAM, Case, Run
from hfsdp.quantized_transfers import large_from

STEPS = 2  # the second with the state that the first has made
#: fp32 sums in a different order over 24 x 8 tokens, through two optimizer steps (Adam with eps 1e-3).
CLOSE = {"rtol": 1e-5, "why": "fp32, sums in a different order, two steps"}


def parity_with_large_tensors(axes: dict[str, int], cases: list[dict[str, Any]]) -> list[int]:
    """Run :func:`parity` with every tensor sent separately, however small it is."""
    with large_from(1):
        return parity(axes, cases)


def parity(axes: dict[str, int], cases: list[dict[str, Any]], outer: str = "optim") -> list[int]:
    """Check that parameters and norms after each step equal those of one process; return comparisons per case."""
    counts = []
    for options in cases:
        case = Case(**options)
        run, oracle = Run(case, axes, outer=outer), Run(case, None)
        checks = harness.Comparisons()
        for step in range(STEPS):
            norms, expected = run.steps(1), oracle.steps(1)
            for ours, theirs in zip(norms, expected, strict=True):
                assert abs(ours - theirs) <= 1e-5 * theirs, f"{case}: norm {ours}, one process {theirs}"
            same_parameters(checks, run, oracle, f"{case} step {step}")
        counts.append(checks.require(STEPS))
    return counts


def same_parameters(checks: harness.Comparisons, run: Run, other: Run, label: str) -> None:
    """Check that parameters of two runs are close, on any meshes. Collective."""
    named = zip(run.model.named_parameters(), other.model.parameters(), strict=True)
    for (name, actual), expected in named:
        checks.close(f"{label} {name}", actual, expected, **CLOSE)


def sum_instead_of_mean(axes: dict[str, int], case: dict[str, Any]) -> str:
    """Negative control, the peer's fault: gradients are added up over the outer axis instead of averaged."""
    from te_fsdp.features.hfsdp import overlap

    stock = overlap.redistribute

    def added(buffer: torch.Tensor, source: Any, *args: Any, **kwargs: Any) -> Any:
        return stock(buffer, Partial("sum") if isinstance(source, Partial) else source, *args, **kwargs)

    overlap.redistribute = added
    try:
        parity(axes, [case])
    except AssertionError as error:
        return str(error)
    finally:
        overlap.redistribute = stock
    return ""


# --- communication of a step, memory


class Even(nn.Module):
    """An MLP whose every dim divides by the ranks; bf16 or fp32."""

    def __init__(self, dtype: torch.dtype, device: Any) -> None:
        super().__init__()
        import transformer_engine.pytorch as te

        self.mlp = te.LayerNormMLP(64, 128, params_dtype=dtype, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(x)


def costs(
    dtype: torch.dtype, outer: str, wire: torch.dtype | None = None, large: int | None = None
) -> dict[str, Any]:
    """Return collectives of one optimizer step, and bytes in memory after it, on 2 x 2 ranks.

    The parameters' own gradients stay as they were. ``large``: from how many elements on tensors travel by themselves.

    Returns:
        ``sent``: name, dtype and elements of each collective of the step; ``state``, ``weights``, ``gradients``: bytes;
        ``elements``, ``parameters``: of the model.
    """
    import te_fsdp
    from te_fsdp.upstream.torch_dtensor import local_of

    meshes = te_fsdp.Meshes.build(dp_replicate=2, device_type=harness.device_type())
    policy = None if wire is None else te_fsdp.MixedPrecisionPolicy(grad_comm_dtype=wire)
    # Its calls are counted, which copies between GPUs are not.
    options: Any = {"outer_strategy": outer, "precision": policy, "transport": "nccl"}
    model = te_fsdp.fully_shard(Even(dtype, "meta"), meshes, **options)
    te_fsdp.materialize(model, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    (te_fsdp.shard_optimizer(optimizer) if outer == "optim" else te_fsdp.main_weights(model, optimizer))
    x = torch.randn(4, 2, 64, device=harness.device(), dtype=dtype)
    with large_from(large):
        for _ in range(2):  # the first step compares copies besides
            optimizer.zero_grad()
            model(x).float().square().mean().backward()
            gradients = [local_of(p.grad).clone() for p in model.parameters()]
            with recorded() as calls:
                optimizer.step()
    parameters = list(model.parameters())
    for parameter, before in zip(parameters, gradients, strict=True):
        harness.assert_bitwise_equal("a gradient after the step", local_of(parameter.grad), before)
    states = [v for p in parameters for k, v in optimizer.state[p].items() if k != "step"]
    return {
        "sent": [
            (call.kind, f"torch.{call.dtype}", call.given) for call in calls if call.given > 8
        ],  # not the amaxes
        "state": stored(states),
        "weights": stored(parameters),
        "gradients": stored([p.grad for p in parameters]),
        "elements": sum(p.numel() for p in parameters),
        "parameters": len(parameters),
    }


def stored(tensors: list[Any]) -> int:
    """Return bytes of the memory behind tensors, each piece once."""
    storages = {}
    for tensor in tensors:
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        storages[local.untyped_storage().data_ptr()] = local.untyped_storage().nbytes()
    return sum(storages.values())


def exempt_parts(axes: dict[str, int]) -> list[tuple[int, ...]]:
    """Return shapes of a moment that this rank keeps for parameters which ``fsdp_no_shard`` leaves unsharded."""
    run = Run(Case("adamw", exempt=("head",)), axes)
    run.steps(1)
    shapes = []
    for parameter in (run.model.head.weight, run.model.head.bias):
        assert not isinstance(parameter, DTensor)
        state = run.optimizer.state[parameter]["exp_avg"]
        assert state.shape == parameter.shape
        shapes.append(tuple(state.to_local().shape))
    return shapes


# --- gradients that not all holders have


#: So that a parameter without gradient differs from one whose gradient is zero.
DECAY = 0.1


def missing_gradients(marked: bool = False) -> int:
    """Use a unit on its first owner only and another one nowhere, compared with one process."""
    import te_fsdp

    meshes = te_fsdp.Meshes.build(dp_replicate=2, dp_shard=1, device_type=harness.device_type())
    torch.manual_seed(3)
    device = harness.device()
    model = nn.ModuleDict({name: nn.Linear(6, 5, bias=False, device=device) for name in ("both", "first")})
    model.add_module("third", nn.Linear(3, 7, device=device))
    model = Wrapped(model)
    plain = {name: p.detach().clone() for name, p in model.named_parameters()}
    te_fsdp.fully_shard(model, meshes, units=["parts.first", "parts.third"], outer_strategy="optim")
    sgd = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9, weight_decay=DECAY)
    optimizer = te_fsdp.shard_optimizer(sgd)
    first = meshes.device_mesh.get_local_rank("dp_replicate") == 0
    checks = harness.Comparisons()
    momentum = {name: torch.zeros_like(value) for name, value in plain.items()}
    for step in range(3):
        inputs = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(step)).to(device)
        with te_fsdp.microbatch(model, is_last=True) if marked else contextlib.nullcontext():
            model(inputs[0 if first else 1], first).sum().backward()
        if step == 1:
            te_fsdp.clip_grad_norm_(model.parameters(), 1e9)
        optimizer.step()
        optimizer.zero_grad()
        gradients = {"both": inputs.sum((0, 1)) / 2, "first": inputs[0].sum(0) / 2}
        for name in ("both", "first"):
            key = f"parts.{name}.weight"
            momentum[key].mul_(0.9).add_(gradients[name].expand(5, 6) + DECAY * plain[key])
            plain[key] -= 0.5 * momentum[key]
        for name, parameter in model.named_parameters():
            checks.close(f"step {step} {name}", parameter, plain[name], **CLOSE)
    return checks.require(6)


class Wrapped(nn.Module):
    """Its parts, one of them used on demand, one never."""

    def __init__(self, parts: nn.Module) -> None:
        super().__init__()
        self.parts = parts

    def forward(self, x: torch.Tensor, more: bool) -> torch.Tensor:
        y = self.parts["both"](x)
        return y + self.parts["first"](x) if more else y


# --- state dicts of the optimizer


def state_dict_round_trip(case: dict[str, Any], axes: dict[str, int]) -> int:
    """Run ``state_dict``, ``torch.save``, ``load``, ``load_state_dict``: the same bits, and equal further steps."""
    run, other = Run(Case(**case), axes), Run(Case(**case), axes, seed=9)
    run.steps(2)
    groups = [[id(p) for p in group["params"]] for group in run.optimizer.param_groups]
    stream = io.BytesIO()
    torch.save(run.optimizer.state_dict(), stream)
    assert groups == [[id(p) for p in group["params"]] for group in run.optimizer.param_groups]
    stream.seek(0)
    other.model.load_state_dict(run.model.state_dict())
    other.optimizer.load_state_dict(torch.load(stream, weights_only=False))
    checks = harness.Comparisons()
    for (name, actual), expected in zip(run.model.named_parameters(), other.model.parameters(), strict=True):
        checks.bitwise_equal(name, expected, actual)
        for key, value in run.optimizer.state[actual].items():
            if isinstance(value, torch.Tensor):
                checks.bitwise_equal(f"{name} {key}", other.optimizer.state[expected][key], value)
    other.position = run.position
    run.steps(2)
    other.steps(2)
    if run.case.dtype == torch.float32:  # the backward of an embedding is not the same twice on a GPU
        same_parameters(checks, other, run, "trained on")
    return checks.require(10)


def through_dcp(case: dict[str, Any], saved: dict[str, int], axes: dict[str, int], path: str) -> int:
    """Make two more steps after a save and a load by DCP, on the same or a different mesh.

    Returns:
        Comparisons, bit for bit on the same mesh.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_state_dict,
        set_model_state_dict,
        set_optimizer_state_dict,
    )

    run, other = Run(Case(**case), saved), Run(Case(**case), axes, seed=9)
    run.steps(2)
    model, optimizer = get_state_dict(run.model, run.optimizer)
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=path)
    other.steps(1)  # so that there is state to be filled
    model, optimizer = get_state_dict(other.model, other.optimizer)
    try:
        dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=path)
    except dcp.api.CheckpointException as error:
        raise RuntimeError(str(error)) from None  # pytest does not see a BaseException's text
    set_model_state_dict(other.model, model)
    # AdamW has no state for a parameter without a gradient. torch refuses that without this option, in one process too.
    options = StateDictOptions(strict=False)
    set_optimizer_state_dict(other.model, other.optimizer, optimizer, options=options)
    other.position = run.position
    run.steps(2)
    other.steps(2)
    checks = harness.Comparisons()
    same_parameters(checks, other, run, f"{saved} to {axes}")
    return checks.require(4)


# --- refused


def error_of(case: str) -> None:
    """Make one mistake that would train wrongly, on two copies of a model."""
    import te_fsdp
    from te_fsdp.upstream import torch_dtensor as _torch

    axes = {"dp_replicate": 2, "dp_shard": 1}
    run = Run(Case("sgd"), axes)
    before = [harness.full(p) for p in run.model.parameters()]
    try:
        if case == "two optimizers":
            # One sharded, another over the same model not.
            other = torch.optim.AdamW(run.model.parameters(), **ADAM)
            run.backward()
            other.step()
        elif case == "closure":
            run.optimizer.step(lambda: 0.0)
        elif case == "backward after clip":
            run.backward()
            te_fsdp.clip_grad_norm_(run.model.parameters(), 1.0)
            run.backward()
            run.optimizer.step()
        elif case == "too late":
            optimizer = torch.optim.SGD(run.model.parameters(), lr=0.1, momentum=0.9)
            optimizer.state[next(run.model.parameters())]["momentum_buffer"] = torch.zeros(())
            te_fsdp.shard_optimizer(optimizer)
        elif case == "other order":
            parameters = list(run.model.parameters())
            optimizer = torch.optim.SGD(parameters if dist.get_rank() else parameters[::-1], lr=0.1)
            hooks = _torch.step_hooks(optimizer)
            try:
                te_fsdp.shard_optimizer(optimizer)
            finally:
                assert _torch.step_hooks(optimizer) == hooks, "its steps are changed"
        else:
            fresh = te_fsdp.fully_shard(Even(torch.float32, "meta"), run.meshes, outer_strategy="optim")
            te_fsdp.materialize(fresh, seed=0)
            parameters, run.model = list(fresh.parameters()), fresh
            before = [harness.full(p) for p in parameters]
            optimizer = torch.optim.SGD(parameters, lr=0.1)
            fresh(torch.randn(4, 2, 64, device=harness.device())).sum().backward()
            if case == "clip unsharded":
                te_fsdp.clip_grad_norm_(fresh, 1.0)
            elif case == "step unsharded":
                optimizer.step()
    finally:
        after = [harness.full(p) for p in run.model.parameters()]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True)), (
            "changed before it was refused"
        )


def decoupled_gradients() -> list[tuple[str, str]]:
    """Step FusedAdam from fp32 gradients of bf16 weights. Return errors and communication."""
    from transformer_engine.pytorch.optimizers import FusedAdam

    import te_fsdp
    from te_fsdp.upstream.torch_dtensor import local_of

    meshes = te_fsdp.Meshes.build(dp_replicate=2, dp_shard=1, device_type=harness.device_type())
    model = te_fsdp.fully_shard(Even(torch.bfloat16, "meta"), meshes, outer_strategy="optim")
    te_fsdp.materialize(model, seed=0)
    adam = FusedAdam(model.parameters(), lr=1e-3, master_weights=True, use_decoupled_grad=True)
    optimizer = te_fsdp.shard_optimizer(adam)
    for parameter in model.parameters():
        # Over both ranks 1 + 2^-12, which bf16 cannot represent.
        local = torch.full_like(local_of(parameter), 1 + dist.get_rank() * 2**-11, dtype=torch.float32)
        parameter.decoupled_grad = DTensor.from_local(
            local, parameter.device_mesh, parameter.placements, run_check=False
        )
    with recorded() as calls:
        optimizer.step()
    for parameter in model.parameters():
        moment = local_of(optimizer.state[parameter]["exp_avg"])
        torch.testing.assert_close(moment, torch.full_like(moment, 0.1 * (1 + 2**-12)), rtol=1e-6, atol=0)
    return [(call.kind, call.dtype) for call in calls if call.kind in ("reduce_scatter", "all_to_all")]
