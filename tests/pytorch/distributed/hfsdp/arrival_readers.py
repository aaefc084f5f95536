"""Bodies: who reads or writes weights right after a step, while new ones arrive."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
import torch
import torch.distributed as dist

from hfsdp.arrivals import late, settled, train, twins, under_way
from hfsdp.early import inputs
from hfsdp.early_bits import Trainer


def readers(who: str, directory: str = "", fault: str = "") -> list[str]:
    """Something reads or writes the weights right after a step, as of a model whose step has gathered them.

    Returns:
        Units under way before it.
    """
    pair, checks = twins(), harness.Comparisons()
    train(pair, 1)
    with late(fault):
        for trainer in reversed(pair):  # no collective of the other one's comes after the arrivals
            trainer.backward(2)
            trainer.step(False)
        found = under_way(pair[0].model)
        seen = [READERS[who](trainer, Path(directory) / str(at)) for at, trainer in enumerate(pair)]
        assert not under_way(pair[0].model)
        for name, value in seen[0].items():
            checks.same_bits(f"{who} {name}", value, seen[1][name])
    train(pair, 3)
    settled(*pair, checks)
    checks.require(1)
    return found


def _state_dict(trainer: Trainer, path: Path) -> dict[str, torch.Tensor]:
    return {name: value.to_local().clone() for name, value in trainer.model.state_dict().items()}


def _part(trainer: Trainer, path: Path) -> dict[str, torch.Tensor]:
    return {n: v.to_local().clone() for n, v in trainer.model.blocks[2].state_dict().items()}


def _saved(trainer: Trainer, path: Path, *, asynchronous: bool = False) -> dict[str, torch.Tensor]:
    """What a checkpoint holds, loaded into another model."""
    import te_fsdp

    handle = te_fsdp.checkpoint.save(path, trainer.model, trainer.optimizer, asynchronous=asynchronous)
    if asynchronous:
        handle.wait()
    other = twins()[1]
    te_fsdp.checkpoint.load(path, other.model, other.optimizer)
    return _state_dict(other, path)


def _loaded(trainer: Trainer, path: Path) -> dict[str, torch.Tensor]:
    """Another model's checkpoint: what is under way must not come after it."""
    import te_fsdp

    other = twins()[1]
    te_fsdp.checkpoint.save(path, other.model)
    te_fsdp.checkpoint.load(path, trainer.model)
    return {name: p.to_local().clone() for name, p in trainer.model.named_parameters()}


def _locals(call: Callable[[Trainer], Any]) -> Callable[[Trainer, Path], dict[str, torch.Tensor]]:
    """A call, and the weights after it."""

    def read(trainer: Trainer, path: Path) -> dict[str, torch.Tensor]:
        call(trainer)
        return {
            name: getattr(p, "to_local", lambda p=p: p)().detach().clone()
            for name, p in trainer.model.named_parameters()
        }

    return read


def _te_fsdp(name: str, *args: Any) -> Callable[[Trainer, Path], dict[str, torch.Tensor]]:
    def call(trainer: Trainer) -> None:
        import te_fsdp

        getattr(te_fsdp, name)(trainer.model, *args)

    return _locals(call)


def _method(trainer: Trainer) -> None:
    """A method that gathers as forward does."""
    import te_fsdp

    trainer.model.again = lambda x: trainer.model.forward(x)
    te_fsdp.register_forward_method(trainer.model, "again")
    trainer.model.again(inputs(5)[dist.get_rank()])


def _second_step(trainer: Trainer) -> None:
    for parameter in trainer.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()
    trainer.model.state_dict()


READERS: dict[str, Callable[[Trainer, Path], dict[str, torch.Tensor]]] = {
    "state_dict": _state_dict,
    "state_dict of a block": lambda trainer, path: _part(trainer, path) | _state_dict(trainer, path),
    "save": _saved,
    "asynchronous save": functools.partial(_saved, asynchronous=True),
    "load": _loaded,
    "load_state_dict": _locals(lambda t: t.model.load_state_dict(twins()[1].model.state_dict())),
    "finish_param_gather": _te_fsdp("finish_param_gather"),
    "start_param_gather": _te_fsdp("start_param_gather", ["blocks.1"]),
    "release_params": _te_fsdp("release_params"),
    "broadcast_params": _te_fsdp("broadcast_params"),
    "optimizer.state_dict": _locals(lambda trainer: trainer.optimizer.state_dict()),
    "to": _locals(lambda trainer: trainer.model.to(torch.float32)),
    "forward": _locals(lambda trainer: trainer.model(inputs(5)[dist.get_rank()])),
    "method": _locals(_method),
    "second step": _locals(_second_step),
}
