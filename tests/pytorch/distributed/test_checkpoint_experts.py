"""Checkpoints of experts between meshes.

One tensor has all experts. Every bit of weights and states is compared.

In one process: tests/unit/test_checkpoint_experts.py.
"""

from __future__ import annotations

import pytest
from checkpointing import experts
from checkpointing.experts import Case, Setup
from harness import bodies as harness_bodies

ENVIRONMENT = {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}
SINGLE = {**ENVIRONMENT, "NVTE_GROUPED_LINEAR_SINGLE_PARAM": "1"}


def place(single: bool = False, **axes: int) -> Setup:
    return Setup(tuple(axes.items()), single)


ONE, STOCK = place(), Setup(None)
EP2, EP4, EP2_DP2 = place(ep=2), place(ep=4), place(dp_shard=2, ep=2)
EP2_TP2, DP4, HSDP = place(ep=2, tp=2), place(dp_shard=4), place(dp_replicate=2, ep=2)


def check(results: list[dict], pairs: int) -> None:
    for rank, found in enumerate(results):
        assert len(found) == pairs
        for pair, outcome in found.items():
            assert outcome["wrong"] == [], f"{pair} on rank {rank}"
            assert outcome["tensors"] > 30
            assert outcome["fresh"] > 20, "the control: before the load they differ"
            assert outcome["lr"] == [3e-3, 2e-3], "options go by the names of the parameters"


def skip_without_grouped_kernels(pool, recipe: str = "none") -> None:
    (problem,) = pool.run(harness_bodies.single_grouped_problem, 1, recipe=recipe)
    if problem:
        pytest.skip(problem)


@pytest.fixture
def between(pool, tmp_path, request):
    """Save in one process and on several ranks, load each on another (`--matrix full`: on all others)."""
    everywhere = request.config.getoption("--matrix") == "full"

    def run(
        case: Case, one: list[Setup], several: list[Setup], *, ranks: int = 4, single: bool = False
    ) -> None:
        where = {"case": case, "directory": str(tmp_path), "env": SINGLE if single else ENVIRONMENT}
        if single:
            skip_without_grouped_kernels(pool, case.recipe)
        pool.run(experts.save_on, 1, places=one, **where)
        pool.run(experts.save_on, ranks, places=several, **where)
        sources, steps = [*one, *several], range(1, len(one) + len(several) if everywhere else 2)
        pairs = [
            (sources[(i + k) % len(sources)], to) for i, to in enumerate(several, len(one)) for k in steps
        ]
        check(pool.run(experts.load_on, ranks, pairs=pairs, **where), len(pairs))
        every = 1 if everywhere else len(one)
        pairs = [(source, target) for i, target in enumerate(one) for source in several[i % every :: every]]
        check(pool.run(experts.load_on, 1, pairs=pairs, **where), len(pairs))

    return run


@pytest.mark.ranks(4)
def test_uneven_experts_with_biases_and_missing_states(between):
    """Check seven experts on two and four ranks. One of them has no optimizer state."""
    case = Case(experts=7, bias=True, missing=True)
    between(case, [ONE, STOCK], [EP4, DP4, EP2_DP2, HSDP])


@pytest.mark.ranks(4)
@pytest.mark.parametrize("recipe", ["mxfp8", "delayed"])
def test_quantized_experts(between, recipe):
    """Check bytes, scales, main weights and delayed-scaling state of each expert."""
    four = [EP4, EP2_DP2, EP2_TP2] if recipe == "mxfp8" else [EP4, EP2_DP2]
    between(Case("quantized", recipe), [STOCK], four)


@pytest.mark.ranks(2)
@pytest.mark.arch("9.0")
@pytest.mark.parametrize("recipe", ["block"])
def test_quantized_experts_on_hopper(between, recipe):
    between(Case("quantized", recipe), [STOCK], [EP2, place(dp_shard=2)], ranks=2)


@pytest.mark.ranks(4)
def test_single_parameter_experts_between_forms(between):
    """Check both forms of the module on meshes that shard by experts, rows and columns."""
    case = Case("bf16")
    one = [STOCK, Setup(None, True)]
    four = [place(True, ep=4), EP2_TP2, place(True, ep=2, tp=2), EP2_DP2, place(True, dp_shard=4)]
    between(case, one, four, single=True)


@pytest.mark.covering(
    # Fewer experts than ranks of dp4: shards without rows, and one scale for each expert.
    always=[{"recipe": "current"}],
    strength=0,
)
@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("recipe", "experts", "single", "others"),
    [
        (
            "mxfp8",
            7,
            [{"dp_shard": 4}, {"ep": 4}, {"ep": 2, "tp": 2}, {"dp_replicate": 2, "ep": 2}],
            [EP2_DP2],
        ),
        ("current", 3, [{"dp_shard": 4}, {"dp_shard": 2, "ep": 2}], [EP2_DP2]),
        ("nvfp4", 7, [{"dp_shard": 4}, {"dp_shard": 2, "ep": 2}, {"ep": 2, "tp": 2}], [EP4]),
    ],
)
def test_quantized_single_parameter_experts_between_forms(between, recipe, experts, single, others):
    """Check bytes and scales of each expert in both forms, sharded between experts and within them."""
    four = [place(True, **axes) for axes in single]
    case = Case("quantized", recipe, experts=experts)
    between(case, [STOCK], [four[0], *others, *four[1:]], single=True)


@pytest.mark.covering(strength=0)
@pytest.mark.ranks(4)
@pytest.mark.recipe("mxfp8")
@pytest.mark.parametrize("way", ["into", "out of"])
def test_experts_load_in_a_different_format(pool, tmp_path, way):
    """Check loads through high precision bit for bit against one process, with uneven experts and single parameters."""
    skip_without_grouped_kernels(pool, "mxfp8")
    where = {"directory": str(tmp_path), "env": SINGLE}
    high, low = Case("bf16", "mxfp8", experts=7), Case("quantized", "mxfp8", experts=7)
    saved, loaded = (high, low) if way == "into" else (low, high)
    # Out of a format: from its bytes, since there are no main weights.
    pool.run(experts.save_on, 2, case=saved, places=[EP2], optimizer=way == "into", **where)
    how = {"case": loaded, "source": EP2.name, "optimizer": way == "into", **where}
    pool.run(experts.convert_on, 1, places=[STOCK], **how)
    # Quantized weights of seven experts on four ranks are cut within each, those of ep between them.
    places = (
        [EP4, place(True, dp_shard=4), place(True, ep=4)]
        if way == "into"
        else [EP4, place(True, dp_shard=2, ep=2)]
    )
    for found in pool.run(experts.convert_on, 4, places=places, **how):
        for outcome in found.values():
            assert outcome["wrong"] == [] and outcome["fresh"] > 14
            assert {"mixture.up.weight", "mixture.down.weight"} <= set(outcome["converted"])


@pytest.mark.covering(
    # Experts cut within.
    always=[{"single": True}],
    strength=0,
)
@pytest.mark.ranks(8)
@pytest.mark.parametrize(
    ("case", "single"),
    [(Case("bf16"), False), (Case("quantized", "mxfp8", experts=6), True)],
    ids=["bf16", "mxfp8"],
)
def test_experts_on_eight_ranks(pool, tmp_path, case, single):
    """Load between one parameter per expert and one for all, and in one process. Two ranks shard three experts each."""
    skip_without_grouped_kernels(pool, case.recipe)
    where = {"case": case, "directory": str(tmp_path), "env": SINGLE}
    source, target = (place(form, dp_shard=2, ep=2, tp=2) for form in (single, not single))
    pool.run(experts.save_on, 8, places=[source], **where)
    check(pool.run(experts.load_on, 8, pairs=[(source, target)], **where), 1)
    check(pool.run(experts.load_on, 1, pairs=[(source, STOCK)], **where), 1)


@pytest.mark.covering(strength=1)
@pytest.mark.ranks(4)
@pytest.mark.parametrize(("apart", "single"), [(True, False), (False, False), (False, True)])
def test_plain_dcp_with_global_names(pool, tmp_path, apart, single):
    """te_fsdp.checkpoint.load and DCP read on any mesh the files of get_state_dict and plain DCP on ep.

    torch writes the names in a group as rank 0 has them, and its set_state_dict takes no options for a group whose
    names it does not find. te_fsdp.checkpoint.load goes by the layer.
    """
    if single:
        skip_without_grouped_kernels(pool)
    others = [place(single, ep=4) if apart or single else DP4]
    where = {"directory": str(tmp_path), "env": SINGLE}
    case, source = Case("bf16", apart=apart), place(single, dp_shard=2, ep=2)
    for found in pool.run(experts.plain_dcp, 4, case=case, place=source, others=others, **where):
        for target in others:
            assert found[target.name] == {"wrong": [], "left": {}, "lr": [3e-3, 2e-3]}, target.name
            if not apart:
                assert found[f"{target.name} by DCP"] == {"wrong": [], "lr": [3e-3, 2e-3]}, target.name


@pytest.mark.ranks(2)
def test_local_expert_names_raise(pool, tmp_path):
    """Check experts with local names. DCP keeps one rank's experts silently, te_fsdp.checkpoint.save raises."""
    results = pool.run(experts.local_names, 2, case=Case(), directory=str(tmp_path))
    assert sorted(found["lost"] for found in results) == [False, True], (
        "plain DCP loses the experts of one rank"
    )
    for found in results:
        kind, text = found["refused"]
        assert kind == "CheckpointError" and not found["left"]
        assert "model.weight (rank 1 from rank 0)" in text and "ep_mesh" in text
