"""Operations with unclear torch errors in a sharded model."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import harness
import torch
from bodies_mistakes import WIDTH, Model, draw_batch, make_meshes, make_sgd, make_sharded, take_step
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune


class Result:
    """An object that torch.utils._pytree does not support."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.parts = {"tensor": tensor}


class Wrapping(nn.Module):
    """Returns a :class:`Result`."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH, device="meta")

    def forward(self, x: torch.Tensor) -> Any:
        return Result(self.inner(x))


class HidesOutput(Wrapping):
    """Returns a tensor where no traversal finds it."""

    def forward(self, x: torch.Tensor) -> Any:
        tensor = self.inner(x)
        return HiddenOutput(lambda: tensor)


class HiddenOutput:
    """A function's closure."""

    def __init__(self, take: Callable[[], torch.Tensor]) -> None:
        self.take = take


class Chain(nn.Module):
    """torch layers around a unit, whose result they unpack."""

    def __init__(self, unit: nn.Module) -> None:
        super().__init__()
        self.first, self.unit = nn.Linear(WIDTH, WIDTH, device="meta"), unit
        self.last = nn.Linear(WIDTH, WIDTH, device="meta")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = self.unit(self.first(x))
        return self.last(result.take() if isinstance(result, HiddenOutput) else result.parts["tensor"])


class SharedModule(nn.Module):
    """Two branches with one shared module, each of them a unit."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Linear(WIDTH, WIDTH, device="meta")
        self.left, self.right = (
            nn.Sequential(shared, nn.Tanh(), nn.Linear(WIDTH, WIDTH, device="meta")) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.right(self.left(x))


def make_of_torch(model: nn.Module, units: list[str], strategy: Any) -> nn.Module:
    import te_fsdp

    meshes = make_meshes()
    return te_fsdp.materialize(te_fsdp.fully_shard(model, meshes, units=units, strategy=strategy), seed=0)


# ------------------------------------------------------------------------------------------------------------- errors


def a_deep_copy() -> None:
    copy.deepcopy(make_sharded())


def a_deep_copy_of_a_unit() -> None:
    copy.deepcopy(make_sharded("optim").layer)


def a_deep_copy_of_replicated_weights() -> None:
    copy.deepcopy(nn.Sequential(make_sharded("no_shard")))


def an_averaged_model() -> None:
    torch.optim.swa_utils.AveragedModel(make_sharded())


def a_pickle_of_a_model() -> None:
    pickle.dumps(make_sharded())


def a_shallow_copy() -> None:
    copy.copy(make_sharded())


def graphed_callables() -> None:
    torch.cuda.make_graphed_callables(make_sharded(), (draw_batch(),))


def graphed_callables_of_te() -> None:
    import transformer_engine.pytorch as te
    from transformer_engine.pytorch.graph import is_graph_capturing

    model = make_sharded("optim")
    try:
        te.make_graphed_callables(model, (draw_batch(),))
    finally:  # TE has changed both by then
        assert "__call__" not in vars(type(model))
        assert not is_graph_capturing()


def torch_save_of_replicated_weights() -> None:
    torch.save(make_sharded("no_shard"), io.BytesIO())


def a_parametrization_before_the_first_forward() -> None:
    model = make_sharded()
    parametrizations.weight_norm(model.head)
    model(draw_batch())


def a_parametrization_of_a_te_module() -> None:
    model = make_sharded("optim_grads")
    parametrizations.weight_norm(model.layer, "fc1_weight")
    model(draw_batch())


def a_parametrization_of_replicated_weights() -> None:
    model = make_sharded("no_shard")
    take_step(model, make_sgd(model))
    parametrizations.spectral_norm(model.head)
    with torch.no_grad():
        model.eval()(draw_batch())


def weights_pruned_after_sharding() -> None:
    model = make_sharded("no_shard")
    prune.l1_unstructured(model.head, "weight", 0.5)
    model(draw_batch())


def a_deleted_bias() -> None:
    model = make_sharded()
    del model.head.bias
    model(draw_batch())


def _penalty(model: nn.Module) -> torch.Tensor:
    x = draw_batch().requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    return gradient.square().mean()


def a_gradient_penalty() -> None:
    _penalty(make_sharded()).backward()


def a_gradient_penalty_of_kept_weights() -> None:
    layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, device="meta") for _ in range(2)))
    _penalty(make_of_torch(layers, ["0", "1"], "optim")).backward()


def a_gradient_penalty_through_te() -> None:
    _penalty(make_sharded("no_shard")).backward()


def a_weight_set_to_none() -> None:
    model = make_sharded()
    model.head.weight = None
    model(draw_batch())


def a_replicated_weight_set_to_none() -> None:
    model = make_sharded("no_shard")
    model.head.weight = None
    model(draw_batch())


def a_weight_assigned_before_the_first_forward() -> None:
    model = make_sharded()
    model.head.weight = nn.Parameter(torch.zeros(WIDTH, WIDTH, device=harness.device()))
    model(draw_batch())


class Decayed(nn.Linear):
    """Writes to its weight through `.data` in forward, as codebooks of averages do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.data.mul_(0.9)
        return super().forward(x)


def a_write_through_data_in_forward() -> None:
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH, device="meta"), Decayed(WIDTH, WIDTH, device="meta"))
    make_of_torch(layers, ["1"], "optim_grads_params")(draw_batch())


class Prompt(nn.Linear):
    """Returns a view of its weight."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
        return {"prompt": self.weight[:, None], "x": x}


def a_unit_that_returns_its_weight() -> None:
    make_of_torch(Prompt(WIDTH, WIDTH, device="meta"), [""], "optim_grads_params")(draw_batch())


class Kept(nn.Linear):
    """Keeps its result in an attribute."""

    def forward(self, x: torch.Tensor) -> None:  # type: ignore[override]
        self.result = super().forward(x)


def a_result_in_an_attribute() -> None:
    make_of_torch(Kept(WIDTH, WIDTH, device="meta"), [""], "optim_grads_params")(draw_batch())


def a_function_transform() -> None:
    torch.func.vmap(make_sharded())(draw_batch()[None])


def a_dual_level() -> None:
    model = make_of_torch(nn.Sequential(nn.Linear(WIDTH, WIDTH, device="meta")), ["0"], "optim_grads_params")
    with torch.autograd.forward_ad.dual_level():
        model(torch.autograd.forward_ad.make_dual(draw_batch(), draw_batch()))


def shared_memory() -> None:
    nn.Sequential(make_sharded()).share_memory()


def states_of_another_class() -> None:
    import transformer_engine.pytorch as te

    model = make_sharded()
    optimizer = torch.optim.AdamW(model.parameters())
    take_step(model, optimizer)
    te.optimizers.FusedAdam(model.parameters()).load_state_dict(optimizer.state_dict())


def states_of_another_optimizer() -> None:
    model = make_sharded()
    take_step(model, sgd := torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    adam = torch.optim.AdamW(model.parameters())
    adam.load_state_dict(sgd.state_dict())
    take_step(model, adam)


def states_of_fused_adam() -> None:
    import transformer_engine.pytorch as te

    model = make_sharded()
    take_step(model, fused := te.optimizers.FusedAdam(model.parameters(), lr=0.1))
    adam = torch.optim.AdamW(model.parameters())
    adam.load_state_dict(fused.state_dict())
    take_step(model, adam)


def momentum_of_adam() -> None:
    model = make_sharded()
    take_step(model, adam := torch.optim.AdamW(model.parameters()))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sgd.load_state_dict(adam.state_dict())
    take_step(model, sgd)


def shared_memory_of_a_layer() -> None:
    nn.Sequential(make_sharded().head).share_memory()


def an_orthogonal_weight() -> None:
    parametrizations.orthogonal(make_sharded().head, "weight")


def a_spectral_norm() -> None:
    parametrizations.spectral_norm(make_sharded().layer, "fc1_weight")


def rows_pruned_by_their_norm() -> None:
    prune.ln_structured(make_sharded().head, "weight", 0.5, n=2, dim=0)


def weights_pruned_globally() -> None:
    model = make_sharded()
    pairs = [(model.inp, "weight"), (model.head, "weight")]
    prune.global_unstructured(pairs, pruning_method=prune.L1Unstructured, amount=0.5)


def _sharded_after(change: Callable[[nn.Module], object]) -> Any:
    """Return a head whose weight is computed from others since before ``fully_shard``."""
    import te_fsdp

    model = nn.Sequential(nn.Linear(8, 8, device=harness.device()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        change(model[0])
    te_fsdp.fully_shard(model, make_meshes(), units=["0"])
    model(torch.ones(2, 8, device=harness.device())).sum().backward()
    return model[0]


def pruning_removed_after_sharding() -> None:
    prune.remove(_sharded_after(lambda head: prune.l1_unstructured(head, "weight", 0.5)), "weight")


def pruned_again_after_sharding() -> None:
    prune.random_unstructured(_sharded_after(lambda head: prune.identity(head, "weight")), "weight", 0.5)


def a_spectral_norm_removed_after_sharding() -> None:
    nn.utils.remove_spectral_norm(_sharded_after(nn.utils.spectral_norm))


def a_weight_norm_removed_after_sharding() -> None:
    nn.utils.remove_weight_norm(_sharded_after(nn.utils.weight_norm))


def a_parametrization_removed_after_sharding() -> None:
    parametrize.remove_parametrizations(
        _sharded_after(parametrizations.weight_norm), "weight", leave_parametrized=True
    )


def a_jacobian() -> None:
    model = make_sharded()
    torch.autograd.functional.jacobian(lambda x: model(x).sum(0), draw_batch())


def clip_grad_norm_of_two_models() -> None:
    import te_fsdp

    one, other = make_sharded(), make_sharded()
    other(one(draw_batch())).sum().backward()
    te_fsdp.clip_grad_norm_([one, other], 1.0)  # type: ignore[arg-type]


def meshes_instead_of_an_axis() -> None:
    import te_fsdp

    meshes = make_meshes()
    te_fsdp.set_device_mesh(Model(meshes), meshes)  # type: ignore[arg-type]


def a_full_momentum() -> None:
    plain = nn.Linear(WIDTH, WIDTH, device=harness.device())
    one = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    plain(draw_batch(0)).sum().backward()
    one.step()
    model = make_of_torch(nn.Linear(WIDTH, WIDTH, device="meta"), [], "optim_grads_params")
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sgd.load_state_dict(one.state_dict())
    take_step(model, sgd)


def a_full_optimizer_state() -> None:
    plain = nn.Linear(WIDTH, WIDTH, device=harness.device())
    one = torch.optim.AdamW(plain.parameters())
    plain(draw_batch(0)).sum().backward()
    one.step()
    model = make_of_torch(nn.Linear(WIDTH, WIDTH, device="meta"), [], "optim_grads_params")
    adam = torch.optim.AdamW(model.parameters())
    adam.load_state_dict(one.state_dict())
    take_step(model, adam)


def clip_grad_norm_of_none() -> None:
    import te_fsdp

    model = make_sharded()
    model(draw_batch()).sum().backward()
    te_fsdp.clip_grad_norm_(model, None)  # type: ignore[arg-type]


def scale_gradients_of_none() -> None:
    import te_fsdp

    model = make_sharded()
    model(draw_batch()).sum().backward()
    te_fsdp.scale_gradients(model, None)  # type: ignore[arg-type]


def output_without_visible_tensors() -> None:
    take_step(model := make_of_torch(Chain(HidesOutput()), ["unit"], "optim_grads_params"), make_sgd(model))


def a_slice_without_tensor_parallelism() -> None:
    import te_fsdp

    meshes = make_meshes(tp=2)
    of_torch = torch.distributed.init_device_mesh(
        harness.device_type(), (1, 2), mesh_dim_names=("dp_shard", "tp")
    )
    te_fsdp.fully_shard(Model(meshes), of_torch["dp_shard"])


def no_fsdp_axis() -> None:
    import te_fsdp

    meshes = make_meshes(tp=2)
    te_fsdp.fully_shard(Model(meshes), meshes.fsdp)  # type: ignore[arg-type]


def two_models_and_main_weights() -> None:
    import te_fsdp

    one, other = make_sharded(), make_sharded()
    te_fsdp.main_weights(one, make_sgd(nn.ModuleList([one, other])))


MISTAKES: list[Callable[..., None]] = [
    a_deep_copy,
    a_deep_copy_of_a_unit,
    a_deep_copy_of_replicated_weights,
    an_averaged_model,
    a_pickle_of_a_model,
    a_shallow_copy,
    graphed_callables,
    graphed_callables_of_te,
    torch_save_of_replicated_weights,
    a_parametrization_before_the_first_forward,
    a_parametrization_of_a_te_module,
    a_parametrization_of_replicated_weights,
    weights_pruned_after_sharding,
    a_deleted_bias,
    a_weight_set_to_none,
    a_replicated_weight_set_to_none,
    a_weight_assigned_before_the_first_forward,
    a_write_through_data_in_forward,
    a_unit_that_returns_its_weight,
    a_result_in_an_attribute,
    a_function_transform,
    a_dual_level,
    shared_memory,
    states_of_another_class,
    states_of_another_optimizer,
    states_of_fused_adam,
    momentum_of_adam,
    shared_memory_of_a_layer,
    an_orthogonal_weight,
    a_spectral_norm,
    rows_pruned_by_their_norm,
    weights_pruned_globally,
    pruning_removed_after_sharding,
    pruned_again_after_sharding,
    a_spectral_norm_removed_after_sharding,
    a_weight_norm_removed_after_sharding,
    a_parametrization_removed_after_sharding,
    a_jacobian,
    clip_grad_norm_of_two_models,
    meshes_instead_of_an_axis,
    a_full_momentum,
    a_gradient_penalty,
    a_gradient_penalty_of_kept_weights,
    a_gradient_penalty_through_te,
    a_full_optimizer_state,
    clip_grad_norm_of_none,
    scale_gradients_of_none,
    output_without_visible_tensors,
    a_slice_without_tensor_parallelism,
    no_fsdp_axis,
    two_models_and_main_weights,
]
