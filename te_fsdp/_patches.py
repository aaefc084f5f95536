"""What a row of the tables of patches says, and the table for FSDP2 and torch.

That of TransformerEngine is in :mod:`te_fsdp._te_patches`, with what installs it; what this table names is done in
:mod:`te_fsdp._fsdp2_patches` and its neighbours.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Patch:
    """An attribute of another library's class or object that te_fsdp replaces.

    Attributes:
        owner: Whose attribute.
        attribute: Its name.
        why: What te_fsdp's own does besides, or instead.
        shown_by: Test that tells whether it is still needed: that shows the fault on the stock library, or that fails
            without the patch; file and name.
        upstream: How the passage on the fault begins in ``docs/upstream.md``; empty where there is no fault, only no
            public way.
        versions: Versions that need it, of those that te_fsdp supports.
    """

    owner: str
    attribute: str
    why: str
    shown_by: str
    upstream: str = ""
    versions: str = "all"


FSDP2 = (
    Patch(
        "`FSDPParamGroup`",
        "post_backward",
        "calls what te_fsdp does before and after a reduction: zeros for unused parameters (torch before 2.13),"
        " one dtype for gradients that are reduced together (before 2.15), early averages and unaveraged "
        "gradients of HFSDP",
        "test_no_shard.py::test_parameters_that_other_ranks_use",
        '- FSDP2 asserts "uniform gradient dtype"',
    ),
    Patch(
        "`FSDPParamGroup`",
        "_init_mp_dtypes",
        "keeps sharded gradients in a dtype of their own",
        "test_precision.py::test_main_weights_of_the_optimizer_take_fp32_gradients",
        versions="torch 2.11 to 2.14",
    ),
    Patch(
        "`FSDPParam`",
        "to_sharded_dtensor",
        "gives such gradients a spec that says their dtype",
        "test_precision.py::test_main_weights_of_the_optimizer_take_fp32_gradients",
        "- Sharded gradients of another dtype",
        versions="torch 2.11 to 2.14",
    ),
    Patch(
        "`FSDPParam`",
        "reset_sharded_param",
        "makes no flat, dequantized copy of a quantized shard",
        "test_quantized_memory.py::test_what_is_kept_without_the_savings",
        "- `view(-1)` of block formats dequantizes",
    ),
    Patch(
        "`FSDPParam`",
        "shard_mesh",
        "is kept, and not sliced anew from the mesh of HSDP at every gather",
        "test_quantized.py::test_a_settled_step_of_hsdp_slices_no_mesh",
        "- `FSDPParam.shard_mesh` is a property",
        versions="torch 2.11 and 2.12",
    ),
    Patch(
        "`FSDPParam`",
        "init_all_gather_outputs, free_unsharded_param",
        "uses the memory of a shard that is whole for the gathered parameter, over a shard axis of size 1",
        "test_whole_shards.py::test_no_copy",
    ),
    Patch(
        "`FSDPParamGroup`",
        "unshard, wait_for_unshard, _to_sharded",
        "gathers by copies into the memory that kernels read, where `transport` is `copy_engine` (`_fsdp2_copies.py`)",
        "test_copy_engine.py::test_bits",
    ),
    Patch(
        "`FSDPParam`",
        "free_unsharded_param",
        "leaves it to `_to_sharded` there when gathered weights are freed",
        "test_copy_engine.py::test_bits",
    ),
    Patch(
        "`FSDPParamGroup`",
        "mesh_info",
        "names a process group of te_fsdp's for the all-reduce of HSDP, where FSDP2 takes none",
        "test_precision.py::test_values_and_bytes",
    ),
    Patch(
        "model",
        "_apply",
        "carries what hangs on parameters over to those that `to`, `float` and their like put in their place",
        "test_patches.py::test_apply_loses_attributes",
    ),
    Patch(
        "module `_fsdp_param`, during `te_fsdp.fully_shard`",
        "_chunk_with_empty",
        "cuts a parameter into the pieces that FSDP2 looks at, not into one for each rank",
        "test_patches.py::test_pieces_of_all_ranks",
        "- FSDP2 cuts every parameter into as many tensors",
    ),
)


def markdown(patches: Iterable[Patch]) -> str:
    """A table of patches as ``docs/upstream.md`` has it."""
    lines = ["| whose | attribute | what for | needed by | shown by |", "| --- | --- | --- | --- | --- |"]
    for patch in patches:
        lines.append(
            f"| {patch.owner} | `{patch.attribute}` | {patch.why} | {patch.versions} | `{patch.shown_by}` |"
        )
    return "\n".join(lines)
