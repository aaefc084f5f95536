"""Operations with unclear torch errors in a sharded model (docs/troubleshooting.md).

They work on an unsharded model, but end in an unclear error of torch or in a wrong result. Each raises te_fsdp's
own error with the name and the fix, or works and is compared by value with one process.
"""

from __future__ import annotations

import math

import bodies_supported as works
import bodies_unsupported as bodies
import pytest
from bodies_mistakes import all_mistakes

ERRORS = {
    "a_deep_copy": ("OrderError", "Model: deepcopy of a model after fully_shard"),
    "a_deep_copy_of_a_unit": ("OrderError", "layer: deepcopy of a model after fully_shard"),
    "a_deep_copy_of_replicated_weights": ("OrderError", "Model: deepcopy of a model after fully_shard"),
    "an_averaged_model": ("OrderError", "average = [p.detach().clone() for p in model.parameters()]"),
    "a_pickle_of_a_model": ("OrderError", "Model: pickle of a model after fully_shard"),
    "a_shallow_copy": (
        "OrderError",
        "Model: pickle of a model after fully_shard, as torch.save(model) or copy.copy",
    ),
    "graphed_callables": ("OrderError", "Model: make_graphed_callables of a module after fully_shard"),
    "graphed_callables_of_te": ("OrderError", "Model: make_graphed_callables of a module after fully_shard"),
    "torch_save_of_replicated_weights": ("OrderError", "Model: pickle of a model after fully_shard"),
    "a_parametrization_before_the_first_forward": ("OrderError", "head.weight: removed after fully_shard"),
    "a_parametrization_of_a_te_module": ("OrderError", "layer.fc1_weight: removed after fully_shard"),
    "a_parametrization_of_replicated_weights": ("OrderError", "head.weight: removed after fully_shard"),
    "weights_pruned_after_sharding": ("OrderError", "head.weight: removed after fully_shard"),
    "a_deleted_bias": ("OrderError", "head.bias: removed after fully_shard"),
    "a_weight_set_to_none": ("OrderError", "head.weight: removed after fully_shard"),
    "a_replicated_weight_set_to_none": ("OrderError", "head.weight: removed after fully_shard"),
    "a_weight_assigned_before_the_first_forward": (
        "OrderError",
        "head.weight: trained, but not in the model when te_fsdp.fully_shard was called",
    ),
    "a_write_through_data_in_forward": ("OrderError", "1.weight: written to in forward"),
    "a_unit_that_returns_its_weight": (
        "OrderError",
        "Prompt: forward returned one of the unit's parameters",
    ),
    "a_result_in_an_attribute": ("OrderError", "Kept: forward returned NoneType"),
    "a_function_transform": ("OrderError", "layer: forward under torch.func, as of vmap"),
    "a_dual_level": ("OrderError", "0: forward under torch.autograd.forward_ad"),
    "shared_memory": ("OrderError", "share_memory() of a sharded model"),
    "states_of_another_class": ("CheckpointError", "FusedAdam.load_state_dict: step of "),
    "states_of_another_optimizer": ("CheckpointError", "AdamW.load_state_dict: states of inp.weight"),
    "states_of_fused_adam": ("CheckpointError", "AdamW.load_state_dict: states of inp.weight"),
    "momentum_of_adam": (
        "CheckpointError",
        "SGD.step: states of inp.weight: expected the states of this class: mom",
    ),
    "shared_memory_of_a_layer": ("OrderError", "head.weight: share_memory() of a sharded model"),
    "an_orthogonal_weight": ("OrderError", "head.weight: removed after fully_shard"),
    "a_spectral_norm": ("OrderError", "layer.fc1_weight: removed after fully_shard"),
    "rows_pruned_by_their_norm": ("OrderError", "head.weight: removed after fully_shard"),
    "weights_pruned_globally": ("OrderError", "inp.weight: removed after fully_shard"),
    "pruning_removed_after_sharding": ("OrderError", "0.weight_orig: removed after fully_shard"),
    "pruned_again_after_sharding": ("OrderError", "0.weight_orig: removed after fully_shard"),
    "a_spectral_norm_removed_after_sharding": ("OrderError", "0.weight_orig: removed after fully_shard"),
    "a_weight_norm_removed_after_sharding": ("OrderError", "0.weight_v: removed after fully_shard"),
    "a_parametrization_removed_after_sharding": (
        "OrderError",
        "0.parametrizations.weight.original0: removed after fully_shard",
    ),
    "a_jacobian": ("OrderError", "layer: second backward through one forward"),
    "clip_grad_norm_of_two_models": (
        "PlacementError",
        "clip_grad_norm_: parameters: expected a model, or its parameters",
    ),
    "meshes_instead_of_an_axis": ("MeshError", "tp_mesh: expected a 1-D DeviceMesh or None, got Meshes"),
    "a_full_momentum": ("CheckpointError", "SGD.step: momentum_buffer of weight: expected this rank's shard"),
    "a_gradient_penalty": ("OrderError", "backward with create_graph=True through sharded weights"),
    "a_gradient_penalty_of_kept_weights": (
        "OrderError",
        "1: backward with create_graph=True through sharded weights",
    ),
    "a_gradient_penalty_through_te": (
        "OrderError",
        "layer: backward with create_graph=True through a TransformerEngine module",
    ),
    "a_full_optimizer_state": (
        "CheckpointError",
        "AdamW.step: exp_avg of weight: expected this rank's shard, a DTensor",
    ),
    "clip_grad_norm_of_none": (
        "PlacementError",
        "clip_grad_norm_: max_norm must be a number of at least 0: got None",
    ),
    "scale_gradients_of_none": ("PlacementError", "scale_gradients: factor must be a number"),
    "output_without_visible_tensors": ("PlacementError", "unit: forward returned Hidden"),
    "a_slice_without_tensor_parallelism": (
        "MeshError",
        "layer: fully_shard over meshes without a tensor-parallel axis: expected meshes with tp=2",
    ),
    "no_fsdp_axis": ("MeshError", "fully_shard: meshes: expected te_fsdp.Meshes"),
    "two_models_and_main_weights": (
        "OrderError",
        'models = torch.nn.ModuleDict({"a": a, "b": b}), and pass models to te_fsdp.main_weights',
    ),
}


@pytest.mark.ranks(2)
def test_unsupported_operations_raise(pool, tmp_path):
    """Check operations for which torch's error does not name the parameter or a fix."""
    assert set(ERRORS) == {make.__name__ for make in bodies.MISTAKES}
    for found in pool.run(all_mistakes, 2, directory=str(tmp_path), mistakes=bodies.MISTAKES):
        wrong = []
        for mistake, (name, phrase) in ERRORS.items():
            kind, text = found.get(mistake, ("no error", ""))
            if kind != name or phrase not in text or "Fix: " not in text:
                wrong.append((mistake, kind, text))
        assert wrong == []


@pytest.mark.ranks(2)
def test_dtensors_of_other_models_are_unaffected(pool):
    """Check that te_fsdp's process-wide changes act on its own parameters only."""
    for found in pool.run(works.clip_dtensors_of_other_models, 2):
        assert found["before"] == found["with a sharded model"]
        assert "got mixed torch.Tensor and DTensor" in found["before"]["mixed"], found


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", works.STRATEGIES)
def test_supported_operations_equal_one_process(pool, strategy):
    """Check operations that FSDP2 or te_fsdp rejected or computed wrongly. Gradients equal one process by value."""
    for found in pool.run(works.all_supported, 2, strategy=strategy):
        assert found == {make.__name__: True for make in works.WORKS}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", ["optim_grads_params", "no_shard"])
def test_two_models_in_a_module_dict(pool, tmp_path, strategy):
    """Check one optimizer over two models in one ``ModuleDict``."""
    assert all(pool.run(works.two_models_in_a_module_dict, 2, directory=str(tmp_path), strategy=strategy))


@pytest.mark.parametrize(
    ("axes", "mixed"),
    [
        pytest.param({"dp_shard": 2}, True, marks=pytest.mark.ranks(2)),
        pytest.param({"dp_shard": 2, "tp": 2}, False, marks=pytest.mark.ranks(4)),
        pytest.param({"dp_shard": 2, "tp": 2}, True, marks=pytest.mark.ranks(4)),
        pytest.param({"tp": 2}, None, marks=pytest.mark.ranks(2)),
    ],
)
def test_grad_scaler_over_several_meshes(pool, axes, mixed):
    """Check one ``GradScaler`` over parameters on several meshes. Ranks step or skip together."""
    ranks = math.prod(axes.values())
    for infinite, scale in ((False, 4.0), (True, 2.0)):
        for found in pool.run(works.scaled_losses, ranks, axes=axes, mixed=mixed, infinite=infinite):
            assert found == (True, scale), infinite


@pytest.mark.ranks(2)
@pytest.mark.recipe("mxfp8")
@pytest.mark.parametrize("when", ["before", "after a backward", "after a step"])
@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
def test_module_to_of_quantized_weights(pool, strategy, when):
    """Check ``torch.utils.swap_tensors`` of quantized parameters, which rejects weak references and loses hooks."""
    if strategy != "no_shard" and when != "before":
        pytest.skip("a conversion after the first forward: FSDP2 has allocated what it gathers into")
    for found in pool.run(works.conversions, 2, strategy=strategy, when=when):
        assert found == {"to": True, "cpu_float": True, "one_layer": True}


@pytest.mark.ranks(2)
def test_meshes_of_size_one(pool):
    """Check that code written for tensor parallelism runs without it."""
    for rank, found in enumerate(pool.run(works.meshes_of_size_one, 2)):
        te_kwargs = {"tp_group": None, "tp_size": 1}
        assert found == {"rank": 0, "size": 1, "group": [rank], "te": te_kwargs, "part": 4}


@pytest.mark.parametrize(
    "axes",
    [
        pytest.param({"dp_shard": 2}, marks=pytest.mark.ranks(2)),
        pytest.param({"dp_shard": 2, "tp": 2}, marks=pytest.mark.ranks(4)),
        pytest.param({"dp_replicate": 2, "dp_shard": 2}, marks=pytest.mark.ranks(4)),
    ],
)
def test_fully_shard_with_a_mesh_slice(pool, axes):
    """Check that ``fully_shard(model, meshes.fsdp)``, as FSDP2 is called, uses the other axes too."""
    ranks = 2 * axes.get("tp", 1) * axes.get("dp_replicate", 1)
    assert all(pool.run(works.mesh_slice_instead_of_meshes, ranks, axes=axes))
