"""Operations that FSDP2 or te_fsdp once computed wrongly, compared with one process (:mod:`bodies_unsupported`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import harness
import torch
import torch.distributed as dist
from bodies_mistakes import WIDTH, Model, draw_batch, make_meshes, make_sgd, make_sharded, take_step
from bodies_unsupported import Chain, SharedModule, Wrapping, make_of_torch
from torch import nn
from torch.distributed.tensor import DTensor

STRATEGIES = ("optim_grads_params", "optim_grads", "optim", "no_shard")
#: Sums of fp32 in a different order, of values near 1: seen 2e-7.
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def plain_copy(sharded: nn.Module, model: nn.Module) -> nn.Module:
    """Return the unsharded model of one process, with the values of a sharded one."""
    model = model.to_empty(device=harness.device())
    values = {name: full(p.detach()) for name, p in sharded.named_parameters()}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(values[name])
    return model


def same_gradients(
    sharded: nn.Module, loss: Callable[[nn.Module, torch.Tensor], torch.Tensor], plain: nn.Module
) -> bool:
    """Return whether gradients are nonzero and equal the mean of both ranks' batches in one process."""
    loss(sharded, draw_batch()).backward()
    (
        sum(loss(plain, draw_batch(rank)) for rank in range(dist.get_world_size())) / dist.get_world_size()
    ).backward()  # type: ignore[union-attr]
    return gradients_are_equal(sharded, plain)


def gradients_are_equal(sharded: nn.Module, plain: nn.Module) -> bool:
    wanted = dict(plain.named_parameters())
    for name, parameter in sharded.named_parameters():
        actual, own = parameter.grad, wanted[name].grad
        if actual is None or own is None or not own.any() or not torch.allclose(full(actual), own, **CLOSE):
            return False
        # The negative control: this rank's own gradient, or twice the mean, would be detected.
        assert not torch.allclose(2 * full(actual), own, **CLOSE)
    return True


def clip_dtensors_of_other_models() -> dict[str, Any]:
    """Clip DTensors of unrelated models by torch, without and with te_fsdp's handlers."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    from te_fsdp.upstream.torch_mixed_lists import OPERATORS

    mesh = init_device_mesh(harness.device_type(), (2,))

    def clipped(is_mixed: bool) -> Any:
        parameters = [nn.Parameter(distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])) for _ in range(2)]
        if is_mixed:
            parameters[1] = nn.Parameter(torch.ones(4, 2))
        for parameter in parameters:
            parameter.grad = 3 * parameter.detach()
        norm = torch.nn.utils.clip_grad_norm_(parameters, 0.5)
        torch.nn.utils.clip_grad_value_(parameters, 0.01)
        return [full(norm).item(), *(full(parameter.grad).tolist() for parameter in parameters)]

    def outcomes() -> dict[str, Any]:
        try:
            clipped(True)
        except RuntimeError as error:
            return {"sharded": clipped(False), "mixed": str(error)}
        return {}

    make_sharded()
    handlers = DTensor._op_dispatcher._custom_op_handlers
    removed = {operator: handlers.pop(operator) for operator in OPERATORS}
    try:
        before = outcomes()
    finally:
        handlers.update(removed)
    return {"before": before, "with a sharded model": outcomes()}


def units_run_without_the_model(strategy: str) -> bool:
    """Run a unit before the model, and both in one loss."""

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model.layer(x).square().mean() + model(x).square().mean()

    sharded = make_sharded(strategy)
    return same_gradients(sharded, loss, plain_copy(sharded, Model(make_meshes())))


def outputs_of_any_class(strategy: str) -> bool:
    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean()

    sharded = make_of_torch(Chain(Wrapping()), ["unit", "first"], strategy)
    return same_gradients(sharded, loss, plain_copy(sharded, Chain(Wrapping())))


def a_model_that_returns_any_class(strategy: str) -> bool:
    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).parts["tensor"].square().mean()

    sharded = make_of_torch(Wrapping(), [], strategy)
    return same_gradients(sharded, loss, plain_copy(sharded, Wrapping()))


def a_shared_unit(strategy: str) -> bool:
    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean()

    results = []
    for name in ("left.0", "right.0"):  # either name of it
        sharded = make_of_torch(SharedModule(), ["left", "right", name], strategy)
        results.append(same_gradients(sharded, loss, plain_copy(sharded, SharedModule())))
    return all(results)


def a_penalty_of_replicated_layers(strategy: str) -> bool:
    """Use a gradient penalty of replicated layers, with the other parts under any strategy."""

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(model[:3](x).sum(), x, create_graph=True)
        return model(x.detach()).square().mean() + gradient.square().mean()

    def make() -> nn.Sequential:
        critic = [nn.Linear(WIDTH, WIDTH, device="meta"), nn.Tanh(), nn.Linear(WIDTH, WIDTH, device="meta")]
        return nn.Sequential(*critic, nn.Linear(WIDTH, WIDTH, device="meta"))

    strategies = {"3": strategy, "0": "no_shard", "2": "no_shard"}
    sharded = make_of_torch(make(), [], strategies)
    return same_gradients(sharded, loss, plain_copy(sharded, make()))


def no_sync_of_a_compiled_model(strategy: str) -> bool:
    import te_fsdp

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean()

    sharded = make_sharded(strategy)
    plain = plain_copy(sharded, Model(make_meshes()))
    compiled = torch.compile(sharded, backend="eager")
    with te_fsdp.no_sync(compiled):
        loss(compiled, draw_batch()).backward()
    for rank in range(dist.get_world_size()):
        (loss(plain, draw_batch(rank)) / dist.get_world_size()).backward()
    return same_gradients(compiled, loss, _Renamed(plain))


class _Renamed(nn.Module):
    """Has the names of ``torch.compile``'s wrapper."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._orig_mod = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._orig_mod(x)


def averaged_model_in_a_loop(strategy: str) -> bool:
    """Run the average of docs/data.md against ``AveragedModel`` in one process. Training is unaffected."""
    sharded = make_sharded(strategy)
    plain = plain_copy(sharded, Model(make_meshes()))
    decay = 0.9
    expected = torch.optim.swa_utils.AveragedModel(
        plain, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(decay)
    )
    expected.update_parameters(plain)  # the first update copies
    parameters = list(sharded.parameters())
    average = [p.detach().float().clone() for p in parameters]
    optimizers = make_sgd(sharded), make_sgd(plain)
    seen = []
    for _ in range(4):
        take_step(sharded, optimizers[0])
        losses = [plain(draw_batch(rank)).square().mean() for rank in range(dist.get_world_size())]
        (sum(losses) / len(losses)).backward()  # type: ignore[union-attr]
        optimizers[1].step()
        optimizers[1].zero_grad()
        expected.update_parameters(plain)
        with torch.no_grad():
            torch._foreach_lerp_(average, [p.detach().float() for p in parameters], 1 - decay)
            kept = [p.detach().clone() for p in parameters]
            for p, mean in zip(parameters, average, strict=True):
                p.copy_(mean)
            seen.append(torch.allclose(sharded(draw_batch()), expected(draw_batch()), **CLOSE))
            seen.append(
                not torch.allclose(sharded(draw_batch()), plain(draw_batch()), **CLOSE)
            )  # the control
            for p, value in zip(parameters, kept, strict=True):
                p.copy_(value)
    return all(seen) and all(
        torch.allclose(full(p.detach()), q, **CLOSE)
        for p, q in zip(sharded.parameters(), plain.parameters(), strict=True)
    )


def initialized_module_by_module(strategy: str) -> bool:
    """Initialize by torch's recipe for models on meta; then gradients are those of one process."""
    import te_fsdp

    def init(module: nn.Module) -> None:
        module.to_empty(device=harness.device(), recurse=False)
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean()

    meshes = make_meshes()
    sharded = te_fsdp.fully_shard(Model(meshes), meshes, units=["layer"], strategy=strategy).apply(init)
    plain = plain_copy(sharded, Model(meshes))
    return same_gradients(sharded, loss, plain)


def two_models_in_a_module_dict(directory: str, strategy: str) -> bool:
    """Train two models by one optimizer with main weights. Save and load them into new models."""
    import te_fsdp

    results = []
    for _ in range(2):
        models = nn.ModuleDict(
            {k: make_sharded(strategy, model=Model(make_meshes()).bfloat16()) for k in ("one", "other")}
        )
        optimizer = torch.optim.SGD(models.parameters(), lr=0.1, momentum=0.9)
        te_fsdp.main_weights(models, optimizer)
        results.append((models, optimizer))
    (models, optimizer), (others, loaded) = results
    models["other"](models["one"](draw_batch().bfloat16())).float().square().mean().backward()
    before = [full(p.detach()).clone() for p in models.parameters()]
    te_fsdp.clip_grad_norm_(models, 1.0)
    optimizer.step()
    after = [full(p.detach()) for p in models.parameters()]
    te_fsdp.checkpoint.save(f"{directory}/{strategy}", models, optimizer)
    te_fsdp.checkpoint.load(f"{directory}/{strategy}", others, loaded)
    changed = any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    return changed and all(
        torch.equal(full(a.detach()), full(b.detach()))
        for a, b in zip(models.parameters(), others.parameters(), strict=True)
    )


WORKS = [
    units_run_without_the_model,
    outputs_of_any_class,
    a_model_that_returns_any_class,
    a_shared_unit,
    a_penalty_of_replicated_layers,
    no_sync_of_a_compiled_model,
    averaged_model_in_a_loop,
    initialized_module_by_module,
]


def all_supported(strategy: str) -> dict[str, bool]:
    return {make.__name__: make(strategy) for make in WORKS}


class ComparedScaler(torch.amp.GradScaler):
    """Raises on all ranks if only some of them skip the step, in which the others would wait for them."""

    def _maybe_opt_step(self, optimizer: Any, optimizer_state: Any, *args: Any, **kwargs: Any) -> Any:
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, any(v.item() for v in optimizer_state["found_inf_per_device"].values()))
        assert len(set(found)) == 1, f"ranks that skip the step: {found}"
        return super()._maybe_opt_step(optimizer, optimizer_state, *args, **kwargs)


def scaled_losses(axes: dict[str, int], mixed: bool | None, infinite: bool) -> tuple[bool, float]:
    """Compare a step with ``GradScaler`` over parameters of several meshes with one without; return its scale too.

    ``mixed`` is ``None`` for a model of ``set_device_mesh`` alone. ``infinite``: the gradient of one element, on one
    rank alone, is infinite, and no rank may step.
    """
    import te_fsdp

    meshes = make_meshes(**axes)
    made = []
    for _ in range(2):
        model = Model(meshes)
        strategy = {"": "optim_grads_params", "head": "no_shard"} if mixed else "optim_grads_params"
        if mixed is None:
            te_fsdp.set_device_mesh(model, meshes.tp, meshes.weight)
        else:
            te_fsdp.fully_shard(model, meshes, units=["layer"], strategy=strategy)
        made.append(te_fsdp.materialize(model, seed=0))
    scaled, plain = made
    before = [full(p.detach()).clone() for p in scaled.parameters()]
    scaler = ComparedScaler(harness.device_type(), init_scale=4.0)
    optimizers = make_sgd(scaled), make_sgd(plain)
    scaler.scale(scaled(draw_batch(meshes.data_rank)).square().mean()).backward()
    if infinite and dist.get_rank() == dist.get_world_size() - 1:
        scaled.layer.fc2_weight.grad.to_local()[0, 0] = float("inf")
    scaler.step(optimizers[0])
    scaler.update()
    take_one = plain(draw_batch(meshes.data_rank)).square().mean()
    take_one.backward()
    optimizers[1].step()
    expected = before if infinite else [full(p.detach()) for p in plain.parameters()]
    other = [full(p.detach()) for p in plain.parameters()] if infinite else before
    now = [full(p.detach()) for p in scaled.parameters()]
    as_wanted = all(torch.allclose(a, b, **CLOSE) for a, b in zip(now, expected, strict=True))
    return as_wanted and not torch.allclose(now[0], other[0], **CLOSE), scaler.get_scale()


def conversions(strategy: str, when: str) -> dict[str, bool]:
    """Check that ``to`` and its like change no bit of MXFP8 weights in three steps; gradients stay averaged."""
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import MXFP8BlockScaling

    import te_fsdp

    def train(convert: Callable[[nn.Module], Any]) -> list[torch.Tensor]:
        meshes = make_meshes()
        with te.quantized_model_init(enabled=True, recipe=MXFP8BlockScaling()):
            model = nn.Sequential(*(te.Linear(64, 64, device="meta") for _ in range(2)))
        te_fsdp.materialize(te_fsdp.fully_shard(model, meshes, strategy=strategy), seed=0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        te_fsdp.main_weights(model, optimizer)
        tokens = torch.randn(32, 64, generator=torch.Generator().manual_seed(dist.get_rank()))
        if when == "before":
            convert(model)
        for step in range(3):
            with te.autocast(enabled=True, recipe=MXFP8BlockScaling()):
                model(tokens.to(harness.device())).square().mean().backward()
            if when == "after a backward" and step == 1:
                convert(model)
            optimizer.step()
            optimizer.zero_grad()
            if when == "after a step" and step == 0:
                convert(model)
        return [optimizer.state[p]["master_param"] for p in model.parameters() if p.ndim == 2]

    def bits(main: torch.Tensor) -> torch.Tensor:
        return main.to_local() if isinstance(main, DTensor) else main

    expected = [bits(main) for main in train(lambda model: model)]
    ways: dict[str, Callable[[nn.Module], Any]] = {
        "to": lambda model: model.to(harness.device()),
        "cpu_float": lambda model: model.to("cpu").float().to(harness.device()),
        "one_layer": lambda model: model[0].to("cpu").float().to(harness.device()),
    }
    return {
        name: all(torch.equal(a, bits(b)) for a, b in zip(expected, train(way), strict=True))
        for name, way in ways.items()
    }


def meshes_of_size_one() -> dict[str, Any]:
    """Run code for tensor parallelism without it, also with a mesh slice instead of the meshes."""
    import te_fsdp

    meshes = make_meshes()
    model = Model(meshes)
    te_fsdp.set_device_mesh(model, meshes.tp, meshes.weight)
    te_fsdp.fully_shard(model, meshes.fsdp)  # type: ignore[arg-type]
    te_fsdp.materialize(model, seed=0)
    take_step(model, make_sgd(model))
    return {
        "rank": meshes.tp.get_local_rank(),
        "size": meshes.tp.size(),
        "group": dist.get_process_group_ranks(meshes.tp.get_group()),
        "te": meshes.te_kwargs(),
        "part": len(torch.arange(4).chunk(meshes.tp.size())[meshes.tp.get_local_rank()]),
    }


def mesh_slice_instead_of_meshes(axes: dict[str, int]) -> bool:
    """Check that ``fully_shard(model, meshes.fsdp)``, as FSDP2 is called, binds the model to the other axes too."""
    import te_fsdp

    outputs = []
    for take in (lambda meshes: meshes, lambda meshes: meshes.fsdp):
        meshes = make_meshes(**axes)
        model = Model(meshes)
        te_fsdp.materialize(te_fsdp.fully_shard(model, take(meshes), units=["layer"]), seed=0)
        take_step(model, make_sgd(model)) if "tp" not in axes else None
        outputs.append((model.layer.fc1_weight, model(draw_batch(meshes.data_rank)).detach()))
    (one, first), (other, second) = outputs
    return (
        one.placements == other.placements
        and one.device_mesh == other.device_mesh
        and torch.equal(first, second)
    )
