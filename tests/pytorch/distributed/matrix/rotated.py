"""Test files whose cases rotate although their tests have no mark `covering`. On the CPU alone.

Each parametrized test of these files runs one case in `rotation.COVER_DAYS` a day, at least one, and in addition all
cases that a row of `tests/mutants` names. They are the files in which that saves more than two CPU seconds a run. The
table is here because a test file's digest, by which the ledger of GPU results finds valid results, includes its marks.
"""

from __future__ import annotations

import functools
import re
import zlib
from pathlib import Path

HERE = Path(__file__).parents[1]
MUTANTS = HERE.parents[1] / "mutants"

FILES = frozenset(
    f"test_{name}.py"
    for name in """
    alignment all_calls between_calls calls checkpoint checkpoint_async checkpoint_errors
    checkpoint_experts checkpoint_faults checkpoint_foreign checkpoint_formats checkpoint_read_once checks
    context_parallel copies copy_engine copy_engine_calls doors example example_moe example_vocabulary
    expanded_gradients expert_parallel grad_norm graphed graphed_state grouped head_loss hfsdp
    hfsdp_overlap huggingface_load initialization main_weights megatron_bridge megatron_resume muon
    mxfp8_two_dim nan_report no_shard nvfp4_rows odd_parameters one_scale optimizers out_of_memory
    own_dtensors own_init parity pipeline plain_offload plain_replicated precision quantized
    quantized_memory recipes recomputation reshard_matrix rollout rollout_options set_device_mesh settled
    stacked_arithmetic stale_optimizers strategies tensor_lists tied_quantized unsupported wgrad_fusion
    written_weights
    """.split()
)


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
