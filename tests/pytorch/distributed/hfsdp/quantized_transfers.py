"""Bodies: quantized weights whose new values are sent over the outer axis, as values or as bytes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import harness
import torch
import torch.distributed as dist
from harness.collectives import Collective, recorded
from torch import nn
from torch.distributed.tensor import DTensor

STEPS = 2


def quantized(
    recipe: str,
    axes: dict[str, int],
    *,
    optimizer: str = "adamw",
    hidden: int = 256,
    alone: bool = False,
    strategy: str = "optim_grads_params",
    fault: str = "",
) -> dict[str, Any]:
    """Check that each weight equals, in all bytes, stock TE's quantization of its unsharded main weight in one process.

    Args:
        recipe: Of the weights.
        axes: Of the mesh.
        optimizer: "adamw", or TE's FusedAdam.
        hidden: Width of an MLP.
        alone: Each tensor that can is sent separately, independent of its size.
        strategy: Over the shard axis.
        fault: "no bytes": weights travel in fp32, as they do where no cut fits; "amax": each holder has its own scale.

    Returns:
        ``compared``: buffers; ``logged``: lines about weights that travel as fp32; ``sent``: the all-gathers of the
        last step; ``elements``: of this rank's shards of quantized weights that travel as bytes, and of those that
        do not; ``others``: of those that are not quantized.
    """
    from quantization.bodies import SEED, Stepper, batch_of
    from quantization.weight_bytes import compare, gathered, named_weights, recipe_of, requantize

    import te_fsdp
    from te_fsdp.upstream import torch_dtensor as _torch

    meshes = te_fsdp.Meshes.build(**axes, device_type=harness.device_type())
    model, oracle = mlp(recipe, hidden, "meta", **meshes.te_kwargs()), mlp(recipe, hidden)
    te_fsdp.fully_shard(model, meshes, strategy=strategy, outer_strategy="optim", transport="nccl")
    te_fsdp.materialize(model, seed=SEED)
    step, compared = Stepper(model, recipe_of(recipe), meshes, False), 0
    if optimizer == "adamw":
        step.optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    with logged() as lines:
        te_fsdp.shard_optimizer(step.optimizer)
    with inject_fault(fault), large_from(1 if alone else None):
        for number in range(STEPS):
            sent = recording(step.optimizer)
            step(*batch_of(hidden))
            values = {}
            for name, module, own, parameter in named_weights(model):
                main = step.optimizer.state[parameter]["master_param"]
                values[name] = gathered(module, own, full_main_weight(main, parameter))
            requantize(oracle, values)
            compared += compare(model, oracle, f"step {number + 1}")
        ways = sent_elements(step.optimizer, [parameter for _, _, _, parameter in named_weights(model)])
    whole = sum(_torch.local_of(p).numel() for p in model.parameters())
    return {
        "compared": compared,
        "logged": [line for line in lines if "as fp32" in line],
        "sent": [call for call in sent if call.kind == "all_gather"],
        "elements": ways,
        "others": whole - sum(ways),
    }


def uneven_weight(recipe: str, axes: dict[str, int], shape: tuple[int, int], fault: str = "") -> int:
    """Train one weight that divides along neither dim: each holder has its own number of rows, or none.

    Gradients are given by hand: kernels that multiply take no such shape.

    Args:
        recipe: Of the weight.
        axes: Of the mesh.
        shape: Rows and columns of the weight.
        fault: As of :func:`quantized`.

    Returns:
        How many buffers equal, to the byte, those of one quantization of the unsharded main weight.
    """
    import transformer_engine.pytorch as te
    from quantization.bodies import SEED
    from quantization.weight_bytes import compare, gathered, named_weights, recipe_of

    import te_fsdp

    def build(device: Any, **kwargs: Any) -> nn.Module:
        torch.manual_seed(SEED)
        with te.quantized_model_init(recipe=recipe_of(recipe), preserve_high_precision_init_val=True):
            return nn.Sequential(te.Linear(shape[1], shape[0], bias=False, device=device, **kwargs))

    meshes = te_fsdp.Meshes.build(**axes, device_type=harness.device_type())
    model, oracle = build("meta", **meshes.te_kwargs()), build(harness.device())
    te_fsdp.fully_shard(model, meshes, outer_strategy="optim")
    te_fsdp.materialize(model, seed=SEED)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with logged() as lines:
        te_fsdp.shard_optimizer(optimizer)
    compared = 0
    with inject_fault(fault):
        for number in range(STEPS):
            [(_, module, own, parameter)] = named_weights(model)
            # The largest values, from which one scale is taken, move from row to row; another gradient on each rank.
            rows = torch.randn(parameter.to_local().shape, dtype=parameter.dtype) * (1 + number)
            place = {"run_check": False, "shape": parameter.shape, "stride": parameter.stride()}
            parameter.grad = DTensor.from_local(
                (rows * (1 + dist.get_rank())).to(harness.device()),
                parameter.device_mesh,
                parameter.placements,
                **place,
            )
            with recorded() as calls:
                optimizer.step()
            assert fault == "no bytes" or not any(
                c.kind == "all_gather" and c.dtype == "float32" for c in calls
            )
            optimizer.zero_grad()
            main = optimizer.state[parameter]["master_param"]
            with torch.no_grad():  # no forward has run, which would update delayed scaling's scale
                oracle[0].weight.quantize_(gathered(module, own, full_main_weight(main, parameter)))
            compared += compare(model, oracle, f"step {number + 1}")
    assert not [line for line in lines if "as fp32" in line]
    return compared


def replicated() -> int:
    """Compare NVFP4 weights of ``fsdp_no_shard``, whose columnwise data TE clears in backward, as :func:`quantized`."""
    from quantization.bodies import SEED, Stepper, batch_of
    from quantization.weight_bytes import compare, named_weights, recipe_of, requantize

    import te_fsdp

    meshes = te_fsdp.Meshes.build(dp_shard=2, device_type=harness.device_type())
    model, oracle = (nn.Sequential(mlp("nvfp4", 256, device)) for device in ("meta", None))
    te_fsdp.fsdp_no_shard([model[0].fc1_weight])
    te_fsdp.fully_shard(model, meshes, strategy="optim")
    te_fsdp.materialize(model, seed=SEED)
    step, compared = Stepper(model, recipe_of("nvfp4"), meshes, False), 0
    te_fsdp.shard_optimizer(step.optimizer)
    for number in range(STEPS):
        step(*batch_of(256))
        mains = {name: step.optimizer.state[p]["master_param"] for name, _, _, p in named_weights(model)}
        requantize(oracle, {name: main.full_tensor() for name, main in mains.items()})
        compared += compare(model, oracle, f"step {number + 1}")
    return compared


def sent_elements(optimizer: Any, parameters: list[Any]) -> tuple[int, int]:
    """Return the elements of this rank's quantized shards that are sent as bytes, and of the others."""
    from te_fsdp.features.hfsdp.optimizer_shards import reason_for_fp32
    from te_fsdp.features.main_params import optimizer_shard_in
    from te_fsdp.upstream import torch_dtensor as _torch

    results = [0, 0]
    for parameter in parameters:
        results[reason_for_fp32(optimizer_shard_in(optimizer, parameter)) is not None] += _torch.local_of(
            parameter
        ).numel()
    return results[0], results[1]


def mlp(recipe: str, hidden: int, device: Any = None, **kwargs: Any) -> nn.Module:
    """Return TE's own MLP with quantized weights; on the device, drawn from the seed, by default."""
    import transformer_engine.pytorch as te
    from quantization.bodies import SEED
    from quantization.models import build
    from quantization.weight_bytes import recipe_of

    if device is None:
        torch.manual_seed(SEED)
    with te.quantized_model_init(recipe=recipe_of(recipe), preserve_high_precision_init_val=True):
        return build("mlp_swiglu", hidden, device or harness.device(), **kwargs)


def full_main_weight(main: DTensor, parameter: DTensor) -> DTensor:
    """Return the unsharded main weight: all holders' rows, placed as the parameter. Collective."""
    from te_fsdp.features.main_params import rows_of_state

    cut = rows_of_state(main, parameter)
    assert cut is not None
    mine = main.to_local().cpu()
    rows: list[Any] = [None] * main.device_mesh.size(0)
    dist.all_gather_object(rows, mine, group=main.device_mesh.get_group(0))
    return DTensor.from_local(
        torch.cat(rows, cut[0]).to(harness.device()),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def recording(optimizer: Any) -> list[Collective]:
    """Return the collectives of the optimizer's next step, once it has run."""
    results: list[Collective] = []
    stock: Callable[..., Any] = type(optimizer).step.__get__(optimizer)

    def step(*args: Any, **kwargs: Any) -> Any:
        with recorded() as calls:
            result = stock(*args, **kwargs)
        results.extend(calls)
        return result

    optimizer.step = step
    return results


@contextmanager
def logged(at_least: int = logging.INFO) -> Iterator[list[str]]:
    """Record lines of te_fsdp's log, of this level or a higher one."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("te_fsdp")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(at_least)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


@contextmanager
def large_from(elements: int | None) -> Iterator[None]:
    """Send tensors of this number of elements separately; ``None``: the default."""
    from te_fsdp.features.hfsdp import optimizer_shards

    stock = optimizer_shards.LARGE
    optimizer_shards.LARGE = stock if elements is None else elements
    try:
        yield
    finally:
        optimizer_shards.LARGE = stock


@contextmanager
def inject_fault(fault: str) -> Iterator[None]:
    """Inject one fault into the transfer of weights; "" for none."""
    from te_fsdp.features.hfsdp import optimizer_shards
    from te_fsdp.features.hfsdp.optimizer_shards import OptimizerShard

    def own_group(shard: Any) -> Any:
        return dist.new_group([dist.get_rank()], use_local_synchronization=True)

    faults: dict[str, tuple[Any, str, Any]] = {
        "no bytes": (optimizer_shards, "_fp32_reason", lambda shard, local: "a test says so"),
        "amax": (OptimizerShard, "amax_group", property(own_group)),
    }
    if not fault:
        yield
        return
    owner, name, broken_one = faults[fault]
    stock = owner.__dict__[name]
    setattr(owner, name, broken_one)
    try:
        yield
    finally:
        setattr(owner, name, stock)
