"""Bodies: attributes of parameters, such as hooks, which every replacement keeps."""

from __future__ import annotations

from typing import Any

import harness
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

FROZEN = ("layer_norm", "rms_norm", "attention.q_norm", "linear.bias", "user", "pair")


class Marked(nn.Parameter):
    """A user's parameter class."""


class User(nn.Module):
    """A user's module whose `reset_parameters` makes a new parameter, as TE's norms do."""

    def __init__(self, device: Any) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(8, device=device))
        self.register_buffer("table", torch.empty(4, device=device))

    def reset_parameters(self) -> None:
        self.scale = nn.Parameter(torch.full_like(self.scale, 0.5, device=harness.device()))
        self.table.fill_(2.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale.sum() * self.table.mean()


class Pair(nn.Module):
    """One parameter under two names of one module."""

    def __init__(self, device: Any) -> None:
        super().__init__()
        self.first = Marked(torch.empty(4, 8, device=device))
        self.second = self.first

    def reset_parameters(self) -> None:
        nn.init.normal_(self.first)
        nn.init.normal_(self.second)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.first.sum() + self.second.sum()


class Model(nn.Module):
    """Every kind of module whose initialization replaces parameters; some parameters are frozen."""

    def __init__(self, device: Any) -> None:
        super().__init__()
        import transformer_engine.pytorch as te

        how: dict[str, Any] = {"device": device, "params_dtype": torch.float32}
        self.layer_norm = te.LayerNorm(32, device=device, dtype=torch.float32)
        self.rms_norm = te.RMSNorm(32, device=device, dtype=torch.float32)
        self.attention = te.MultiheadAttention(
            32, 2, qk_norm_type="RMSNorm", fuse_qkv_params=True, qkv_format="bshd", **how
        )
        self.linear = te.Linear(32, 32, **how)
        self.head = nn.Linear(32, 32, device=device)
        self.user = User(device)
        self.pair = Pair(device)
        self.again = nn.Linear(32, 32, bias=False, device=device)
        self.again.weight = self.head.weight
        self.twin = User(device)
        self.twin.table = self.user.table

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(self.attention(self.rms_norm(self.layer_norm(x))))
        return self.twin(self.pair(self.user(self.again(self.head(x)))))


def check_kept_attributes(route: str, strategy: str) -> dict[str, Any]:
    """Check requires_grad, attributes, hooks, ``grad_dtype``, class and ties after `materialize`.

    Args:
        route: "stock" for no sharding, "bound" for `set_device_mesh` alone, "sharded" for te_fsdp's `fully_shard`,
            "torch" for torch's `fully_shard` and `reset_parameters` of each module.
        strategy: of te_fsdp's `fully_shard`.
    """
    import te_fsdp

    torch.manual_seed(3)
    reference = Model(harness.device())
    torch.manual_seed(3)
    for module in reference.modules():
        if isinstance(module, (nn.Linear, User, Pair)) or type(module).__name__ == "Linear":
            for parameter in module.parameters(recurse=False):
                for mark in ("tensor_model_parallel", "partition_dim", "partition_stride"):
                    parameter.__dict__.pop(mark, None)  # TE refuses to mark a parameter twice
            module.reset_parameters()
    model = Model("meta")
    for name, parameter in model.named_parameters():
        parameter.label = name
        parameter.requires_grad_(not name.startswith(FROZEN))
    meshes = te_fsdp.Meshes.build(dp_shard=-1, device_type=harness.device_type())
    if route in ("bound", "torch"):
        te_fsdp.set_device_mesh(model)
    if route == "sharded":
        te_fsdp.fully_shard(model, meshes, strategy=strategy)
    if route == "torch":
        fully_shard(model, mesh=meshes.fsdp_with_size_one)
    hooked = [name for name, p in model.named_parameters() if p.requires_grad]
    calls: list[str] = []
    handles = [_watch(model.get_parameter(name), name, calls) for name in hooked]
    is_whole = strategy == "no_shard" or route in ("stock", "bound")
    full = model.get_parameter("head.weight") if is_whole else None
    if full is not None and hasattr(full, "grad_dtype"):
        full.grad_dtype = torch.float64
    torch.manual_seed(3)
    if route == "torch":
        for module in model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
    else:
        te_fsdp.materialize(model)
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad is not name.startswith(FROZEN), name
        assert parameter.label == name, name
    assert model.head.weight is model.again.weight
    assert model.pair.first is model.pair.second
    if route != "torch":  # TE's users call each module by itself, and share no buffers
        assert model.user.table is model.twin.table
        _same_values(model, reference)
    if is_whole:
        assert isinstance(model.pair.first, Marked)
        assert getattr(model.head.weight, "grad_dtype", torch.float64) == torch.float64
        model.head.weight.grad_dtype = torch.float32
    _hooks_run(model, hooked, calls, handles)
    return {"parameters": len(hooked)}


def _watch(parameter: nn.Parameter, name: str, calls: list[str]) -> Any:
    return parameter.register_post_accumulate_grad_hook(lambda p: calls.append(name))


def _same_values(model: nn.Module, reference: nn.Module) -> None:
    """Compare values bit for bit with stock modules in one process, tied ones from the same draws."""
    for name, parameter in reference.named_parameters():
        mine = model.get_parameter(name).detach()
        mine = mine.full_tensor() if hasattr(mine, "full_tensor") else mine
        assert torch.equal(mine, parameter), name


def _hooks_run(model: nn.Module, hooked: list[str], calls: list[str], handles: list[Any]) -> None:
    """Check that a hook runs once per backward for each trained parameter, until its handle is removed."""
    x = torch.ones(2, 4, 32, device=harness.device())
    before = {name: _full(model.get_parameter(name)) for name, _ in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
    model(x).square().mean().backward()
    assert sorted(calls) == sorted(hooked), set(hooked) ^ set(calls)
    optimizer.step()
    changed = {name for name in before if not torch.equal(before[name], _full(model.get_parameter(name)))}
    assert changed == set(hooked), changed ^ set(hooked)
    for handle in handles:
        handle.remove()
    model(x).square().mean().backward()
    assert len(calls) == len(hooked)


def _full(parameter: torch.Tensor) -> torch.Tensor:
    value = parameter.detach()
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).clone()
