"""Bodies: NaN in the gradient of one parameter, on one rank, in one microbatch."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import harness
import torch
import torch.distributed as dist

from precision.bodies import BF16, HIDDEN, MICROBATCHES, TOKENS, Pair, dtypes

RANK, MICROBATCH = 1, 2


def errors_of_one_nan(cases: dict[str, dict[str, Any]], axes: dict[str, int]) -> dict[str, list[str]]:
    """Train two steps of three microbatches, with NaN in the input of the second linear on one rank, once.

    Args:
        cases: Name -> ``policy`` (``None``: no policy), ``context`` of all microbatches but the last one (a name in
            te_fsdp), ``value`` of the poison, ``clip`` (compute the norm before), ``watch``, ``method`` (call a
            registered method in place of the model).
        axes: Mesh sizes.

    Returns:
        The error of each of two steps; empty for none. In between gradients are cleared.
    """
    import te_fsdp

    meshes = te_fsdp.Meshes.build(**axes, device_type=harness.device_type())
    return {name: _poisoned(meshes, **case) for name, case in cases.items()}


def _poisoned(
    meshes: Any,
    policy: dict[str, Any] | None = None,
    context: str = "",
    value: float = float("nan"),
    clip: bool = False,
    watch: bool = True,
    method: bool = False,
) -> list[str]:
    import te_fsdp

    torch.manual_seed(3)
    model = Pair(**meshes.te_kwargs())
    harness.shift_rows_by_rank(model, meshes.te_kwargs()["tp_group"])
    precision = None if policy is None else te_fsdp.MixedPrecisionPolicy(**dtypes(policy))
    te_fsdp.fully_shard(model, meshes, units=["first", "second"], precision=precision)
    if watch:
        te_fsdp.report_nan(model)
    call = model
    if method:
        model.compute = functools.partial(Pair.forward, model)
        te_fsdp.register_forward_method(model, "compute")
        call = model.compute
    optimizer = torch.optim.AdamW(model.parameters())
    poison = torch.zeros((), dtype=BF16, device=harness.device())
    model.second.register_forward_pre_hook(lambda module, args: (args[0] + poison,))
    raised = []
    for step in range(2):
        for number in range(1, MICROBATCHES + 1):
            bad = step == 0 and number == MICROBATCH and dist.get_rank() == RANK
            poison.fill_(value if bad else 0)
            local = bool(context) and number < MICROBATCHES
            with getattr(te_fsdp, context)(model) if local else contextlib.nullcontext():
                x = torch.randn((TOKENS, HIDDEN), device=harness.device()).to(BF16)
                y = call(x)
                y.backward(torch.ones_like(y))
        raised.append("")
        try:
            if clip:
                te_fsdp.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        except te_fsdp.GradientError as error:
            raised[-1] = str(error)
        optimizer.zero_grad()
    finite = torch.stack([torch.isfinite(p.to_local()).all() for p in model.parameters()]).all().int()
    dist.all_reduce(finite, op=dist.ReduceOp.MIN)  # over tp not every rank has what is poisoned
    return [*raised, "" if int(finite) else "the weights hold NaN"]


#: The rank with NaN in each microbatch, step by step; none in the third.
STEPS = [(1, 2), (0, 3), None, (1, 1), (0, 2)]


def errors_of_several_nans(cases: dict[str, dict[str, Any]], axes: dict[str, int]) -> dict[str, list[str]]:
    """Train through :data:`STEPS`, each error followed by what it advises: clear the gradients and go on.

    Args:
        cases: Name -> ``clear`` (see :func:`_clear`), ``context`` of all microbatches but the last one, ``clip``,
            ``skip`` (the loop gives poisoned steps up by itself, but for the last one), ``fault`` (negative control:
            nothing is forgotten but by a step), ``policy``, ``exempt``.
        axes: Mesh sizes.

    Returns:
        The error of each step; empty for none.
    """
    import te_fsdp

    meshes = te_fsdp.Meshes.build(**axes, device_type=harness.device_type())
    return {name: _several(meshes, **case) for name, case in cases.items()}


def _several(
    meshes: Any,
    clear: str = "optimizer",
    context: str = "",
    clip: bool = False,
    skip: bool = False,
    fault: bool = False,
    exempt: bool = False,
) -> list[str]:
    import te_fsdp

    torch.manual_seed(3)
    model = Pair(**meshes.te_kwargs())
    harness.shift_rows_by_rank(model, meshes.te_kwargs()["tp_group"])
    if exempt:
        te_fsdp.fsdp_no_shard(model.second)
    te_fsdp.fully_shard(model, meshes, units=["first", "second"])
    watch = te_fsdp.report_nan(model)
    if fault:
        watch._are_cleared = lambda: False
    optimizer = torch.optim.AdamW(model.parameters())
    poison = torch.zeros((), dtype=BF16, device=harness.device())
    model.second.register_forward_pre_hook(lambda module, args: (args[0] + poison,))
    raised = []
    for step, where in enumerate(STEPS):
        for number in range(1, MICROBATCHES + 1):
            poison.fill_(float("nan") if where == (dist.get_rank(), number) else 0)
            local = bool(context) and number < MICROBATCHES
            with getattr(te_fsdp, context)(model) if local else contextlib.nullcontext():
                x = torch.randn((TOKENS, HIDDEN), device=harness.device()).to(BF16)
                y = model(x)
                y.backward(torch.ones_like(y))
        raised.append("")
        if not skip or where is None or step == len(STEPS) - 1:
            try:
                if clip:
                    te_fsdp.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
            except te_fsdp.GradientError as error:
                raised[-1] = str(error)
        _clear(clear, model, optimizer)
    return raised


def _clear(how: str, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    import te_fsdp

    if how == "te_fsdp":
        te_fsdp.zero_grad(model)
    elif how == "te_fsdp zeros":
        te_fsdp.zero_grad(model, set_to_none=False)
    else:
        optimizer.zero_grad(set_to_none=how != "zeros")
