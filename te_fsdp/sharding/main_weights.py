"""``main_weights``: fp32 main weights for an optimizer, begun at the values that the model was initialised with.

    model's parameters     what forward reads: quantized, or bf16; the optimizer's groups and state refer to them
    main weights           fp32, placed as the parameters; ``optimizer.state[parameter]["master_param"]``

TE's FusedAdam keeps main weights itself. For torch's optimizers they take the parameters' places while
``step`` runs: gradients are cast to fp32, the optimizer updates main weights, and each parameter then becomes
its main weight, rounded or quantized once. Between steps nothing tells the difference, so that ``zero_grad``,
gradient clipping, learning rate schedulers and checkpoints work as usual.

FusedAdam's own main weights of quantized weights do the same. By itself it would make an fp32 copy of each gradient,
and quantize weight by weight, each with a reduction of its amax (TE 2.18 to 2.20).
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import weakref
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.optim import Optimizer

from te_fsdp import _te, _torch
from te_fsdp.agree import raised_on_all_ranks
from te_fsdp.all_ranks import collective_call, is_capturing
from te_fsdp.errors import OrderError, shorten
from te_fsdp.parameters import require_model, require_optimizer
from te_fsdp.quantized.amax import KEEPS_MAIN_WEIGHTS, quantized_among, refuse
from te_fsdp.sharding.first_looks import refuse_unfit
from te_fsdp.sharding.main_parameters import (
    MAIN,
    MainParameters,
    beginning,
    is_low,
    main_parameters_of,
    move_scales,
    optimizer_shard_in,
)
from te_fsdp.sharding.state import settle
from te_fsdp.step_hooks import held_by

if TYPE_CHECKING:
    from torch import nn

    from te_fsdp.step_hooks import Step


@functools.cache
def _met() -> weakref.WeakSet[Optimizer]:
    """Optimizers that were given main weights, or have begun a step on parameters of a sharded model."""
    return weakref.WeakSet()


def remember(optimizer: Optimizer) -> None:
    """From now on :func:`optimizers_of` finds this optimizer, wherever it is. Local operation."""
    _met().add(optimizer)


def check_optimizer(model: nn.Module, optimizer: Optimizer) -> None:
    """Raise if an optimizer holds parameters that are not (or no longer) the model's.

    Sharding, and materialisation from meta, put new parameters into the model. An optimizer built before goes
    on with the old ones: its steps change nothing that the model reads. Local operation, though FSDP2 units
    are resharded.

    Args:
        model: The model, sharded or not.
        optimizer: Any torch optimizer; it may leave out parameters of the model.

    Raises:
        OrderError: Says how many parameters are not the model's.
        PlacementError: An optimizer of torch whose step would fail half way on sharded parameters (docs/optimizers.md).
    """
    require_model(model, "check_optimizer(model, optimizer)")
    require_optimizer(optimizer, "check_optimizer(model, optimizer)")
    for module in model.modules():
        if _torch.is_fsdp_module(module):
            module.reshard()  # type: ignore[operator]
    current = {id(p) for p in model.parameters()}
    held = [p for group in optimizer.param_groups for p in group["params"]]
    foreign = sum(id(p) not in current for p in held)
    if foreign:
        raise OrderError(
            f"{type(optimizer).__name__}: {foreign} of {len(held)} parameters are not the model's",
            expected="the parameters that the model has now",
            got="others, such as those from before fully_shard or materialize",
            why="Its step would change nothing that the model reads",
            fix="build it after te_fsdp.fully_shard and te_fsdp.materialize, from model.parameters()",
        )
    refuse_unfit(optimizer, held)


@contextlib.contextmanager
def following(model: nn.Module, optimizer: Optimizer, where: str, fix: str) -> Iterator[None]:
    """Context in which a model is sharded: afterwards the optimizer's groups hold the parameters that it has then.

    Groups keep their options. Local operation.

    Args:
        model: The model.
        optimizer: Over the model's parameters; must not have stepped.
        where: The call, for an error.
        fix: What to do instead.

    Raises:
        OrderError: The optimizer holds other parameters, or has state; before anything is changed.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters(remove_duplicate=False)}
    groups = [[names.get(id(parameter)) for parameter in group["params"]] for group in optimizer.param_groups]
    if any(name is None for group in groups for name in group) or optimizer.state:
        raise OrderError(
            f"{where}({type(optimizer).__name__})",
            expected="an optimizer over parameters of the model, before its first step",
            got="state" if optimizer.state else "other parameters",
            why="Its parameters are replaced by sharded ones",
            fix=fix,
        )
    yield
    sharded = dict(model.named_parameters(remove_duplicate=False))
    for group, wanted in zip(optimizer.param_groups, groups, strict=True):
        group["params"][:] = [sharded[name] for name in wanted if name is not None]


def _with_subclasses(kind: type) -> Iterator[type]:
    yield kind
    for below in type.__subclasses__(kind):
        yield from _with_subclasses(below)


def optimizers_of(parameters: Iterable[torch.Tensor]) -> list[Optimizer]:
    """Every optimizer of this process that holds one of these parameters, which do not know it. Local operation.

    Of those that te_fsdp has not met only such as may keep main weights: of fp32 parameters TE's FusedAdam alone does.
    Looks at all objects that the garbage collector knows: for loads alone. What ``gc.freeze()`` has put aside is not
    listed, and could not be put aside again by itself; optimizers of sharded models that have stepped are known.
    """
    parameters = list(parameters)
    wanted = {id(parameter) for parameter in parameters}
    may_keep = _te.is_loaded() or any(map(is_low, parameters))
    # By its type: proxies of all kinds answer isinstance with side effects. And without a line of Python for each of a
    # million objects, which would take longer than to load a model of a GiB.
    kinds, objects = set(_with_subclasses(Optimizer)), gc.get_objects() if may_keep else []
    listed = list(itertools.compress(objects, map(kinds.__contains__, map(type, objects))))
    known = {id(optimizer): optimizer for optimizer in [*listed, *_met()]}.values()
    holding = []
    for optimizer in known:
        main_parameters = optimizer.__dict__.get(KEEPS_MAIN_WEIGHTS)
        if main_parameters is not None:
            main_parameters.put_back(optimizer)  # a step that raised has left them in the parameters' places
        # Of wrappers around another optimizer the inner one is enough.
        groups = optimizer.__dict__.get("param_groups", ())
        if any(id(parameter) in wanted for group in groups for parameter in group["params"]):
            holding.append(optimizer)
    return holding


def main_weights(model: nn.Module, optimizer: Optimizer) -> None:
    """Give an optimizer fp32 main weights for the model's quantized and other low-precision parameters.

    Main weights begin at the value from before quantization where TE kept it
    (``quantized_model_init(preserve_high_precision_init_val=True)``), which is then dropped; else at the parameter's
    own value. Main weights that exist, from a checkpoint or an earlier call, stay as they are. Call it once, after
    the optimizer was built and before the first step. Local operation.

    With TE's FusedAdam: ``master_weights=True`` is needed, and this call only sets the beginning. With any optimizer
    of ``torch.optim``: from now on each ``step`` updates the main weights (DTensors with the parameters'
    placements, in ``optimizer.state[parameter]["master_param"]``) and then quantizes each once, which for formats
    with one scale per tensor is a collective over the weight mesh. Memory: 4 bytes per parameter, and during
    ``step`` another 4 for gradients in fp32.

    Args:
        model: The model, sharded and materialised.
        optimizer: Over parameters of the model; unchanged where it holds fp32 parameters only.

    Raises:
        OrderError: The optimizer holds parameters that are not the model's, or has stepped without main weights.
        PrecisionError: A FusedAdam that keeps none, or not in fp32, over quantized weights.
    """
    check_optimizer(model, optimizer)
    remember(optimizer)
    settle(model)
    if _te.is_fused_adam(optimizer):
        for label, parameter, local in quantized_among(held_by(optimizer)):
            refuse(optimizer, label)
            _start_fused(optimizer, parameter, local)
    elif not hasattr(optimizer, KEEPS_MAIN_WEIGHTS):
        low = [p for g in optimizer.param_groups for p in g["params"] if is_low(p)]
        if any(optimizer.state.get(p) for p in low):
            raise OrderError(
                f"main_weights({type(optimizer).__name__}) after its first step",
                expected="an optimizer without state",
                got="state that belongs to low-precision parameters",
                fix="call te_fsdp.main_weights right after the optimizer was built",
            )
        if low:
            MainParameters(optimizer).start(optimizer)


def _start_fused(optimizer: Any, parameter: torch.Tensor, local: torch.Tensor) -> None:
    """Begin FusedAdam's own main weight of one quantized parameter."""
    if not optimizer.state.get(parameter) and _te.high_precision_value(local) is not None:
        optimizer.initialize_state(parameter, False)
        optimizer.set_scaled_state(parameter, MAIN, beginning(local))
    _te.forget_high_precision_value(local)


def initialize_fused_adam(optimizer: Any, parameter: torch.Tensor) -> None:
    """Make the state of a parameter that TE's FusedAdam has none of; nothing for other optimizers. Local operation.

    By its own method: it keeps more about a state than the state itself.
    """
    main_parameters, held = main_parameters_of(optimizer), set(optimizer.state.get(parameter, ()))
    if not hasattr(optimizer, "initialize_state") or held - (
        {MAIN} if main_parameters is not None else set()
    ):
        return
    if main_parameters is None:
        low = parameter.dtype == torch.bfloat16
        optimizer.initialize_state(parameter, low and optimizer.store_param_remainders)
        return
    main, keeps = main_parameters.make(optimizer, parameter), optimizer.master_weights
    optimizer.master_weights = keeps and main is None
    try:
        optimizer.initialize_state(parameter if main is None else main, False)
    finally:
        optimizer.master_weights = keeps
    if main is not None:
        optimizer.state[parameter] |= optimizer.state.pop(main)
        move_scales(optimizer, main, parameter)


def main_weight(optimizer: Optimizer | None, parameter: torch.Tensor) -> torch.Tensor | None:
    """The local main weight of a parameter, ``None`` where there is none. Local operation.

    Of an optimizer given to ``shard_optimizer`` this rank's rows.
    """
    main = None if optimizer is None else optimizer.state.get(parameter, {}).get(MAIN)
    return None if main is None else _torch.local_of(main)


def lend_main_weights(step: Step) -> None:
    """Let the main weights that TE's FusedAdam keeps of quantized weights take their places."""
    optimizer: Any = step.optimizer
    if not step.models or not _te.is_fused_adam(optimizer):
        return
    main_parameters = getattr(optimizer, KEEPS_MAIN_WEIGHTS, None)
    if main_parameters is None:
        if all(_te.has_delayed_scale(local) for _, _, local in quantized_among(step.held)):
            return
        main_parameters = MainParameters(optimizer, lent=True)
    if not main_parameters.cuts:
        main_parameters.swap_in_last()


def keeping_main_weights(
    parameters: Iterable[torch.Tensor], given: Optimizer | None = None
) -> list[Optimizer]:
    """Optimizers whose next step would put the weights of before a load back. Local operation.

    Args:
        parameters: The model's.
        given: The one that is loaded, which is not among them.
    """
    found = optimizers_of(parameters)
    return [o for o in found if o is not given and any(MAIN in state for state in o.state.values())]


@torch.no_grad()
def set_main_weight(
    optimizer: Optimizer,
    parameter: torch.Tensor,
    local: torch.Tensor,
    value: torch.Tensor | None,
    *,
    make: bool = False,
) -> None:
    """Let a main weight follow its weight; nothing where there is none. Local operation.

    Args:
        optimizer: Any optimizer.
        parameter: The parameter.
        local: Its local tensor, which has its new value.
        value: float32 of the local shape, of which that was made; ``None``: it is what the parameter holds.
        make: Make TE's FusedAdam begin the state of a quantized weight, zero moments included, as its next step would:
            the weight has less than ``value``.
    """
    quantized = _te.is_quantized(local)
    if make and quantized and value is not None and getattr(optimizer, "master_weights", False):
        held = (p for group in optimizer.param_groups for p in group["params"])
        if any(parameter is p for p in held):
            initialize_fused_adam(optimizer, parameter)
    main = main_weight(optimizer, parameter)
    if main is None:
        return
    if main.dtype == torch.int16:
        main.zero_()  # what another weight lacked: this one is all there is
        return
    if value is None:
        value = local.dequantize(dtype=torch.float32) if quantized else local.detach()  # type: ignore[operator]
    shard = optimizer_shard_in(optimizer, parameter)
    if main.dtype == torch.float32:
        main.copy_(value if shard is None else shard.of(value))
    elif main.numel():  # FusedAdam's, with a scale of its own
        optimizer.set_scaled_state(parameter, MAIN, value.to(torch.float32, copy=True))  # type: ignore[attr-defined]


# ------------------------------------------------------------------------------------------------------ edited weights

#: Attribute of an optimizer: its low-precision parameters, as they were after its last step.
_WRITTEN = "_te_fsdp_written"
# How far a quantized weight may lie from its main weight, in parts of the norm: eight bits round to 1/30, four to 1/8.
_TO_8_BITS = 1 / 8
_TO_4_BITS = 1 / 4
# Largest error of E4M3 near zero. Delayed scaling begins with a scale of 1, at which small weights are rounded to that.
_NEAR_ZERO = 2.0**-10


class _Written(NamedTuple):
    """Low-precision parameters, and how often each had been written to when the step was over.

    Attributes:
        parameters: All that the optimizer holds.
        versions: Of each.
        held: How many parameters the optimizer had.
    """

    parameters: list[torch.Tensor]
    versions: list[int]
    held: int


def _low_ones(step: Step) -> tuple[list[torch.Tensor], int]:
    """The low-precision parameters of an optimizer, looked for when it has got others; and how many it has of all."""
    known: _Written | None = step.optimizer.__dict__.get(_WRITTEN)
    held = sum(len(group["params"]) for group in step.optimizer.param_groups)
    if known is not None and known.held == held:
        return known.parameters, held
    return [p for group in step.optimizer.param_groups for p in group["params"] if is_low(p)], held


def _versions(optimizer: Optimizer, parameters: list[torch.Tensor]) -> list[int]:
    # New weights that arrive after the step are written to local tensors: only edits by the parameters are seen then.
    overlaps = getattr(main_parameters_of(optimizer), "overlaps", False)
    return _torch.versions_of(parameters, with_locals=not overlaps)


def note_written(step: Step) -> None:
    """Note after a step how often low-precision parameters were written to, all that te_fsdp writes included."""
    if step.models:
        parameters, held = _low_ones(step)
        setattr(step.optimizer, _WRITTEN, _Written(parameters, _versions(step.optimizer, parameters), held))


def refuse_edited(step: Step) -> None:
    """Raise where the step would write a main weight back over a weight that somebody has edited since the last one.

    Local operation that compares numbers of writes; where they say that a parameter was written to, and once before
    the first step, collective over the model's mesh, and values are compared with those of main weights.

    Raises:
        OrderError: On all ranks of the model; nothing has changed.
    """
    if not step.models:
        return
    optimizer, known = step.optimizer, step.optimizer.__dict__.get(_WRITTEN)
    parameters, _ = _low_ones(step)
    if not parameters or (known is not None and known.versions == _versions(optimizer, parameters)):
        return
    if is_capturing():
        return
    mesh = step.models[0][0].meshes.device_mesh
    together = collective_call(f"{step.where}: first, or after weights were edited", mesh)
    with together, raised_on_all_ranks(mesh, step.where):
        _refuse(step, [parameter for parameter in parameters if _differs(optimizer, parameter)])
    note_written(step)


@torch.no_grad()
def _differs(optimizer: Optimizer, parameter: torch.Tensor) -> bool:
    """Whether a parameter is something else than its fp32 main weight, rounded or quantized. Local operation."""
    main, local = main_weight(optimizer, parameter), _torch.local_of(parameter).detach()
    if main is None or main.dtype != torch.float32 or not main.numel():
        return False
    quantized, shard = _te.is_quantized(local), optimizer_shard_in(optimizer, parameter)
    value = local.dequantize(dtype=torch.float32) if quantized else local  # type: ignore[call-arg]
    value = value if shard is None else shard.of(value)
    if not quantized:
        rounded = main.to(value.dtype)
        return not bool(((value == rounded) | (value.isnan() & rounded.isnan())).all())
    kind = _te.format_of(local)
    limit = (_TO_8_BITS if kind is None or kind.name not in ("nvfp4", "hybrid") else _TO_4_BITS) * main.norm()
    if _te.has_delayed_scale(local):
        limit = limit + _NEAR_ZERO * main.numel() ** 0.5 * _te.inverse_scale_of(local)
    return bool((value - main).norm() > limit)


def _refuse(step: Step, edited: list[torch.Tensor]) -> None:
    if not edited:
        return
    names = step.names
    raise OrderError(
        f"{step.where}: {shorten([names.get(id(p), 'a parameter') for p in edited], 3)}",
        expected="weights that are their main weights, rounded or quantized",
        got=f"{len(edited)} that were edited since the last step, or since main weights were made",
        why="The step would write the main weights back: the edits would be lost",
        fix='edit optimizer.state[parameter]["master_param"] as well; or delete it from that state after the edit: the '
        "next step begins with a main weight of the edited weight",
    )
