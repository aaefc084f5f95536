"""Test files whose cases rotate although their tests have no mark `covering`. On the CPU alone.

Each parametrized test of these files runs one in `rotation.COVER_DAYS` of its cases a day, at least one, and all
cases that a row of `tests/mutants` names. They are the files in which that saves more than two CPU seconds a run.
The table is here because the marks would change the test files' digests, by which the ledger of GPU results finds
valid results.
"""

from __future__ import annotations

import functools
import re
import zlib
from pathlib import Path

HERE = Path(__file__).parents[1]
MUTANTS = HERE.parents[1] / "mutants"

_TABLE = """
test_accumulation test_alignment test_check_levels test_checkpoint test_checkpoint_async
test_checkpoint_errors test_checkpoint_experts test_checkpoint_faults test_checkpoint_formats
test_checkpoint_mesh_chain test_checkpoint_optimizers test_checkpoint_read_once test_checkpoint_stock_te
test_checkpoint_strategies test_compile test_compiled_steps test_context_parallel test_copy_engine
test_copy_engine_call_budget test_dcp test_dcp_cpu_offload test_dcp_experts test_dcp_load_on_some_ranks
test_dcp_replicated_weights test_diverging_ranks test_example test_example_moe test_example_vocabulary
test_expanded_gradients test_expert_parallel test_expert_single_parameter test_expert_units
test_frozen_gradients test_grad_norm test_graphed test_graphed_changes test_graphed_microbatches
test_graphed_programs test_graphed_state test_grouped_linear_single_parameter test_hfsdp test_hfsdp_overlap
test_huggingface_load test_init_weights test_initialization test_leaks test_main_weights test_megatron_bridge
test_megatron_resume test_muon test_mxfp8_two_dim test_nan_report test_no_shard test_nvfp4_1d_scaling
test_optimizers test_out_of_memory test_parameter_list_functions test_params_and_grads_between_calls
test_parity test_pipeline test_precision test_python_call_budget test_quantized test_quantized_memory
test_quantized_weight_bytes test_recipes test_recomputation test_reshard_matrix test_rollout
test_rollout_options test_set_device_mesh test_stacked_arithmetic test_stacked_functions test_stacked_parts
test_stacked_writes test_stale_optimizers test_steady_state_steps test_strategies test_te_fsdp_call_budget
test_tied_quantized_weights test_tp_replicated_parameters test_unshardable_parameters test_unsupported
test_unused_parameters test_user_dtensors test_user_meshes_and_state_dicts test_vocab_parallel_loss
test_weight_writes_between_steps test_wgrad_fusion test_writes_after_evaluation
"""
FILES = frozenset(f"{name}.py" for name in re.findall(r"\w+", _TABLE))


def is_rotated(path: Path) -> bool:
    """Return whether a test file is in the table."""
    return path.name in FILES and path.parent == HERE


def shift_of(test: str) -> int:
    """Return a number per test, by which tests with equally many cases run cases at different places on a day.

    Args:
        test: Node id without parameters.
    """
    return zlib.crc32(test.encode())


@functools.cache
def guards() -> frozenset[str]:
    """Return the node ids of the cases that rows of `tests/mutants` name. Each is known to find a fault."""
    texts = [path.read_text(encoding="utf-8") for path in sorted(MUTANTS.glob("*.toml"))]
    return frozenset(name for text in texts for name in re.findall(r'"(tests/[^"\n]+\])"', text))
