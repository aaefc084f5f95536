"""torch's own state dicts of experts.

Rows that two axes divide unevenly are tested, too. Values are compared.
"""

from __future__ import annotations

import pytest
from plain_dcp import experts

ENVIRONMENT = {"NVTE_GROUPED_LINEAR_SINGLE_PARAM": "1"}


@pytest.mark.ranks(4)
@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("sharder", ["torch", "te_fsdp"])
@pytest.mark.parametrize(
    ("kind", "recipe"),
    [
        ("experts", "none"),
        ("experts", "remainders"),
        ("experts", "delayed"),
        ("experts", "mxfp8"),
        ("one parameter", "mxfp8"),
    ],
)
def test_full_state_dicts_have_all_experts(pool, kind, recipe, sharder):
    """Check that ``full_state_dict=True`` has the experts of all ranks, where rank 0 exported its own experts only."""
    pool.arch = "10.0"
    for found in pool.run(experts.exports, 4, env=ENVIRONMENT, kind=kind, recipe=recipe, sharder=sharder):
        rates = [found.pop(f"lr, {use}") for use in ("everywhere", "rank 0")]
        wrong = {use: names for use, names in found.items() if names}
        assert rates == [[0.5], [0.5]] and not wrong, (rates, wrong)


@pytest.mark.ranks(4)
@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("sharder", ["torch", "te_fsdp"])
@pytest.mark.parametrize("recipe", ["none", "delayed", "mxfp8"])
@pytest.mark.parametrize("kind", ["experts", "gated MLP"])
def test_resume_from_dcp_async_save_on_the_same_mesh(pool, tmp_path, kind, recipe, sharder):
    """Check that ``dcp.async_save`` copies all entries and that a group of experts keeps its options.

    DCP writes the names in a group as one rank has them.
    """
    pool.arch = "10.0"
    where = {"kind": kind, "recipe": recipe, "sharder": sharder, "directory": str(tmp_path)}
    for found in pool.run(experts.resumes, 4, **where):
        assert (found.pop("states") > 0) == (recipe == "delayed")
        # Newest amaxes of delayed scaling are those of one rank.
        after = found.pop("after")
        assert after == 0 or recipe == "delayed", found
        assert found == {"wrong": [], "entries": [], "lr": 0.5}


@pytest.mark.ranks(4)
@pytest.mark.parametrize("sharder", ["torch", "te_fsdp"])
def test_delayed_scaling_loads_on_a_different_mesh(pool, tmp_path, sharder):
    """Check that ``dcp.load`` reads the scales and amaxes of each expert. They were skipped without an error."""
    pool.arch = "10.0"
    for found in pool.run(experts.load_on_different_mesh, 4, sharder=sharder, directory=str(tmp_path)):
        assert found.pop("experts") > 8
        controls = [found.pop(name) for name in list(found) if name.startswith("control")]
        assert min(controls) > 0 and len(found) == 3 and not any(found.values()), (controls, found)


@pytest.mark.ranks(4)
def test_full_state_dict_of_uneven_shards(pool):
    """Check ``set_model_state_dict(full_state_dict=True)`` of uneven shards, which ``distribute_tensor`` rejects."""
    found = pool.run(experts.uneven_rows, 4)
    assert {row for one in found for row in one.pop("rows")} == {40, 41}
    assert found == [{"weights": [], "moments": []}] * 4


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("kind", "recipe"), [("experts", "none"), ("one parameter", "mxfp8"), ("one parameter", "current")]
)
def test_plain_directory_of_a_mesh_converts_to_a_checkpoint(pool, tmp_path, kind, recipe):
    """Check quantized experts in one tensor, whose scales are those of each expert, and named optimizer groups."""
    pool.arch = "10.0"
    directory = str(tmp_path)
    first, *others = pool.run(
        experts.converted, 4, env=ENVIRONMENT, kind=kind, recipe=recipe, directory=directory
    )
    assert first == {"codes": [0, 0], "wrong": [], "loaded": []}
    assert others == [{"loaded": []}] * 3
