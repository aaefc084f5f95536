"""Bodies: a policy's dtypes, against the same arithmetic in one process or by the bytes that are sent."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import harness
import torch
import torch.distributed as dist
from harness.collectives import recorded
from torch import nn

from precision.bytes_sent import communicated_bytes
from precision.oracle import Arithmetic, Oracle

HIDDEN, MIDDLE, TOKENS = 32, 64, 4
UNITS = ("first", "second")
STEPS, MICROBATCHES = 2, 3
#: Microbatches of the accumulation test, each with this gradient: 256 of them make 1, where bf16 stops to add up.
MANY, SMALL = 300, 2.0**-8
ADAM = {"lr": 1e-2, "eps": 1e-2, "weight_decay": 0.1}
FP32, BF16 = torch.float32, torch.bfloat16


class Pair(nn.Module):
    """Norm and linear, then linear: two units and no parameter outside them."""

    def __init__(self, hidden: int = HIDDEN, middle: int = MIDDLE, **kwargs: Any) -> None:
        super().__init__()
        import transformer_engine.pytorch as te

        kwargs = {"params_dtype": BF16, "device": harness.device(), **kwargs}
        column, row = ("column", "row") if kwargs.get("tp_size", 1) > 1 else (None, None)
        self.first = te.LayerNormLinear(hidden, middle, parallel_mode=column, **kwargs)
        self.second = te.Linear(middle, hidden, parallel_mode=row, **kwargs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def dtypes(options: dict[str, Any]) -> dict[str, Any]:
    """Return a policy's options from names that travel to the workers: ``"float32"`` for ``torch.float32``."""
    return {k: getattr(torch, v) if isinstance(v, str) else v for k, v in options.items()}


def resolved(options: dict[str, Any], model: torch.dtype, **schedule: Any) -> Arithmetic:
    """Return the effect of a policy on a model of one dtype."""
    options = dtypes(options)
    compute = options.get("param_dtype") or model
    grads = options.get("main_grads_dtype", FP32) or compute
    return Arithmetic(
        main=options.get("main_params_dtype", FP32) or model,
        compute=compute,
        grads=grads,
        wire=options.get("grad_comm_dtype") or grads,
        fp32_sum=options.get("grad_reduce_dtype") == FP32,
        **schedule,
    )


def sharded(
    options: dict[str, Any],
    meshes: Any,
    *,
    meta: bool,
    params_dtype: torch.dtype,
    exempt: str = "",
    **kwargs: Any,
) -> nn.Module:
    """Return a pair on its meshes with a policy, its weights drawn with seed 3."""
    import te_fsdp

    torch.manual_seed(3)
    model = Pair(device="meta" if meta else harness.device(), params_dtype=params_dtype, **meshes.te_kwargs())
    harness.shift_rows_by_rank(model, meshes.te_kwargs()["tp_group"])
    policy = te_fsdp.MixedPrecisionPolicy(**dtypes(options))
    if exempt:
        te_fsdp.fsdp_no_shard(model.get_submodule(exempt))
    te_fsdp.fully_shard(model, meshes, units=UNITS, precision=policy, **kwargs)
    return te_fsdp.materialize(model, seed=3) if meta else model


def values(cases: dict[str, dict[str, Any]], axes: dict[str, int]) -> dict[str, dict[str, Any]]:
    """Compare two AdamW steps of three microbatches each with one process: every gradient and weight bit for bit.

    Args:
        cases: Name -> ``policy`` (options of the class), ``meta``, ``model`` (dtype), ``each`` (reduce each
            microbatch), ``outer_last``, ``strategy`` (with te_fsdp's contexts instead of FSDP2's switches), ``exempt``
            (a module that is not sharded), ``copies`` (see :func:`_copying`).
        axes: Mesh sizes.

    Returns:
        Of each case: dtypes of weights and gradients, bytes by collective and dtype, and comparisons made.
    """
    import te_fsdp

    meshes = te_fsdp.Meshes.build(**axes, device_type=harness.device_type())
    outcomes = {}
    for name, case in cases.items():
        case = dict(case)
        with _copying(case.pop("copies", True)):
            outcomes[name] = _values(meshes, **case)
    return outcomes


@contextlib.contextmanager
def _copying(possible: bool) -> Iterator[None]:
    """Return whether FSDP2 can copy gradients into a buffer of the wire's dtype, or te_fsdp has to cast the buffer."""
    from te_fsdp.upstream import fsdp2_state as _fsdp2

    stock = _fsdp2.can_copy_gradients_into
    if not possible:
        _fsdp2.can_copy_gradients_into = lambda dtype, device: False
    try:
        yield
    finally:
        _fsdp2.can_copy_gradients_into = stock


def _values(
    meshes: Any,
    policy: dict[str, Any],
    *,
    meta: bool = False,
    model: str = "bfloat16",
    each: bool = True,
    outer_last: bool = False,
    strategy: str = "",
    exempt: str = "",
) -> dict[str, Any]:
    import te_fsdp

    own = getattr(torch, model)
    replicas = meshes.size("dp_replicate")
    rule = resolved(policy, own, each=each, replicas=replicas, outer_last=outer_last)
    options = {"strategy": strategy} if strategy else {}
    subject = sharded(policy, meshes, meta=meta, params_dtype=own, exempt=exempt, transport="nccl", **options)
    oracle = _oracle(rule, own, meta, exempt)
    optimizer = torch.optim.AdamW(subject.parameters(), **ADAM)
    oracle.optimizer = torch.optim.AdamW(oracle.main.values(), **ADAM)
    checks = harness.Comparisons()
    for name, parameter in subject.named_parameters():
        checks.bitwise_equal(f"initial {name}", parameter, oracle.main[name])
    ranks = dist.get_world_size()
    generator = torch.Generator().manual_seed(9)
    outcome: dict[str, Any] = {}
    for step in range(STEPS):
        batch = torch.randn((2, MICROBATCHES, ranks, TOKENS, HIDDEN), generator=generator)
        x, seed = batch.to(rule.compute).to(harness.device())
        with recorded() as calls:
            for number in range(MICROBATCHES):
                last = number == MICROBATCHES - 1
                if not strategy:
                    _schedule(subject, last, each, outer_last)
                with te_fsdp.microbatch(subject, is_last=last) if strategy else contextlib.nullcontext():
                    subject(x[number, dist.get_rank()]).backward(seed[number, dist.get_rank()])
        results = [[oracle.gradients(x[m, r], seed[m, r]) for r in range(ranks)] for m in range(MICROBATCHES)]
        expected = {
            name: rule.reduced([[rank[name] for rank in microbatch] for microbatch in results])
            for name in oracle.main
        }
        for name, parameter in subject.named_parameters():
            assert parameter.grad is not None, name
            checks.bitwise_equal(f"step {step} gradient {name}", parameter.grad, expected[name])
        outcome["gradients"] = sorted({str(p.grad.dtype) for p in subject.parameters()})
        optimizer.step()
        oracle.step(expected)
        for name, parameter in subject.named_parameters():
            assert parameter.grad.dtype == rule.grads, name  # the step has put main gradients back
            checks.bitwise_equal(f"step {step} weight {name}", parameter, oracle.main[name])
        optimizer.zero_grad()
    outcome["weights"] = sorted({str(p.dtype) for p in subject.parameters()})
    outcome["bytes"] = {f"{kind} {dtype}": size for (kind, dtype), size in communicated_bytes(calls).items()}
    # Biases begin at zero, which is nothing to compare.
    outcome["comparisons"] = checks.require((1 + 2 * STEPS) * len(oracle.main) - 3)
    return outcome


def _oracle(rule: Arithmetic, own: torch.dtype, meta: bool, exempt: str) -> Oracle:
    """Return one process' model. From meta, main weights are drawn in their dtype; replicated ones have none."""
    torch.manual_seed(3)
    drawn = Pair(params_dtype=rule.main if meta else own)
    main = {}
    for name, parameter in drawn.named_parameters():
        dtype = own if exempt and name.startswith(exempt) else rule.main
        main[name] = nn.Parameter(parameter.detach().to(dtype).clone())
    return Oracle(Pair(params_dtype=rule.compute), rule, main)


def _schedule(model: nn.Module, last: bool, each: bool, outer_last: bool) -> None:
    """Set FSDP2's own switches for one microbatch."""
    if not each:
        model.set_is_last_backward(last)  # type: ignore[operator]
        model.set_requires_gradient_sync(last)  # type: ignore[operator]
    if outer_last:
        model.set_requires_all_reduce(last)  # type: ignore[operator]


def accumulated(cases: dict[str, dict[str, Any]], axes: dict[str, int]) -> dict[str, list[float]]:
    """Add up gradients that come to :data:`MANY` times 2^-8, times the rank's number along ``dp_shard``.

    Args:
        cases: Name -> ``policy``, ``each`` (reduce each microbatch), ``recipe`` (of quantized weights; none by
            default), ``first`` (how many of the small gradients the first microbatch brings at once).
        axes: Mesh sizes.

    Returns:
        The distinct values in the gradients of a linear's weight and bias.
    """
    import te_fsdp

    meshes = te_fsdp.Meshes.build(**axes, device_type=harness.device_type())
    return {name: _accumulated(meshes, **case) for name, case in cases.items()}


def _accumulated(
    meshes: Any, policy: dict[str, Any], *, each: bool = True, recipe: str = "", first: int = 1
) -> list[float]:
    import te_fsdp

    subject = _one_linear(recipe, **meshes.te_kwargs())
    harness.shift_rows_by_rank(subject, meshes.te_kwargs()["tp_group"])
    te_fsdp.fully_shard(subject, meshes, precision=te_fsdp.MixedPrecisionPolicy(**dtypes(policy)))
    rows, (middle, hidden) = 32 if recipe else 1, subject.weight.shape
    x = torch.zeros((rows, hidden), dtype=BF16, device=harness.device())
    x[0] = 1
    seed = torch.zeros((rows, middle // meshes.size("tp")), dtype=BF16, device=harness.device())
    seed[0] = SMALL * (1 + meshes.device_mesh.get_local_rank("dp_shard"))
    for number in range(first, MANY + 1):
        _schedule(subject, number == MANY, each, False)
        with _autocast(recipe):
            subject(x).backward(seed * first if number == first else seed)
    return sorted({float(v) for p in subject.parameters() for v in harness.full(p.grad).unique()})


def _one_linear(recipe: str, **kwargs: Any) -> nn.Module:
    """Return a linear; with a quantized weight of full blocks, whose scales need no padding on two ranks."""
    import transformer_engine.pytorch as te
    from quantization.models import recipe_of

    mode = "column" if kwargs.get("tp_size", 1) > 1 else None
    with te.quantized_model_init(enabled=bool(recipe), recipe=recipe_of(recipe) if recipe else None):
        return te.Linear(
            *((128, 256) if recipe else (HIDDEN, MIDDLE)),
            parallel_mode=mode,
            params_dtype=BF16,
            device=harness.device(),
            **kwargs,
        )


def _autocast(recipe: str) -> Any:
    import transformer_engine.pytorch as te
    from quantization.models import recipe_of

    return te.autocast(enabled=bool(recipe), recipe=recipe_of(recipe) if recipe else None)


def quantized_bytes(recipe: str, policy: dict[str, Any]) -> dict[str, Any]:
    """Run forward and backward of a linear with a quantized weight twice; return the sent bytes of the second."""
    import te_fsdp

    meshes = te_fsdp.Meshes.build(device_type=harness.device_type())
    subject = _one_linear(recipe)
    options: Any = {"precision": te_fsdp.MixedPrecisionPolicy(**dtypes(policy)), "check_inputs": False}
    te_fsdp.fully_shard(subject, meshes, transport="nccl", **options)  # copies between GPUs are not counted
    x = torch.ones((32, subject.weight.shape[1]), dtype=BF16, device=harness.device())
    for _ in range(2):  # in the first one ranks compare their recipes
        subject.zero_grad()
        with recorded() as calls, _autocast(recipe):
            y = subject(x)
            y.backward(torch.ones_like(y))
    gradients = {name: p.grad.dtype for name, p in subject.named_parameters()}
    return {
        "bytes": {f"{kind} {dtype}": size for (kind, dtype), size in communicated_bytes(calls).items()},
        "weight": subject.weight.numel(),
        "bias": subject.bias.numel(),
        "gradients": sorted({str(dtype) for dtype in gradients.values()}),
    }


def dtypes_around_grad_comm(dtype: str) -> dict[str, Any]:
    """Return the dtypes of communicated gradients before, inside and after ``grad_comm``."""
    import te_fsdp

    meshes = te_fsdp.Meshes.build(device_type=harness.device_type())
    subject = sharded({}, meshes, meta=False, params_dtype=BF16)
    seen = {}

    def backward(when: str) -> None:
        x = torch.ones((TOKENS, HIDDEN), dtype=BF16, device=harness.device())
        with recorded() as calls:
            subject(x).sum().backward()
        seen[when] = sorted({call.dtype for call in calls if call.kind == "reduce_scatter"})

    backward("before")
    with te_fsdp.grad_comm(subject, getattr(torch, dtype)):
        backward("inside")
        try:
            with te_fsdp.grad_comm(subject, None):
                backward("nested")
                raise KeyError
        except KeyError:
            pass
        backward("inside again")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        backward("after")
    results = {event.name for event in profile.events()}
    seen["ranges"] = sorted(name for name in results if name.startswith("te_fsdp::reduce_scatter"))
    seen["gradients"] = sorted({str(p.grad.dtype) for p in subject.parameters()})
    return seen


def gradients_after_a_step() -> int:
    """Check that fp32 gradients of bf16 weights, which AdamW gets in bf16 for the step, are unchanged after it."""
    import te_fsdp

    meshes = te_fsdp.Meshes.build(device_type=harness.device_type())
    model = sharded({"main_params_dtype": None}, meshes, meta=False, params_dtype=BF16)
    optimizer, checks, rounded = torch.optim.AdamW(model.parameters()), harness.Comparisons(), 0
    x = torch.randn((TOKENS, HIDDEN), device=harness.device()).to(BF16)
    for scale in (1.0, 1 / 3):  # thirds, so that fp32 holds what bf16 does not
        model(x).backward(torch.full((TOKENS, HIDDEN), scale, dtype=BF16, device=harness.device()))
    te_fsdp.scale_gradients(model, 1 / 3)
    before = {name: p.grad.to_local().clone() for name, p in model.named_parameters()}
    optimizer.step()
    for name, parameter in model.named_parameters():
        checks.bitwise_equal(name, parameter.grad.to_local(), before[name])
        rounded += int((before[name] != before[name].to(BF16).float()).sum())
    assert rounded, "bf16 holds these gradients: nothing would show"
    return checks.require(4)
