"""Check that a model's inputs are equal on the ranks of tp."""

from __future__ import annotations

import bodies_inputs as bodies
import pytest

DOORS = ("fully_shard", "set_device_mesh")
DIFFERENT = {
    "integer": "tokens (int64 (4,); tp ranks 0 and 1)",
    "floating": "features (float32 (4, 16); tp ranks 0 and 1)",
    "one value": "features (float32 (4, 16); tp ranks 0 and 1)",
    "mask": "masks['causal'][1] (bool (4, 16); tp ranks 0 and 1)",
    "object": "packed['lengths'] (int64 (3,); tp ranks 0 and 1)",
    "shape": "tokens (int64 (4,) on tp rank 0, int64 (5,) on tp rank 1)",
    "dtype": "tokens (int64 (4,) on tp rank 0, int32 (4,) on tp rank 1)",
    "complex": "rotary (complex64 (4,); tp ranks 0 and 1)",
}
NOTHING = ("", "")


def _refused(results: list[tuple[str, str]], text: str) -> None:
    for kind, got in results:
        assert kind == "InputError", got
        missing = [word for word in (text, "meshes.data_rank", "check_inputs=False") if word not in got]
        assert not missing, f"{missing} not in: {got}"


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("door", "what"),
    [
        *(("fully_shard", what) for what in DIFFERENT),
        *(("set_device_mesh", what) for what in ("integer", "floating")),
    ],
)
def test_different_inputs_are_refused(pool, door, what):
    results = pool.run(bodies.fed, 2, door=door, what=what, dp=1)
    _refused(
        results,
        f"Model.forward: inputs that differ over tp: expected the same on all ranks of a tp group, got "
        f"{DIFFERENT[what]}",
    )


@pytest.mark.ranks(4)
@pytest.mark.parametrize("what", ["integer", "floating"])
def test_seeds_by_global_rank_are_refused(pool, what):
    _refused(pool.run(bodies.fed, 4, door="fully_shard", what=what, dp=2, where="rank"), DIFFERENT[what])


@pytest.mark.ranks(4)
@pytest.mark.parametrize(("door", "what"), [("fully_shard", "shape"), ("set_device_mesh", "floating")])
def test_data_parallel_ranks_have_other_data(pool, door, what):
    assert pool.run(bodies.fed, 4, door=door, what=what, dp=2, where="dp") == [NOTHING] * 4


@pytest.mark.ranks(2)
@pytest.mark.parametrize("what", ["nothing", "rounding"])
@pytest.mark.parametrize("door", DOORS)
def test_equal_inputs_pass(pool, door, what):
    assert pool.run(bodies.fed, 2, door=door, what=what, dp=1) == [NOTHING] * 2


@pytest.mark.ranks(2)
@pytest.mark.parametrize("what", ["integer", "floating"])
@pytest.mark.parametrize("door", DOORS)
def test_the_switch(pool, door, what):
    assert pool.run(bodies.fed, 2, door=door, what=what, dp=1, check_inputs=False) == [NOTHING] * 2


@pytest.mark.ranks(2)
def test_the_outer_switch_counts(pool):
    assert pool.run(bodies.switched_later, 2) == [["", "InputError"]] * 2


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("how", "what", "refused"),
    [
        ("sequence", "floating", False),
        ("sequence", "integer", True),  # nothing says that ids are cut
        ("marked", "floating", False),
        ("marked", "integer", False),
        ("row", "floating", False),
        ("column", "floating", True),
    ],
)
@pytest.mark.parametrize("door", DOORS)
def test_what_is_cut_on_purpose(pool, door, how, what, refused):
    results = pool.run(bodies.cut_on_purpose, 2, door=door, how=how, what=what)
    assert [kind for kind, _ in results] == ["InputError" if refused else ""] * 2, results


@pytest.mark.ranks(2)
@pytest.mark.parametrize("door", DOORS)
def test_new_shapes_are_compared_and_known_ones_are_not(pool, door):
    want = [(1, ""), (0, ""), (1, "InputError"), (1, "InputError"), (1, ""), (1, "InputError")]
    assert pool.run(bodies.again, 2, door=door) == [want] * 2


@pytest.mark.ranks(2)
def test_methods_of_the_root(pool):
    assert pool.run(bodies.method, 2) == [["", "InputError", "InputError"]] * 2


@pytest.mark.ranks(2)
def test_nothing_is_compared_in_backward(pool):
    assert pool.run(bodies.recomputed, 2) == [0, 0]


@pytest.mark.ranks(2)
def test_one_rank_alone_with_new_shapes(pool):
    alone, other = pool.run(bodies.one_rank_alone, 2, timeout=40)
    assert alone[0] == "CollectiveError" and "rank 1 has not called it" in alone[1], alone
    assert "forward with inputs of new shapes" in alone[1]
    assert other == NOTHING


@pytest.mark.ranks(2)
def test_evaluation_on_one_rank(pool):
    """Of a model that is only bound; others meet in a new mode."""
    _refused(pool.run(bodies.modes_differ, 2), "training (True on tp rank 0, False on tp rank 1)")
