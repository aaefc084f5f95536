"""Mistakes of new users in training scripts.

Each raises an error with its fix on all ranks. Correct scripts pass.

docs/troubleshooting.md quotes these errors and those of other files; tests/unit/mistakes.csv names the tests.
"""

from __future__ import annotations

import bodies_correct_scripts as no_mistakes
import bodies_mismatched_ranks as ranks
import bodies_mistakes as bodies
import bodies_wrong_arguments as arguments
import pytest

# mistake -> class, required part of its text
ERRORS = {
    "a_new_head_after_sharding": (
        "OrderError",
        "head.weight, head.bias: trained, but not in the model when te_fsdp.fully_shard was called",
    ),
    "adapters_after_the_first_step": (
        "OrderError",
        "layer.adapter.weight, layer.adapter.bias: trained, but not in the model",
    ),
    "gradient_hooks_before_sharding": (
        "OrderError",
        "head.weight: a gradient hook on a parameter that is about to be sharded",
    ),
    "steps_in_hooks_of_replicated_parameters": (
        "OrderError",
        "expected a call after backward, which reduces them when it ends, got a call within backward",
    ),
    "gradient_hooks_after_sharding": (
        "OrderError",
        "layer.fc1_weight: a gradient hook on a parameter that is sharded",
    ),
    "to_empty_in_place_of_materialize": (
        "InitError",
        "head.weight, head.bias: not initialized: expected values after to_empty",
    ),
    "different_seeds_for_replicas": ("InitError", "copies differ between ranks"),
    "different_seeds_for_unsharded_weights": ("InitError", "copies differ between ranks"),
    "different_seeds_for_dropout": ("InputError", "the random state of dropout"),
    "an_optimizer_that_one_rank_saved": (
        "CheckpointError",
        "expected this rank's shard, got the shard of a different rank",
    ),
    "copy_of_unsharded_tensors_into_shards": (
        "PlacementError",
        "inp.weight: load_state_dict() of a sharded parameter: expected a DTensor",
    ),
    "a_cast_after_the_first_forward": (
        "OrderError",
        "a conversion from torch.float32 to torch.bfloat16 after the first forward",
    ),
    "inference_mode_before_training": ("OrderError", "forward after a first one under torch.inference_mode"),
    "averaged_model_after_sharding": ("OrderError", "deepcopy of a model after fully_shard"),
    "layer_without_parallel_mode": (
        "GradientError",
        "SGD.step: gradients that differ over tp: expected equal gradients on all ranks of a tp group, for "
        "parameters that each rank has in full, got plain.weight by ",
    ),
    "parallel_mode_on_a_layer_with_all_tokens": (
        "GradientError",
        "inp.weight: gradients that are the same over tp",
    ),
    "unsharded_sequences_for_sequence_parallelism": (
        "InputError",
        "up: inputs of a sequence-parallel module: expected a different part of the tokens on each rank "
        "of a tp group, "
        "got float32 (8, 16), the same on tp ranks 0 and 1",
    ),
    "uneven_sequences_for_sequence_parallelism": (
        "InputError",
        "up: inputs of a sequence-parallel module: expected the same shape and dtype, with or without gradients, on "
        "each rank of a tp group, got float32 (2, 16) on tp rank 0, float32 (4, 16) on tp rank 1",
    ),
    "gradients_of_local_tokens_only": (
        "InputError",
        "got float32 (4, 16) that requires gradients on tp rank 0, float32 (4, 16) on tp rank 1",
    ),
    "gradients_of_one_replica_of_the_inputs": (
        "InputError",
        "gradients (of x on tp rank 0, of no input on tp rank 1)",
    ),
    "a_weight_assigned_after_the_first_forward": (
        "OrderError",
        "head.weight: a parameter assigned after the first forward",
    ),
    "bias_removed_after_the_first_forward": (
        "OrderError",
        "layer.fc1_bias: a parameter assigned after the first forward",
    ),
    "a_parametrization_after_the_first_forward": (
        "OrderError",
        "head.weight: removed after fully_shard",
    ),
    "functional_call_with_different_values": (
        "OrderError",
        "inp.weight: a parameter assigned after the first forward",
    ),
    "optimizer_in_a_different_order": ("MeshError", "SGD.step: the optimizers differ between ranks"),
    "learning_rate_by_rank": ("MeshError", "with the same options, on all ranks, got here {'lr': '0."),
    "unsharded_head_next_to_the_sharded_part": (
        "OrderError",
        "Linear.weight, Linear.bias: trained, but not in the model when te_fsdp.fully_shard was called: "
        "expected the "
        "parameters that the model had then, got 4 parameter(s) of a module that was left out",
    ),
    "weight_written_in_forward": ("OrderError", "head.weight: written to in forward"),
    "average_assigned_to_data": ("OrderError", "and 7 more: parameter.data was assigned"),
    "one_weight_assigned_to_data": ("OrderError", "head.bias: parameter.data was assigned"),
    "equal_seeds_on_tp_ranks": (
        "InitError",
        "head.weight (all ranks of dp_shard): equal values on ranks that must",
    ),
    "dropout_enabled_later": ("InputError", "the random state of dropout"),
    "different_data_after_the_first_forward": ("InputError", "forward: inputs that differ over tp"),
    "step_between_forward_and_backward": ("OrderError", "written to between forward and backward"),
    "gradients_returned_by_autograd": ("OrderError", "torch.autograd.grad for layer"),
    "clipping_of_replaced_parameters": (
        "OrderError",
        "clip_grad_norm_: inp.weight: expected current parameters of the model",
    ),
}
# The same, of calls that are given something else.
ARGUMENTS = {
    "a_wrapper_around_the_model": ("OrderError", "model: fully_shard of a DistributedDataParallel"),
    "the_name_of_a_class_as_unit": (
        "PlacementError",
        "Fix: pass the class LayerNormMLP itself, not its name",
    ),
    "torchs_policy_as_precision": (
        "PrecisionError",
        "fully_shard: precision: expected a te_fsdp MixedPrecisionPolicy",
    ),
    "our_policy_as_torchs": (
        "PrecisionError",
        "fully_shard: mp_policy: expected a torch MixedPrecisionPolicy",
    ),
    "a_move_before_materialize": ("OrderError", "a move to a device before its parameters have values"),
    "an_optimizer_that_needs_unsharded_tensors": ("PlacementError", "Adafactor of sharded parameters"),
    "gradients_to_clip": (
        "PlacementError",
        "clip_grad_norm_: parameters: expected a model, or its parameters",
    ),
    "a_path_for_each_rank": ("CheckpointError", "save: the ranks passed different paths"),
    "arguments_of_save_in_another_order": ("CheckpointError", "Fix: pass the path first"),
    "a_state_dict_to_save": (
        "CheckpointError",
        "checkpoint: model: expected a module, a dict of modules by name, or a rank's stages, got OrderedDict",
    ),
    "a_scheduler_as_optimizer": ("PlacementError", "optimizer: expected a torch.optim.Optimizer, got StepLR"),
    "a_list_as_extra": (
        "CheckpointError",
        "save: extra: expected a dict of plain values and tensors, got list",
    ),
    "a_file_to_load": (
        "CheckpointError",
        "convert torch.save or safetensors files with te-fsdp ckpt convert",
    ),
    "a_huggingface_folder_to_load": (
        "CheckpointError",
        "Fix: use te_fsdp.checkpoint.load_huggingface for folders",
    ),
    "weight_norm_on_meta": (
        "InitError",
        "materialize: head.parametrizations.weight (_WeightNorm): a parametrization on meta",
    ),
    "weight_norm_by_hooks": ("InitError", "materialize: head (WeightNorm): a parametrization on meta"),
    "pruning_on_meta": ("InitError", "materialize: head (L1Unstructured): a parametrization on meta"),
    "a_model_built_in_inference_mode": (
        "OrderError",
        "inp.weight: fully_shard of a parameter that was created under torch.inference_mode",
    ),
    "weight_norm_over_tp": (
        "PlacementError",
        "layer: a parametrization of fc1_weight with tensor parallelism",
    ),
    "a_hub_name_to_load": ("CheckpointError", "hf download NAME --local-dir FOLDER"),
}

# The same, of ranks that do different things.
RANKS = {
    "recipe_on_some_tp_ranks": (
        "PrecisionError",
        "recipes that differ between ranks: expected the same te.autocast, and torch.autocast, on all "
        "ranks of the "
        "model, got te.autocast of DelayedScaling on rank 0; no te.autocast on rank 1",
    ),
    "different_recipe_options": (
        "PrecisionError",
        "got te.autocast of DelayedScaling, margin=0 on rank 0; te.autocast of DelayedScaling, margin=1 "
        "on rank 1",
    ),
    "recipe_within_forward_on_some_ranks": (
        "PrecisionError",
        "forward of layer: recipes that differ between ranks",
    ),
    "different_recipe_later": (
        "PrecisionError",
        "no te.autocast on rank 0; te.autocast of DelayedScaling on rank 1",
    ),
    "torch_autocast_on_some_ranks": (
        "PrecisionError",
        "got no te.autocast, torch.autocast(torch.bfloat16) on rank 0; no te.autocast on rank 1",
    ),
    "recipe_on_some_ranks_of_a_bound_model": (
        "InputError",
        "the recipe (te.autocast of DelayedScaling, ",
    ),
    "frozen_on_one_rank": (
        "MeshError",
        "different parameters are trained on some ranks: expected the same requires_grad and dtypes on all ranks "
        "of the model, got head.weight frozen in torch.float32 on rank 0 and trained in torch.float32 on rank 1",
    ),
    "different_parameters_frozen_on_each_rank": (
        "MeshError",
        "got inp.weight frozen in torch.float32 on rank 0 and trained in torch.float32 on rank 1; head.weight trained",
    ),
    "evaluation_on_some_tp_ranks": (
        "CollectiveError",
        "got rank 0 in te_fsdp.first forward in training; rank 1 in te_fsdp.first forward in evaluation",
    ),
    # The other rank would wait for this one in its first all-gather.
    "a_weight_assigned_on_one_rank": (
        "OrderError",
        "head.weight: trained, but not in the model when te_fsdp.fully_shard was called",
    ),
    "a_bias_deleted_on_one_rank": ("OrderError", "head.bias: removed after fully_shard"),
    "memory_not_initialized_on_one_rank": ("InitError", "not initialized"),
    "conversion_on_one_rank": (
        "MeshError",
        "got inp.weight trained in torch.float32 on rank 0 and trained in torch.float16 on rank 1",
    ),
    "clipping_on_one_rank": (
        "CollectiveError",
        "got rank 0 in te_fsdp.first step of an optimizer; rank 1 in te_fsdp.clip_grad_norm_",
    ),
    "report_on_one_rank": (
        "CollectiveError",
        "got rank 0 in te_fsdp.first forward in training; rank 1 in te_fsdp.report_nan",
    ),
    "quantized_weights_by_rank": (
        "MeshError",
        "for Float8Quantizer on rank 0 and (32, 16) in torch.float32, on meta, for Float8CurrentScalingQuantizer on",
    ),
}


def compare(errors, module, results):
    """Return each rank's found and expected errors for a module's mistakes."""
    assert set(errors) == {make.__name__ for make in module.MISTAKES}
    for found in results:
        wrong = []
        for mistake, (name, phrase) in errors.items():
            kind, text = found.get(mistake, ("no error", ""))
            if kind != name or phrase not in text or "Fix: " not in text:
                wrong.append((mistake, kind, text))
        assert wrong == []


@pytest.mark.ranks(2)
def test_training_mistakes_raise(pool, tmp_path):
    compare(ERRORS, bodies, pool.run(bodies.all_mistakes, 2, directory=str(tmp_path)))


@pytest.mark.ranks(2)
def test_wrong_arguments_raise(pool, tmp_path):
    compare(ARGUMENTS, arguments, pool.run(arguments.all_arguments, 2, directory=str(tmp_path)))


@pytest.mark.ranks(2)
def test_mismatched_ranks_raise(pool, tmp_path):
    compare(RANKS, ranks, pool.run(ranks.all_ranks, 2, directory=str(tmp_path)))


@pytest.mark.ranks(2)
def test_change_on_one_rank_raises(pool):
    """Check that the changed rank names its change. The other rank is already in an all-gather."""
    found, other = pool.run(ranks.change_on_one_rank, 2, timeout=60)
    assert other == {}
    words = {
        "recipe": "te_fsdp.forward under a different recipe than before: rank 1 has not called it",
        "frozen": "On this rank: head.weight was frozen.",
        "evaluation": "te_fsdp.forward in evaluation: rank 1 has not called it",
    }
    assert set(found) == set(words) and all(words[what] in found[what] for what in words), found
    assert "On this rank: te.autocast of Float8CurrentScaling instead of no te.autocast." in found["recipe"]


@pytest.mark.ranks(2)
def test_load_of_one_ranks_weights_raises(pool, tmp_path):
    """Check that the other ranks do not get the shard of the rank that saved."""
    (first, _), (text, unchanged) = pool.run(bodies.load_of_one_ranks_weights, 2, directory=str(tmp_path))
    assert first == "" and unchanged
    assert (
        "expected this rank's shard, got the shard of a different rank" in text
        and "Fix: use te_fsdp.checkpoint" in text
    )


@pytest.mark.ranks(2)
def test_same_batch_on_all_ranks_warns(pool):
    """Check one warning of the first rank if all dp_shard ranks read the same batch."""
    (first, told), (second, _) = pool.run(bodies.same_batch_on_all_ranks, 2)
    assert not second and not told
    (text,) = first
    assert "the first batch is the same on all 2 ranks of dp_shard" in text and "meshes.data_rank" in text


@pytest.mark.ranks(2)
def test_evaluation_on_one_rank_raises(pool):
    text, other = pool.run(bodies.evaluation_on_one_rank, 2, timeout=40)
    assert "first forward in evaluation without gradients: rank 1 has not called it" in text and other == ""


@pytest.mark.ranks(2)
def test_correct_scripts_pass(pool):
    for found in pool.run(no_mistakes.all_programs, 2):
        assert found == {make.__name__: True for make in no_mistakes.MEANT}
