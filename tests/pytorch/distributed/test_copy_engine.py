"""Weights gathered by device-to-device copies. They have the bits of an NCCL (Gloo) all-gather."""

from __future__ import annotations

import math

import pytest
import torch
from checkpointing.selection import is_full
from harness import assert_bitwise_equal
from harness.shared_memory import GLOO_VARIABLE
from strategies import copy_engine

from te_fsdp.upstream import symmetric_memory as _torch_transport

DP2 = {"dp_shard": 2}
#: Float8-block weights are cut along their columns: dim 0 has no full blocks for two ranks.
CASES = {
    "block": {"recipe": "block", "axes": DP2},
    "mxfp8": {"recipe": "mxfp8", "axes": DP2, "strategy": "optim_grads"},
    "current": {"recipe": "current", "axes": DP2, "prefetch": 2},
    "delayed": {"recipe": "delayed", "axes": DP2},
    "nvfp4": {"recipe": "nvfp4", "axes": DP2},
    "optim": {"recipe": "none", "axes": DP2, "strategy": "optim"},
    "cast": {
        "recipe": "none",
        "axes": DP2,
        "main_params_dtype": torch.float32,
        "param_dtype": torch.bfloat16,
    },
    "dp4": {
        "recipe": "none",
        "axes": {"dp_shard": 4},
        "prefetch": 1,
    },  # ranks without a row of some parameters
    "tp2": {"recipe": "mxfp8", "axes": {"dp_shard": 2, "tp": 2}},
    "hsdp": {"recipe": "current", "axes": {"dp_replicate": 2, "dp_shard": 2}},
}
#: Axes and what `te_fsdp.fully_shard` does across replicas.
MESHES = {
    "dp2": (DP2, "no_shard"),
    "tp2": ({"dp_shard": 2, "tp": 2}, "no_shard"),
    "hsdp": ({"dp_replicate": 2, "dp_shard": 2}, "no_shard"),
    "hfsdp": ({"dp_replicate": 2, "dp_shard": 2}, "optim"),
}
#: HFSDP shards main weights over all data parallel ranks: units keep their weights or gather them in each pass.
STRATEGIES = ["optim", "optim_grads", "optim_grads_params"]


@pytest.fixture(autouse=True)
def _can_copy(request):
    """Skip if ranks on one GPU use NCCL gathers: torch is not set to share memory between them."""
    marker = request.node.get_closest_marker("ranks")
    if marker and 0 < torch.cuda.device_count() < marker.args[0] and not _torch_transport.may_share_a_gpu():
        pytest.skip(
            f"copies need {marker.args[0]} GPUs, found {torch.cuda.device_count()}, or "
            "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1 with --nodes"
        )


def _ranks(case: dict) -> int:
    return math.prod(case["axes"].values())


def _same(found: dict) -> None:
    stock, copies = found["nccl"], found["copy_engine"]
    assert {name for name, _ in copies["transports"].values()} == {"copy_engine"}
    assert {name for name, _ in stock["transports"].values()} == {"nccl"}
    for number, (have, want) in enumerate(zip(copies["losses"], stock["losses"], strict=True)):
        assert_bitwise_equal(f"loss {number}", have, want)
    for (name, have), (other, want) in zip(copies["values"], stock["values"], strict=True):
        assert name == other
        assert_bitwise_equal(name, have, want)


@pytest.mark.ranks(2)
def test_copies_are_bitwise_equal_to_all_gathers(pool):
    """Use two models in turn. Shards are in shared memory until the test moves them."""
    for found in pool.run(copy_engine.training, 2, recipe="none", axes=DP2, models=2):
        _same(found)
        staged = found["copy_engine"]["staged"]
        assert staged[:2] == [0, 0] and staged[2] > 0


@pytest.mark.covering(always=[{"case": "block"}], strength=0)
@pytest.mark.parametrize(
    ("case", "recipe"),  # devices that do not compute in a format skip its cases
    [
        pytest.param(name, case["recipe"], marks=pytest.mark.ranks(_ranks(case)), id=name)
        for name, case in CASES.items()
    ],
)
def test_formats_and_strategies(pool, case, recipe):
    for found in pool.run(copy_engine.training, _ranks(CASES[case]), **CASES[case]):
        _same(found)
        if recipe in ("current", "delayed"):  # their data, too, is in shared memory
            assert found["copy_engine"]["staged"] == [0, 0, 0]


@pytest.mark.covering(strength=0)
@pytest.mark.parametrize(
    "mesh",
    [pytest.param(name, marks=pytest.mark.ranks(math.prod(MESHES[name][0].values()))) for name in MESHES],
)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("recipe", ["none", "delayed", "current", "block", "mxfp8", "nvfp4"])
def test_copy_engine_over_many_steps_equals_nccl(pool, request, recipe, strategy, mesh):
    """Check twenty steps, fewer if only one case runs, for errors that add up and buffers that are reused."""
    axes, outer = MESHES[mesh]
    options = {"axes": axes, "strategy": strategy, "outer": outer, "by_hand": False}
    if recipe == "block" and mesh == "tp2":
        options["hidden"] = 256  # blocks of 128 rows or columns for each of two ranks, of what tp leaves
    steps = 20 if is_full(request.config) else 5
    for found in pool.run(
        copy_engine.training, math.prod(axes.values()), recipe=recipe, steps=steps, **options
    ):
        _same(found)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("recipe", "again"), [("none", []), ("current", []), ("mxfp8", ["layers.2"])]
)  # MXFP8 weights are sent in other bytes for a backward
def test_last_gathered_unit_is_reused_in_backward(pool, recipe, again):
    """Check that backward reuses the last unit, and gathers it again after a change or a step."""
    for found in pool.run(copy_engine.gathered, 2, recipe=recipe):
        units = {when: [name for name in names if name != "waits"] for when, names in found.items()}
        assert units["first"] == units["settled"] == [*again, "layers.1", "layers.0"]
        assert units["stepped"] == ["root", "layers.2", "layers.1", "layers.0"]


@pytest.mark.ranks(2)
def test_memory_released_in_hooks_is_not_overwritten(pool):
    """Check that the next gather waits for readers of the memory that column shards are joined in."""
    for found in pool.run(copy_engine.gathered, 2, recipe="block"):
        settled = found["settled"]
        assert settled[settled.index("layers.2") + 1] == settled[settled.index("layers.1") + 1] == "waits"


@pytest.mark.ranks(2)
@pytest.mark.parametrize("breaks", list(copy_engine.BREAKS))
def test_negative_control_stale_and_early_copies(pool, breaks):
    """Negative control of the tests above."""
    for found in pool.run(copy_engine.training, 2, recipe="none", axes=DP2, breaks=breaks):
        with pytest.raises(AssertionError):
            _same(found)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("when", ["before", "behind"])
def test_late_ranks_read_the_right_shards(pool, when):
    """Check that ranks read no shard before its write, and overwrite none that another rank still reads."""
    for losses in pool.run(copy_engine.losses_with_late_rank, 2, when=when):
        for have, want in zip(losses["copy_engine"], losses["nccl"], strict=True):
            assert_bitwise_equal("loss", have, want)


@pytest.mark.cpu
@pytest.mark.ranks(2)
def test_absent_rank_times_out(pool):
    """Check that the other ranks time out instead of waiting forever."""
    # Gloo's: what workers leave each other in shared memory waits without the group's timeout.
    text, seconds = pool.run(copy_engine.error_of_absent_rank, 2, env={GLOO_VARIABLE: "1"})[0]
    assert text != "went on" and 1 <= seconds < 20, (text, seconds)


@pytest.mark.gpu
@pytest.mark.ranks(2)
@pytest.mark.parametrize("recipe", ["none", "current"])
def test_gathers_use_no_kernels(pool, recipe):
    for names in pool.run(copy_engine.traced, 2, recipe=recipe):
        assert not [name for name in names if "allgather" in name.lower()], names
        # If ranks share one GPU, copies are of a different kind.
        kind = "Memcpy PtoP" if torch.cuda.device_count() > 1 else "Memcpy DtoD"
        assert [name for name in names if name.startswith(kind)], "\n".join(names)
