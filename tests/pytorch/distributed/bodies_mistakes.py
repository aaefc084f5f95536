"""Mistakes that the script of a new user makes around training, each on all ranks at once; and what is none."""

from __future__ import annotations

import time
from collections.abc import Callable
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


def _meshes(**axes: int) -> Any:
    import te_fsdp

    return te_fsdp.Meshes.build(**(axes or {"dp_shard": 2}), device_type=harness.device_type())


def _sharded(strategy: str = "optim_grads_params", *, model: Any = None, **axes: int) -> nn.Module:
    import te_fsdp

    meshes = _meshes(**axes)
    model = Model(meshes) if model is None else model
    te_fsdp.fully_shard(model, meshes, units=["layer"], strategy=strategy)
    return te_fsdp.materialize(model, seed=0)


def _batch(seed: int | None = None) -> torch.Tensor:
    generator = torch.Generator().manual_seed(dist.get_rank() if seed is None else seed)
    return torch.randn(8, WIDTH, generator=generator).to(harness.device())


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def _step(model: nn.Module, optimizer: Any, *, to_none: bool = True) -> None:
    model(_batch()).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=to_none)


def _draw_by_rank(model: nn.Module) -> None:
    torch.manual_seed(dist.get_rank())
    for parameter in model.parameters():
        nn.init.normal_(parameter)


# ------------------------------------------------------------------------------------------------------------ mistakes


def a_new_head_after_sharding() -> None:
    model = _sharded()
    model.head = nn.Linear(WIDTH, 4, device=harness.device())
    model(_batch())


def adapters_after_the_first_step() -> None:
    model = _sharded()
    _step(model, _sgd(model))
    model.layer.register_module("adapter", nn.Linear(WIDTH, WIDTH, device=harness.device()))
    _step(model, _sgd(model))


def gradient_hooks_before_sharding() -> None:
    model = Model(_meshes(), harness.device())
    model.head.weight.register_hook(lambda gradient: 0 * gradient)
    _sharded(model=model)


def gradient_hooks_after_sharding() -> None:
    model = _sharded()
    model.layer.fc1_weight.register_hook(lambda gradient: 0 * gradient)
    model(_batch())


def to_empty_in_place_of_materialize() -> None:
    import te_fsdp

    meshes = _meshes()
    model = te_fsdp.fully_shard(Model(meshes), meshes, units=["layer"])
    model.to_empty(device=harness.device())
    for part in (model.inp, model.layer):  # and the head is forgotten
        part.reset_parameters()
    model(_batch())


def seeds_by_rank_for_copies() -> None:
    """HSDP of one shard: both ranks hold all weights."""
    model = _sharded(dp_replicate=2, dp_shard=1)
    _draw_by_rank(model)
    _step(model, _sgd(model))


def seeds_by_rank_for_whole_weights() -> None:
    model = _sharded("no_shard")
    _draw_by_rank(model)
    _step(model, _sgd(model))


def seeds_by_rank_for_dropout() -> None:
    meshes = _meshes(tp=2)
    model = _sharded(model=Model(meshes, dropout=0.5), tp=2)
    torch.manual_seed(dist.get_rank())
    model(_batch(0))


def an_optimizer_that_one_rank_saved(directory: str) -> None:
    model, path = _sharded(), Path(directory) / "optimizer.pt"
    adam = torch.optim.AdamW(model.parameters())
    _step(model, adam)
    if dist.get_rank() == 0:
        torch.save(adam.state_dict(), path)
    dist.barrier()
    adam.load_state_dict(torch.load(path))
    _step(model, adam)


def whole_tensors_into_shards() -> None:
    whole = Model(_meshes(), harness.device()).state_dict()
    _sharded().load_state_dict(whole)


def a_cast_after_the_first_forward() -> None:
    model = _sharded()
    model(_batch())
    model.to(torch.bfloat16)


def inference_mode_before_training() -> None:
    model = _sharded()
    with torch.inference_mode():
        model(_batch())
    model(_batch())


def averaged_model_after_sharding() -> None:
    torch.optim.swa_utils.AveragedModel(_sharded("no_shard"))


MISTAKES: list[Callable[..., None]] = [
    a_new_head_after_sharding,
    adapters_after_the_first_step,
    gradient_hooks_before_sharding,
    gradient_hooks_after_sharding,
    to_empty_in_place_of_materialize,
    seeds_by_rank_for_copies,
    seeds_by_rank_for_whole_weights,
    seeds_by_rank_for_dropout,
    an_optimizer_that_one_rank_saved,
    whole_tensors_into_shards,
    a_cast_after_the_first_forward,
    inference_mode_before_training,
    averaged_model_after_sharding,
]


def all_mistakes(directory: str) -> dict[str, tuple[str, str]]:
    """Class and text of the error of each."""
    import te_fsdp

    found = {}
    for make in MISTAKES:
        try:
            make(directory) if make is an_optimizer_that_one_rank_saved else make()
        except te_fsdp.TeFsdpError as error:
            found[make.__name__] = type(error).__name__, str(error)
    return found


def weights_that_one_rank_saved(directory: str) -> tuple[str, bool]:
    """The error, and whether the model is as it was."""
    import te_fsdp

    model, path = _sharded(), Path(directory) / "model.pt"
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


def evaluation_on_one_rank() -> str:
    """Rank 0 alone runs a forward; the other one is busy elsewhere."""
    import te_fsdp

    model = _sharded()
    _step(model, _sgd(model))
    te_fsdp.set_collective_timeout(2)
    try:
        if dist.get_rank() == 0:
            with torch.no_grad():
                model.eval()(_batch())
    except te_fsdp.CollectiveError as error:
        return str(error)
    finally:
        te_fsdp.set_collective_timeout(1800)
    time.sleep(2.5)  # the store of a rank that is gone would answer nobody
    return ""


# -------------------------------------------------------------------------------------------------- what is no mistake


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: _whole(p.detach()).clone() for name, p in model.named_parameters()}


def _changed(model: nn.Module, before: dict[str, torch.Tensor]) -> set[str]:
    return {name.split(".")[0] for name, now in _weights(model).items() if not torch.equal(now, before[name])}


def frozen_and_freed_later() -> bool:
    model = _sharded()
    optimizer, seen = _sgd(model), []
    for wanted in (True, False, True):
        model.layer.requires_grad_(wanted)
        before = _weights(model)
        _step(model, optimizer)
        seen.append(_changed(model, before))
    return seen == [{"inp", "layer", "head"}, {"inp", "head"}, {"inp", "layer", "head"}]


def gradients_filled_with_zeros() -> bool:
    one, other = _sharded(), _sharded()
    for model, to_none in ((one, True), (other, False)):
        optimizer = _sgd(model)
        for _ in range(2):
            _step(model, optimizer, to_none=to_none)
    return not _changed(one, _weights(other))


def a_scaler_that_skips() -> bool:
    """Infinite on one rank: no rank steps."""
    model = _sharded()
    optimizer, scaler = _sgd(model), torch.amp.GradScaler(harness.device_type(), init_scale=4.0)
    scaler.scale(model(_batch()).square().mean()).backward()
    if dist.get_rank() == 0:
        model.inp.weight.grad.to_local()[0, 0] = float("inf")
    before = _weights(model)
    scaler.step(optimizer)
    scaler.update()
    return not _changed(model, before) and scaler.get_scale() == 2.0


def a_scheduler_before_main_weights() -> bool:
    import te_fsdp

    model = _sharded(model=Model(_meshes()).to(torch.bfloat16))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    te_fsdp.main_weights(model, optimizer)
    for _ in range(2):
        model(_batch().bfloat16()).float().square().mean().backward()
        optimizer.step()
        scheduler.step()
    return optimizer.param_groups[0]["lr"] == 0.25


def an_average_by_hand() -> bool:
    """Averaged, put in place, evaluated, put back."""
    model = _sharded()
    average, before = [p.detach().clone() for p in model.parameters()], _weights(model)
    _step(model, _sgd(model))
    with torch.no_grad():
        kept = [p.detach().clone() for p in model.parameters()]
        for p, mean in zip(model.parameters(), average, strict=True):
            p.copy_(mean)
        first = not _changed(model, before) and model.eval()(_batch()).isfinite().all()
        for p, value in zip(model.parameters(), kept, strict=True):
            p.copy_(value)
    return bool(first) and _changed(model, before) == {"inp", "layer", "head"}


def hooks_after_accumulation() -> bool:
    model, seen = _sharded(), []
    model.layer.fc1_weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad is not None))
    model(_batch()).square().mean().backward()
    return seen == [True]


def counts_and_groups() -> bool:
    """Sizes of sharded parameters are those of the whole model, and so are their dims."""
    model, plain = _sharded(), Model(_meshes())
    sizes = [[(name, p.numel(), p.ndim) for name, p in one.named_parameters()] for one in (model, plain)]
    return sizes[0] == sizes[1]


def norms_by_torch() -> bool:
    import te_fsdp

    model = _sharded()
    (30 * model(_batch())).square().mean().backward()
    norm = te_fsdp.clip_grad_norm_(model, 1e9)
    again = _whole(nn.utils.clip_grad_norm_(model.parameters(), 1e9))
    # Two orders of a sum of 10 squares in fp32.
    return bool(torch.isclose(torch.as_tensor(norm).cpu(), again.cpu(), rtol=1e-6))


def tied_after_sharding() -> bool:
    model = _sharded()
    model.head.weight = model.inp.weight
    optimizer = _sgd(model)
    _step(model, optimizer)
    return model.head.weight is model.inp.weight and len(optimizer.param_groups[0]["params"]) == 9


MEANT: list[Callable[[], bool]] = [
    frozen_and_freed_later,
    gradients_filled_with_zeros,
    a_scaler_that_skips,
    a_scheduler_before_main_weights,
    an_average_by_hand,
    hooks_after_accumulation,
    counts_and_groups,
    norms_by_torch,
    tied_after_sharding,
]


def all_meant() -> dict[str, bool]:
    """Whether each does what was meant."""
    return {make.__name__: bool(make()) for make in MEANT}
