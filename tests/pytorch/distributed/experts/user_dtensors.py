"""A mixture of experts whose stacked weights the user registers as DTensors.

Every token passes through all experts, weighted by a softmax. Tokens travel by all-gather and reduce-scatter over ep.
`form` says where the weights are registered and what reads them:

    grouped    on the block; GroupedLinear without parameters gets views of the local tensor
    on_te      on the GroupedLinear itself, instead of TE's parameters
    matmul     on the block; torch.einsum
    listed     in an nn.ParameterList of the block; torch.einsum
"""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from typing import Any

import harness
import torch
import torch.distributed as dist
from harness.tensor_parallel import SumGradientOverTp, SumOverTp
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

WIDTH, HIDDEN, TOKENS, STEPS, SEED = 16, 32, 16, 3, 5
FORMS = ("grouped", "on_te", "matmul", "listed")


class _Gather(torch.autograd.Function):
    """All tokens of the ranks of ep; their gradients are summed and scattered back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        out = x.new_empty(x.shape[0] * group.size(), x.shape[1])
        dist.all_gather_into_tensor(out, x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _Scatter.apply(gradient, ctx.group), None


class _Scatter(torch.autograd.Function):
    """The sum over ep of each rank's tokens."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total.chunk(group.size())[group.rank()].contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _Gather.apply(gradient, ctx.group), None


def distributed(full: torch.Tensor, meshes: Any, ep_dim: int, tp_dim: int | None) -> torch.Tensor:
    """Return a DTensor over the axes that the job has; `full` itself for one process."""
    if meshes is None:
        return full
    mesh, placements = meshes.tp, [Replicate() if tp_dim is None else Shard(tp_dim)]
    if meshes.ep is not None:
        mesh, placements = meshes.ep, [Shard(ep_dim)]
        if meshes.size("tp") > 1:
            mesh = meshes.expert_mesh["ep", "tp"]
            placements.append(Replicate() if tp_dim is None else Shard(tp_dim))
    local = full
    for axis, placement in enumerate(placements):
        if placement.is_shard():
            local = local.chunk(mesh.size(axis), placement.dim)[mesh.get_local_rank(axis)]
    options: dict[str, Any] = {"run_check": False, "shape": full.shape, "stride": full.stride()}
    return DTensor.from_local(local.contiguous(), mesh, placements, **options)


class Block(nn.Module):
    def __init__(self, experts: int, meshes: Any, form: str, device: Any) -> None:
        super().__init__()
        import transformer_engine.pytorch as te

        self.form, self.meshes, self.experts = form, meshes, experts
        self.gate = nn.Linear(WIDTH, experts, device=device)
        self.scale = nn.Parameter(torch.ones(WIDTH, device=device))
        generator = torch.Generator().manual_seed(SEED)
        made = []
        for shape, tp_dim in (((experts, HIDDEN, WIDTH), 1), ((experts, WIDTH, HIDDEN), 2)):
            full = torch.randn(shape, generator=generator) * 0.2
            full = torch.empty(shape, device="meta") if str(device) == "meta" else full.to(device)
            made.append(nn.Parameter(distributed(full, meshes, 0, tp_dim)))
        own = len(self.own_experts())
        if form in ("grouped", "on_te"):
            # It draws for other experts than one process does.
            with torch.random.fork_rng(devices=[harness.device()] if harness.device().type == "cuda" else []):
                self.up = te.GroupedLinear(
                    own, WIDTH, HIDDEN, bias=False, params_dtype=torch.float32, device=device
                )
            for index in range(own):
                self.up._parameters.pop(f"weight{index}")
        if form == "listed":
            self.listed = nn.ParameterList(made)
        else:
            (self.up if form == "on_te" else self).stacked = made[0]
            self.down = made[1]

    def own_experts(self) -> list[int]:
        ep = None if self.meshes is None else self.meshes.ep
        every = torch.arange(self.experts)
        return (every if ep is None else every.chunk(ep.size())[ep.get_local_rank()]).tolist()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.scale.fill_(1.0)
            self.stacked.normal_(std=0.2)
            self.down.normal_(std=0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ep = None if self.meshes is None else self.meshes.ep
        shares = self.gate(x).softmax(-1)
        x = x * self.scale
        if ep is not None:
            x, shares = _Gather.apply(x, ep.get_group()), _Gather.apply(shares, ep.get_group())
        out = self._experts(x, shares[:, self.own_experts()])
        return out if ep is None else _Scatter.apply(out, ep.get_group())

    def _experts(self, x: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        first, second = (
            self.listed
            if self.form == "listed"
            else ((self.up if self.form == "on_te" else self).stacked, self.down)
        )
        parts = [p.to_local() if isinstance(p, DTensor) else p for p in (first, second)]
        if self.meshes is not None:
            assert all(isinstance(p, DTensor) for p in (first, second)), "no longer DTensors"
        tp = self.meshes.tp.get_group() if self.meshes is not None and self.meshes.size("tp") > 1 else None
        if tp is not None:
            x, shares = SumGradientOverTp.apply(x, tp), SumGradientOverTp.apply(shares, tp)
        if self.form in ("grouped", "on_te"):
            for index, weight in enumerate(parts[0].unbind(0)):
                setattr(self.up, f"weight{index}", weight)
            count = len(parts[0])
            hidden = self.up(x.repeat(count, 1), [len(x)] * count).view(count, len(x), HIDDEN)
        else:
            hidden = torch.einsum("tw,ehw->eth", x, parts[0])
        out = torch.einsum("eth,ewh,te->tw", hidden.tanh(), parts[1], shares)
        return out if tp is None else SumOverTp.apply(out, tp)


class Model(nn.Module):
    def __init__(self, experts: int, meshes: Any, form: str, device: Any) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, device=device)
        self.block = Block(experts, meshes, form, device)
        self.last = nn.Linear(WIDTH, WIDTH, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        return self.last(y + self.block(y))


def build(experts: int, meshes: Any, form: str, device: Any = None) -> Model:
    torch.manual_seed(SEED)
    return Model(experts, meshes, form, device or harness.device())


def _step(model: Any, optimizer: Any, step: int, meshes: Any) -> torch.Tensor:
    import te_fsdp

    x = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(step)).to(harness.device())
    if meshes is not None:
        x = x.chunk(meshes.data_size)[meshes.data_rank]
    model(x).square().mean().backward()
    if meshes is None:
        return torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    return te_fsdp.clip_grad_norm_(model, 0.05)


def _distance(model: Any, reference: Any, what: Any) -> dict[str, float]:
    results = {}
    for name, parameter in reference.named_parameters():
        actual, expected = what(model.get_parameter(name)), what(parameter)
        actual = actual.full_tensor() if isinstance(actual, DTensor) else actual
        assert actual.shape == expected.shape, name
        results[name] = float((actual - expected).norm() / expected.norm())
    return results


def _optimizer(model: Any) -> Any:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)


def train_as_one_process(
    axes: dict[str, int], form: str, experts: int = 4, broken: str = "", **how: Any
) -> dict[str, float]:
    """Train three steps as one process; return the worst distance of gradients, norms and parameters."""
    import te_fsdp

    reference, meshes = (
        build(experts, None, form),
        te_fsdp.Meshes.build(**axes, device_type=harness.device_type()),
    )
    model = build(experts, meshes, form)
    te_fsdp.fully_shard(model, meshes, **how)
    ours, theirs = _optimizer(model), _optimizer(reference)
    if "outer_strategy" in how:
        te_fsdp.shard_optimizer(ours)
    if broken == "divide":
        model.block.set_gradient_divide_factor(1.0 * meshes.data_size * 2)
    worst = {"gradient": 0.0, "norm": 0.0}
    for step in range(STEPS):
        norm, expected = _step(model, ours, step, meshes), _step(reference, theirs, step, None)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        worst["norm"] = max(worst["norm"], abs(float(norm / expected) - 1))
        # With outer_strategy="optim" gradients are averaged over dp_replicate by the optimizer.
        apart = {} if "outer_strategy" in how else _distance(model, reference, lambda p: p.grad)
        worst["gradient"] = max([worst["gradient"], *apart.values()])
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    te_fsdp.release_params(model)
    apart = _distance(model, reference, lambda p: p.detach())
    names = [n for n in apart if "listed" in n or "stacked" in n or "down" in n]
    assert len(names) == 2, names
    rows = {row.name: row for row in te_fsdp.report(model)}
    assert all(rows[name].shape[0] == experts for name in names)
    return {**worst, "parameter": max(apart.values()), "size": float(math.prod(axes.values()))}


def train_and_save(
    path: str, axes: dict[str, int], form: str, experts: int = 4, plain: bool = False, **how: Any
) -> None:
    """Train two steps, then save."""
    import te_fsdp

    meshes = te_fsdp.Meshes.build(**axes, device_type=harness.device_type())
    model = build(experts, meshes, form)
    te_fsdp.fully_shard(model, meshes, **how)
    optimizer = _optimizer(model)
    for step in range(2):
        _step(model, optimizer, step, meshes)
        optimizer.step()
        optimizer.zero_grad()
    if plain:
        from torch.distributed import checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import get_state_dict

        states = get_state_dict(model, optimizer)
        dcp.save({"model": states[0], "optimizer": states[1]}, checkpoint_id=path)
    else:
        te_fsdp.checkpoint.save(path, model, optimizer)


def load_and_train(
    path: str, axes: dict[str, int], form: str, experts: int = 4, plain: bool = False, **how: Any
) -> dict:
    """Load on a different mesh and take the third step, as one process without interruption."""
    import te_fsdp

    reference = build(experts, None, form)
    theirs = _optimizer(reference)
    meshes = te_fsdp.Meshes.build(**axes, device_type=harness.device_type())
    model = build(experts, meshes, form)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0)
    te_fsdp.fully_shard(model, meshes, **how)
    ours = _optimizer(model)
    if plain:
        from torch.distributed import checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

        model_state, optimizer_state = get_state_dict(model, ours)
        both = {"model": model_state, "optimizer": optimizer_state}
        dcp.load(both, checkpoint_id=path)
        set_state_dict(model, ours, model_state_dict=both["model"], optim_state_dict=both["optimizer"])
    else:
        te_fsdp.checkpoint.load(path, model, ours)
    worst = 0.0
    for step in range(STEPS):
        _step(reference, theirs, step, None)
        if step == 2:
            _step(model, ours, step, meshes)
            worst = max(_distance(model, reference, lambda p: p.grad).values())
            ours.step()
        theirs.step()
        theirs.zero_grad()
    te_fsdp.release_params(model)
    return {"gradient": worst, "parameter": max(_distance(model, reference, lambda p: p.detach()).values())}


def compare_materialized(axes: dict[str, int], draws: int = 11) -> dict[str, float]:
    """Compare materialized values bit for bit with those that the modules draw in one process."""
    import te_fsdp

    reference = build(4, None, "matmul")
    torch.manual_seed(11)
    for module in (reference.first, reference.block, reference.block.gate, reference.last):
        module.reset_parameters()
    meshes = te_fsdp.Meshes.build(**axes, device_type=harness.device_type())
    model = build(4, meshes, "matmul", "meta")
    te_fsdp.fully_shard(model, meshes)
    te_fsdp.materialize(model, seed=draws)
    assert all(p.device == harness.device() for p in model.parameters())
    return _distance(model, reference, lambda p: p.detach())


def parallelized(strategy: str) -> dict[str, float]:
    """Compare gradients of an embedding and a head that torch's ``parallelize_module`` has distributed over tp."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    import te_fsdp

    meshes = te_fsdp.Meshes.build(tp=2, dp_shard=-1, device_type=harness.device_type())
    torch.manual_seed(5)
    make = {"table": nn.Embedding(32, 16), "mix": nn.Linear(16, 16), "head": nn.Linear(16, 32, bias=False)}
    model = nn.Sequential(OrderedDict(make)).to(harness.device())
    reference = copy.deepcopy(model)
    plan = {
        "table": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, meshes.tp, plan)
    te_fsdp.fully_shard(model, meshes, strategy=strategy)
    tokens = torch.randint(0, 32, (meshes.data_size, 64), generator=torch.Generator().manual_seed(1))
    model(tokens[meshes.data_rank].to(harness.device())).square().mean().backward()
    reference(tokens.to(harness.device())).square().mean().backward()
    return _distance(model, reference, lambda parameter: parameter.grad)


def error_of_unsupported(case: str) -> None:
    """Raise on every rank."""

    import te_fsdp

    meshes = te_fsdp.Meshes.build(ep=2, device_type=harness.device_type())
    model = build(4, meshes, "matmul")
    value = torch.ones(4, 4, device=harness.device())
    if case == "replicated over ep":
        value = DTensor.from_local(value, meshes.ep, [Replicate()], run_check=False)
    elif case == "over dp_shard":
        value = DTensor.from_local(value, meshes.fsdp, [Shard(0)], run_check=False)
    elif case == "no elements":
        value = distribute_tensor(value[:1], meshes.ep, [Shard(0)])
    elif case == "partial":
        value = DTensor.from_local(value, meshes.ep, [Partial()], run_check=False)
    elif case == "local shape":
        options = {"run_check": False, "shape": value.shape, "stride": value.stride()}
        value = DTensor.from_local(value[:1], meshes.ep, [Shard(0)], **options)
    elif case == "other shapes":
        value = DTensor.from_local(
            value[: 1 + meshes.ep.get_local_rank()], meshes.ep, [Shard(0)], run_check=False
        )
    else:
        value = torch.ones(1 << 21, device=harness.device())
    model.block.more = nn.Parameter(value)
    te_fsdp.fully_shard(model, meshes)
