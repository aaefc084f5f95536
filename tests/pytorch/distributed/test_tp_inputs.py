"""The check that inputs of a model are equal on all tp ranks."""

from __future__ import annotations

import bodies_tp_inputs as bodies
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
def test_different_inputs_on_tp_ranks_raise(pool, door, what):
    results = pool.run(bodies.forward_with_different_inputs, 2, door=door, what=what, dp=1)
    _refused(
        results,
        f"Model.forward: inputs that differ over tp: expected the same on all ranks of a tp group, got "
        f"{DIFFERENT[what]}",
    )


@pytest.mark.ranks(4)
@pytest.mark.parametrize("what", ["integer", "floating"])
def test_inputs_seeded_by_global_rank_raise(pool, what):
    _refused(
        pool.run(bodies.forward_with_different_inputs, 4, door="fully_shard", what=what, dp=2, where="rank"),
        DIFFERENT[what],
    )


@pytest.mark.ranks(4)
@pytest.mark.parametrize(("door", "what"), [("fully_shard", "shape"), ("set_device_mesh", "floating")])
def test_different_inputs_on_data_parallel_ranks_pass(pool, door, what):
    assert (
        pool.run(bodies.forward_with_different_inputs, 4, door=door, what=what, dp=2, where="dp")
        == [NOTHING] * 4
    )


@pytest.mark.ranks(2)
@pytest.mark.parametrize("what", ["nothing", "rounding"])
@pytest.mark.parametrize("door", DOORS)
def test_equal_inputs_pass(pool, door, what):
    assert pool.run(bodies.forward_with_different_inputs, 2, door=door, what=what, dp=1) == [NOTHING] * 2


@pytest.mark.ranks(2)
@pytest.mark.parametrize("what", ["integer", "floating"])
@pytest.mark.parametrize("door", DOORS)
def test_check_inputs_false_disables_the_check(pool, door, what):
    assert (
        pool.run(bodies.forward_with_different_inputs, 2, door=door, what=what, dp=1, check_inputs=False)
        == [NOTHING] * 2
    )


@pytest.mark.ranks(2)
def test_outermost_check_inputs_applies(pool):
    assert pool.run(bodies.check_inputs_of_nested_calls, 2) == [["", "InputError"]] * 2


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("how", "what", "refused"),
    [
        ("sequence", "floating", False),
        ("sequence", "integer", True),  # nothing shows that ids are split
        ("marked", "floating", False),
        ("marked", "integer", False),
        ("row", "floating", False),
        ("column", "floating", True),
    ],
)
@pytest.mark.parametrize("door", DOORS)
def test_sharded_inputs_pass(pool, door, how, what, refused):
    results = pool.run(bodies.sharded_inputs, 2, door=door, how=how, what=what)
    assert [kind for kind, _ in results] == ["InputError" if refused else ""] * 2, results


@pytest.mark.ranks(2)
@pytest.mark.parametrize("door", DOORS)
def test_only_new_input_shapes_are_compared(pool, door):
    want = [(1, ""), (0, ""), (1, "InputError"), (1, "InputError"), (1, ""), (1, "InputError")]
    assert pool.run(bodies.errors_of_several_forwards, 2, door=door) == [want] * 2


@pytest.mark.ranks(2)
def test_registered_methods_of_the_root_are_checked(pool):
    assert pool.run(bodies.registered_method, 2) == [["", "InputError", "InputError"]] * 2


@pytest.mark.ranks(2)
def test_recomputed_forwards_are_not_compared(pool):
    assert pool.run(bodies.recomputed_forward, 2) == [0, 0]


@pytest.mark.ranks(2)
def test_new_shapes_on_one_rank_only_raise(pool):
    alone, other = pool.run(bodies.new_shapes_on_one_rank, 2, timeout=40)
    assert alone[0] == "CollectiveError" and "rank 1 has not called it" in alone[1], alone
    assert "forward with inputs of new shapes" in alone[1]
    assert other == NOTHING


@pytest.mark.ranks(2)
def test_evaluation_mode_on_one_rank_raises(pool):
    """Check a model that is bound without FSDP2. Ranks rendezvous in the first forward of each mode."""
    _refused(pool.run(bodies.different_modes, 2), "training (True on tp rank 0, False on tp rank 1)")
