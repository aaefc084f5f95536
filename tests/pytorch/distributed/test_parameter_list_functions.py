"""``torch.nn.utils`` over parameters on several meshes.

torch's functions over lists of tensors raise unclear errors, or return the norm of one rank's shards. Here each is
correct by value, or raises te_fsdp's error with the names and the fix.
"""

from __future__ import annotations

import bodies_parameter_list_functions as bodies
import pytest

TWO = pytest.param({"dp_shard": 2}, marks=pytest.mark.ranks(2))
FOUR = pytest.param({"dp_shard": 2, "tp": 2}, marks=pytest.mark.ranks(4))


def ranks_of(axes: dict[str, int]) -> int:
    return axes.get("dp_shard", 1) * axes.get("tp", 1) * axes.get("ep", 1)


@pytest.mark.parametrize("axes", [TWO, FOUR])
def test_clip_grad_functions_equal_full_tensors(pool, axes):
    """Check norms and clipped gradients with and without ``foreach``."""
    for found in pool.run(
        bodies.compare_clip_grad_functions, ranks_of(axes), axes=axes, strategy="optim_grads_params"
    ):
        assert found == {"wrong": [], "control": []}


@pytest.mark.parametrize("axes", [TWO, FOUR])
def test_clip_grads_with_norm_of_a_different_mesh(pool, axes):
    """Check a DTensor norm that scales gradients on different meshes, with and without ``foreach``."""
    options = {"axes": axes, "strategy": "optim_grads_params"}
    for found in pool.run(bodies.clip_by_norm_of_a_different_mesh, ranks_of(axes), **options):
        assert found == {"wrong": [], "control": []}


@pytest.mark.ranks(2)
def test_vector_to_parameters_of_tp_only_weights_raises(pool):
    """Torch silently drops this write if only tp shards the weight."""
    for found in pool.run(bodies.errors_of_unsupported_lists, 2, axes={"tp": 2}, strategy="no_shard"):
        assert "parameter.data was assigned" in found["vector_to_parameters"], found


@pytest.mark.parametrize("axes", [TWO, FOUR])
def test_parameters_to_vector_of_several_meshes_raises(pool, axes):
    """Check that torch raises when it joins them, and writes nothing into DTensors silently."""
    for found in pool.run(
        bodies.errors_of_unsupported_lists, ranks_of(axes), axes=axes, strategy="optim_grads_params"
    ):
        assert "inp.weight, " in found["parameters_to_vector"], found
        for name in ("parameters_to_vector", "gradients"):
            assert found[name].startswith("PlacementError: "), found
            assert "sharded and 2 plain tensors" in found[name] or axes.get("tp"), found
            assert "Fix: torch.cat([p.full_tensor().flatten()" in found[name], found
        assert "parameter.data was assigned" in found["vector_to_parameters"], found
        assert "torch.nn.utils.vector_to_parameters" in found["vector_to_parameters"], found


@pytest.mark.ranks(4)
def test_parameters_to_vector_of_one_mesh(pool):
    """Check that stacked weights have unsharded order, as in ``full_tensor``."""
    for found in pool.run(
        bodies.compare_parameters_to_vector, 4, axes={"dp_shard": 2, "tp": 2}, strategy="optim_grads_params"
    ):
        assert all(found.values()), found


@pytest.mark.ranks(4)
@pytest.mark.parametrize("recipe", ["current", "mxfp8"])
def test_parameters_to_vector_of_quantized_weights(pool, recipe):
    """Check the values, because TE has no flat views of MXFP8 bytes."""
    axes = {"dp_shard": 2, "tp": 2}
    for found in pool.run(bodies.compare_quantized_parameters_to_vector, 4, axes=axes, recipe=recipe):
        assert all(found.values()), found


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", ["optim_grads_params", "no_shard"])
def test_clip_grad_norm_of_experts_raises(pool, strategy):
    """A norm over this rank's experts, which clips all other gradients by a different factor on each rank of ep.

    Under ``no_shard`` all gradients are ordinary tensors, and only the step can detect it.
    """
    wanted = (
        "torch's norm of experts' gradients" if strategy != "no_shard" else "gradients that differ over ep"
    )
    for found in pool.run(bodies.error_of_expert_norm, 2, axes={"ep": 2}, strategy=strategy):
        assert found.pop("control") == "no error"
        for error in found.values():
            assert wanted in error and "Fix: te_fsdp.clip_grad_norm_(model, max_norm)" in error, found
