"""Mistakes of new users in training scripts, each made on all ranks at once."""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import harness
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

WIDTH = 16


class Model(nn.Module):
    """A TE layer between two linear ones."""

    def __init__(self, meshes: Any, device: Any = "meta", dropout: float = 0.0) -> None:
        import transformer_engine.pytorch as te

        super().__init__()
        self.inp = nn.Linear(WIDTH, WIDTH, device=device)
        options = {"set_parallel_mode": True, "device": device, **meshes.te_kwargs()}
        self.layer = te.LayerNormMLP(WIDTH, 2 * WIDTH, **options)
        self.drop, self.head = nn.Dropout(dropout), nn.Linear(WIDTH, WIDTH, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.drop(self.layer(self.inp(x))))


def make_meshes(**axes: int) -> Any:
    import te_fsdp

    return te_fsdp.Meshes.build(**(axes or {"dp_shard": 2}), device_type=harness.device_type())


def make_sharded(
    strategy: str = "optim_grads_params",
    *,
    model: Any = None,
    precision: Any = None,
    mp_policy: Any = None,
    checks: Any = None,
    **axes: int,
) -> nn.Module:
    import te_fsdp

    meshes = make_meshes(**axes)
    model = Model(meshes) if model is None else model
    policies = {"precision": precision, "mp_policy": mp_policy, "checks": checks}
    te_fsdp.fully_shard(model, meshes, units=["layer"], strategy=strategy, **policies)
    return te_fsdp.materialize(model, seed=0)


def draw_batch(seed: int | None = None, rows: int = 8) -> torch.Tensor:
    generator = torch.Generator().manual_seed(dist.get_rank() if seed is None else seed)
    return torch.randn(rows, WIDTH, generator=generator).to(harness.device())


def make_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def take_step(model: nn.Module, optimizer: Any, *, to_none: bool = True) -> None:
    model(draw_batch()).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=to_none)


def _draw_by_rank(model: nn.Module) -> None:
    torch.manual_seed(dist.get_rank())
    for parameter in model.parameters():
        # On GPUs torch draws equal values of a DTensor on all ranks, independent of the seeds.
        nn.init.normal_(parameter.to_local() if isinstance(parameter, DTensor) else parameter)


# ------------------------------------------------------------------------------------------------------------ mistakes


def a_new_head_after_sharding() -> None:
    model = make_sharded()
    model.head = nn.Linear(WIDTH, 4, device=harness.device())
    model(draw_batch())


def adapters_after_the_first_step() -> None:
    optimizer = make_sgd(model := make_sharded())
    take_step(model, optimizer)
    model.layer.register_module("adapter", nn.Linear(WIDTH, WIDTH, device=harness.device()))
    take_step(model, optimizer)  # a different one has the adapters


def gradient_hooks_before_sharding() -> None:
    model = Model(make_meshes(), harness.device())
    model.head.weight.register_hook(lambda gradient: 0 * gradient)
    make_sharded(model=model)


def gradient_hooks_after_sharding() -> None:
    model = make_sharded()
    model.layer.fc1_weight.register_hook(lambda gradient: 0 * gradient)
    model(draw_batch())


def steps_in_hooks_of_replicated_parameters() -> None:
    model = make_sharded("no_shard")
    optimizer = make_sgd(model)
    model.head.weight.register_post_accumulate_grad_hook(lambda parameter: optimizer.step())
    model(draw_batch()).square().mean().backward()


def to_empty_in_place_of_materialize() -> None:
    import te_fsdp

    meshes = make_meshes()
    model = te_fsdp.fully_shard(Model(meshes), meshes, units=["layer"])
    model.to_empty(device=harness.device())
    for part in (model.inp, model.layer):  # and the head is forgotten
        part.reset_parameters()
    model(draw_batch())


def different_seeds_for_replicas() -> None:
    """Use HSDP with one shard, so that both ranks have all weights."""
    model = make_sharded(dp_replicate=2, dp_shard=1)
    _draw_by_rank(model)
    take_step(model, make_sgd(model))


def different_seeds_for_unsharded_weights() -> None:
    model = make_sharded("no_shard")
    _draw_by_rank(model)
    take_step(model, make_sgd(model))


def different_seeds_for_dropout() -> None:
    meshes = make_meshes(tp=2)
    model = make_sharded(model=Model(meshes, dropout=0.5), tp=2)
    torch.manual_seed(dist.get_rank())
    model(draw_batch(0))


def an_optimizer_that_one_rank_saved(directory: str) -> None:
    model, path = make_sharded(), Path(directory) / "optimizer.pt"
    adam = torch.optim.AdamW(model.parameters())
    take_step(model, adam)
    if dist.get_rank() == 0:
        torch.save(adam.state_dict(), path)
    dist.barrier()
    adam.load_state_dict(torch.load(path))
    take_step(model, adam)


def copy_of_unsharded_tensors_into_shards() -> None:
    whole = Model(make_meshes(), harness.device()).state_dict()
    make_sharded().load_state_dict(whole)


def a_cast_after_the_first_forward() -> None:
    model = make_sharded()
    model(draw_batch())
    model.layer.to(torch.bfloat16)


def inference_mode_before_training() -> None:
    model = make_sharded()
    with torch.inference_mode():
        model(draw_batch())
    model(draw_batch())


def averaged_model_after_sharding() -> None:
    torch.optim.swa_utils.AveragedModel(make_sharded("no_shard"))


class SequenceParallel(nn.Module):
    """Sequence-parallel TE layers, each tp rank with its tokens, and a plain layer between them."""

    def __init__(self, meshes: Any, marked: bool, dtype: torch.dtype = torch.float32) -> None:
        import transformer_engine.pytorch as te

        super().__init__()
        options = {"sequence_parallel": True, "device": "meta", "params_dtype": dtype, **meshes.te_kwargs()}
        self.up = te.Linear(WIDTH, 2 * WIDTH, parallel_mode="column", **options)
        self.down = te.Linear(2 * WIDTH, WIDTH, parallel_mode="row", **options)
        self.plain = te.Linear(WIDTH, WIDTH, device="meta", params_dtype=dtype)
        for parameter in self.plain.parameters():
            parameter.sequence_parallel = marked

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.plain(self.down(self.up(x)))


def make_sp_model(marked: bool, *, whole: bool = False, **options: Any) -> tuple[nn.Module, torch.Tensor]:
    """Return a model with tp, and this rank's tokens or all tokens."""
    import te_fsdp

    meshes = make_meshes(tp=2)
    model = te_fsdp.fully_shard(SequenceParallel(meshes, marked), meshes, units=["plain"], **options)
    tokens = draw_batch(0)
    return te_fsdp.materialize(model, seed=0), tokens if whole else tokens.chunk(2)[
        meshes.tp.get_local_rank()
    ]


def layer_without_parallel_mode() -> None:
    model, tokens = make_sp_model(marked=False)
    model(tokens).square().sum().backward()
    make_sgd(model).step()


def parallel_mode_on_a_layer_with_all_tokens() -> None:
    model = Model(make_meshes(tp=2))
    model.inp.weight.sequence_parallel = True
    model = make_sharded(model=model, tp=2)
    model(draw_batch(0)).square().sum().backward()


def unsharded_sequences_for_sequence_parallelism() -> None:
    model, tokens = make_sp_model(marked=True, whole=True)
    model(torch.zeros_like(tokens))  # says nothing
    model(tokens)


def uneven_sequences_for_sequence_parallelism() -> None:
    model, tokens = make_sp_model(marked=True)
    model(tokens[: 2 + 2 * dist.get_rank()])


def gradients_of_local_tokens_only() -> None:
    model, tokens = make_sp_model(marked=True)
    model(tokens.requires_grad_(dist.get_rank() == 0)).sum().backward()


def gradients_of_one_replica_of_the_inputs() -> None:
    model = make_sharded(tp=2)
    model(draw_batch(0).requires_grad_(dist.get_rank() == 0)).sum().backward()


def a_weight_assigned_after_the_first_forward() -> None:
    model = make_sharded()
    model(draw_batch())
    model.head.weight = nn.Parameter(torch.zeros(WIDTH, WIDTH, device=harness.device()))


def bias_removed_after_the_first_forward() -> None:
    model = make_sharded()
    model(draw_batch())
    model.layer.fc1_bias = None


def a_parametrization_after_the_first_forward() -> None:
    model = make_sharded()
    model(draw_batch())
    nn.utils.parametrizations.weight_norm(model.head)
    model(draw_batch())


def functional_call_with_different_values() -> None:
    model = make_sharded()
    model(draw_batch())
    zeros = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    torch.func.functional_call(model, zeros, (draw_batch(),))


def in_bf16(make: Callable[..., Any] = torch.optim.SGD) -> tuple[nn.Module, Any]:
    import te_fsdp

    model = make_sharded(model=Model(make_meshes()).to(torch.bfloat16))
    optimizer = make(model.parameters(), lr=0.1)
    te_fsdp.main_weights(model, optimizer)
    return model, optimizer


def step_in_bf16(model: nn.Module, optimizer: Any) -> None:
    model(draw_batch().bfloat16()).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def optimizer_in_a_different_order() -> None:
    """Pass parameters in the order of a set, which differs between processes."""
    model = make_sharded(model=Model(make_meshes(tp=2)), tp=2)
    parameters = list(model.parameters())[:: 1 - 2 * dist.get_rank()]
    model(draw_batch(0)).square().mean().backward()
    torch.optim.SGD(parameters, lr=0.1).step()


def learning_rate_by_rank() -> None:
    model = make_sharded()
    model(draw_batch()).square().mean().backward()
    torch.optim.SGD(model.parameters(), lr=0.1 * (1 + dist.get_rank())).step()


def unsharded_head_next_to_the_sharded_part() -> None:
    import te_fsdp

    torch.manual_seed(0)
    meshes = make_meshes()
    model = Model(meshes, harness.device())
    te_fsdp.fully_shard(model.layer, meshes)
    take_step(model, make_sgd(model))


class Clamped(nn.Linear):
    """Writes to its weight in forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


def weight_written_in_forward() -> None:
    model = Model(make_meshes())
    model.head = Clamped(WIDTH, WIDTH, device="meta")
    model = make_sharded(model=model)
    with torch.no_grad():
        model(draw_batch())  # which is not looked at
    model(draw_batch())


def dropout_enabled_later() -> None:
    model = make_sharded(model=Model(make_meshes(tp=2)), tp=2)
    torch.manual_seed(dist.get_rank())
    model(draw_batch(0))
    model.drop.p = 0.5
    model(draw_batch(0))


def different_data_after_the_first_forward() -> None:
    model = make_sharded(model=Model(make_meshes(tp=2)), tp=2)
    with torch.no_grad():
        model(draw_batch(0))
    model(draw_batch())


def step_between_forward_and_backward() -> None:
    model = make_sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(draw_batch()).square().mean().backward()
    loss = model(draw_batch()).square().mean()
    optimizer.step()
    loss.backward()


def gradients_returned_by_autograd() -> None:
    model = make_sharded("optim_grads")
    loss = model(draw_batch()).square().mean()
    torch.autograd.grad(loss, list(model.layer.parameters()))


def clipping_of_replaced_parameters() -> None:
    import te_fsdp

    torch.manual_seed(0)
    model = Model(make_meshes(), harness.device())
    before = list(model.parameters())
    model = make_sharded(model=model)
    model(draw_batch()).square().mean().backward()
    te_fsdp.clip_grad_norm_(before, 1.0)


def average_assigned_to_data() -> None:
    """Assign an average to `.data`, which does not reach a DTensor."""
    model = make_sharded()
    take_step(model, make_sgd(model))
    model.to(harness.device_type()).float()  # which moves memory too
    model.eval()(draw_batch())
    for parameter in model.parameters():
        parameter.data = 0.5 * parameter.data
    model(draw_batch())


def one_weight_assigned_to_data() -> None:
    model = make_sharded()
    model.head.bias.data = torch.ones_like(model.head.bias)
    model(draw_batch())


def equal_seeds_on_tp_ranks() -> None:
    model = make_sharded()
    torch.manual_seed(0)
    with torch.no_grad():
        model.head.weight.to_local().normal_()
    take_step(model, make_sgd(model))


MISTAKES: list[Callable[..., None]] = [
    a_new_head_after_sharding,
    adapters_after_the_first_step,
    gradient_hooks_before_sharding,
    gradient_hooks_after_sharding,
    steps_in_hooks_of_replicated_parameters,
    to_empty_in_place_of_materialize,
    different_seeds_for_replicas,
    different_seeds_for_unsharded_weights,
    different_seeds_for_dropout,
    an_optimizer_that_one_rank_saved,
    copy_of_unsharded_tensors_into_shards,
    a_cast_after_the_first_forward,
    inference_mode_before_training,
    averaged_model_after_sharding,
    layer_without_parallel_mode,
    parallel_mode_on_a_layer_with_all_tokens,
    unsharded_sequences_for_sequence_parallelism,
    uneven_sequences_for_sequence_parallelism,
    gradients_of_local_tokens_only,
    gradients_of_one_replica_of_the_inputs,
    a_weight_assigned_after_the_first_forward,
    bias_removed_after_the_first_forward,
    a_parametrization_after_the_first_forward,
    functional_call_with_different_values,
    optimizer_in_a_different_order,
    learning_rate_by_rank,
    unsharded_head_next_to_the_sharded_part,
    weight_written_in_forward,
    different_data_after_the_first_forward,
    step_between_forward_and_backward,
    gradients_returned_by_autograd,
    clipping_of_replaced_parameters,
    average_assigned_to_data,
    one_weight_assigned_to_data,
    equal_seeds_on_tp_ranks,
    dropout_enabled_later,
]


def all_mistakes(
    directory: str, mistakes: Iterable[Callable[..., None]] = MISTAKES
) -> dict[str, tuple[str, str]]:
    """Return the class and text of each error."""
    import te_fsdp

    results = {}
    for make in mistakes:
        try:
            make(directory) if inspect.signature(make).parameters else make()
        except te_fsdp.TeFsdpError as error:
            results[make.__name__] = type(error).__name__, str(error)
    return results


def load_of_one_ranks_weights(directory: str) -> tuple[str, bool]:
    """Return the error, and whether the model is unchanged."""
    import te_fsdp

    model, path = make_sharded(), Path(directory) / "model.pt"
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), path)
    dist.barrier()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    try:
        model.load_state_dict(torch.load(path))
    except te_fsdp.CheckpointError as error:
        return str(error), not any(p.to_local().any() for p in model.parameters())
    return "", True


def same_batch_on_all_ranks() -> tuple[list[str], list[str]]:
    """Return the log of two steps with the same data on all ranks, and of a model with different data per rank."""
    results: list[list[str]] = [[], []]
    for texts, seed in zip(results, (0, None), strict=True):
        handler = logging.Handler(logging.WARNING)
        handler.emit = lambda record, texts=texts: texts.append(record.getMessage())  # type: ignore[method-assign, misc]
        logging.getLogger("te_fsdp").addHandler(handler)
        model = make_sharded()
        with torch.no_grad():
            model(draw_batch(0))  # no training
        for _ in range(2):
            model(draw_batch(seed)).square().mean().backward()
        logging.getLogger("te_fsdp").removeHandler(handler)
    return results[0], results[1]


def evaluation_on_one_rank() -> str:
    """Run a forward on rank 0 only, while the other rank is busy."""
    import te_fsdp

    model = make_sharded()
    take_step(model, make_sgd(model))
    te_fsdp.set_collective_timeout(2)
    try:
        if dist.get_rank() == 0:
            with torch.no_grad():
                model.eval()(draw_batch())
    except te_fsdp.CollectiveError as error:
        return str(error)
    finally:
        te_fsdp.set_collective_timeout(1800)
    time.sleep(2.5)  # the store of a terminated rank does not answer
    return ""
