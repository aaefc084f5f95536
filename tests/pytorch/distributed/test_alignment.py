"""Quantized weights that do not divide into blocks. They get a different sharding, or raise on all ranks."""

from __future__ import annotations

import pytest
from quantization import alignment, bodies

#: Rows and columns of one scale.
BLOCKS = {"mxfp8": 32, "block": 128, "nvfp4": 16}
FITS = {
    "aligned",
    "aligned tp",
    "rows unfit, columns fit",
    "aligned, torch's",
    "rows unfit, torch's with a placement",
    "aligned tp alone",
}
#: The expected error, or the right result, within this number of seconds; the first case also starts TE.
SECONDS = 10


@pytest.mark.ranks(4)
@pytest.mark.parametrize("recipe", BLOCKS)
def test_alignment_is_accepted_or_raises_on_all_ranks(pool, recipe):
    """Check aligned and uneven weights, fewer rows than ranks and column shards, by te_fsdp, torch and tp alone."""
    results = pool.run(alignment.outcomes, 4, recipe=recipe, block=BLOCKS[recipe])
    for rows in zip(*results, strict=True):
        case = rows[0]["case"]
        texts = {row["text"] for row in rows}
        assert len(texts) == 1, f"{case}: ranks disagree: {texts}"
        assert all(row["seconds"] < SECONDS for row in rows), rows
        if case in FITS:
            assert texts == {""}, (case, texts)
            continue
        (text,) = texts
        assert {row["error"] for row in rows} == {"PlacementError"}, (case, rows)
        for word in (".weight: ", "of tp-local shape", f"{BLOCKS[recipe]}", "Fix: ", "a weight of"):
            assert word in text, (case, word, text)
        assert "use the mesh dp_replicate=" in text or "let te_fsdp.fully_shard choose" in text, (case, text)
        # torch's fully_shard raises after it has sharded some parameters, which stay sharded.
        assert all(row["untouched"] for row in rows) or "torch's" in case, (case, rows)


def check(results: list[dict], notes: dict[str, str]) -> None:
    """Check initial and gathered weights bit for bit, losses within their rounding, and the text of the report."""
    for outcome in results:
        rows = zip(outcome["losses"], outcome["reference"], outcome["tolerances"], strict=True)
        assert all(abs(loss - expected) <= bound * expected for loss, expected, bound in rows), outcome
        assert outcome["losses"][-1] < outcome["losses"][0], "nothing was learned, so nothing was compared"
        assert outcome["gathered"] == 2 * bodies.STEPS
        assert outcome["notes"] == notes
    # Each element of both weights was compared on some rank.
    assert sum(outcome["initial"] for outcome in results) >= 2


#: 16 rows over 5 ranks leave the last one none, 48 rows the last one fewer.
FIVE = {
    "first.weight": "uneven rows: 4 ranks of 4, 1 ranks of 0",
    "second.weight": "uneven rows: 4 ranks of 10, 1 ranks of 8",
}


@pytest.mark.covering(strength=1)
@pytest.mark.ranks(5)
@pytest.mark.parametrize("recipe", ["current", "delayed"])
@pytest.mark.parametrize("reshard", [True, False])
def test_uneven_and_empty_shards(pool, recipe, reshard):
    results = pool.run(alignment.training, 5, recipe=recipe, hidden=48, middle=16, reshard=reshard)
    check(results, FIVE)
    assert [outcome["local"]["first.weight"] for outcome in results] == [(4, 48)] * 4 + [(0, 48)]
    assert [outcome["local"]["second.weight"] for outcome in results] == [(10, 16)] * 4 + [(8, 16)]


@pytest.mark.arch("9.0")
@pytest.mark.ranks(5)
@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_uneven_and_empty_shards_initialized_on_device(pool, recipe):
    """Check the transposes of Hopper's layout."""
    check(pool.run(alignment.training, 5, recipe=recipe, hidden=48, middle=16, meta=False), FIVE)


@pytest.mark.ranks(6)
def test_uneven_shards_with_tp(pool):
    """Check 16 rows per tp rank over 3 FSDP ranks."""
    results = pool.run(alignment.training, 6, recipe="current", hidden=48, middle=32, tp=2)
    check(results, {"first.weight": "uneven rows: 2 ranks of 6, 1 ranks of 4", "second.weight": ""})


def _columns(fmt: str, ranks: int) -> str:
    return f"sharded along dim 1: dim 0 does not divide into {fmt} blocks for {ranks} ranks"


FORMATS = {"mxfp8": "mxfp8", "block": "float8-block", "nvfp4": "nvfp4"}


@pytest.mark.covering(strength=1)
@pytest.mark.ranks(2)
@pytest.mark.parametrize("recipe", BLOCKS)
@pytest.mark.parametrize("meta", [True, False])
def test_column_shards_where_rows_do_not_divide(pool, recipe, meta):
    block = BLOCKS[recipe]
    results = pool.run(alignment.training, 2, recipe=recipe, hidden=4 * block, middle=3 * block, meta=meta)
    check(results, {"first.weight": _columns(FORMATS[recipe], 2), "second.weight": ""})
    assert {outcome["placements"]["first.weight"] for outcome in results} == {"dp_shard:S(1)"}


@pytest.mark.covering(days=2)
@pytest.mark.ranks(4)
@pytest.mark.parametrize(("recipe", "reshard"), [("mxfp8", True), ("mxfp8", False), ("block", True)])
def test_column_shards_of_a_row_parallel_weight(pool, recipe, reshard):
    """Check columns that tp shards first and FSDP2 shards again."""
    sizes = {"hidden": 3 * BLOCKS[recipe], "middle": 8 * BLOCKS[recipe]}
    results = pool.run(alignment.training, 4, recipe=recipe, tp=2, reshard=reshard, **sizes)
    check(results, {"first.weight": "", "second.weight": _columns(FORMATS[recipe], 2)})
    assert results[0]["placements"]["second.weight"] == "dp_shard:_S(1, 2) tp:S(1)"


@pytest.mark.ranks(4)
@pytest.mark.parametrize("recipe", BLOCKS)
def test_an_fsdp_axis_of_size_one(pool, recipe):
    """Check HSDP with one shard per replica, also with tp. Several buffers are gathered from one rank."""
    block = BLOCKS[recipe]
    for options in ({"dp_replicate": 4}, {"dp_replicate": 2, "tp": 2}):
        results = pool.run(
            alignment.training, 4, recipe=recipe, hidden=2 * block, middle=4 * block, **options
        )
        check(results, {"first.weight": "", "second.weight": ""})


@pytest.mark.ranks(2)
@pytest.mark.parametrize("recipe", BLOCKS)
def test_tp_without_fsdp(pool, recipe):
    block = BLOCKS[recipe]
    results = pool.run(alignment.train_with_tp_only, 2, recipe=recipe, hidden=2 * block, middle=4 * block)
    check(results, {"first.weight": "", "second.weight": ""})


@pytest.mark.ranks(2)
def test_unsharded_partial_last_block(pool):
    """Check 320 columns, which are two and a half blocks of float8-block. Rows are sharded."""
    results = pool.run(alignment.training, 2, recipe="block", hidden=320, middle=256)
    check(results, {"first.weight": "", "second.weight": _columns("float8-block", 2)})


@pytest.mark.ranks(5)
def test_negative_control_empty_rank_without_shared_scale(pool):
    """Negative control: the rank without rows reads the gathered bytes with its own scale."""
    errors = pool.run_expect_error(alignment.without_shared_scale, 5)
    assert "first on all ranks" in errors[4].message, errors


@pytest.mark.ranks(4)
@pytest.mark.parametrize("recipe", ["mxfp8", "current", "nvfp4"])
def test_torch_fully_shard_of_weights_on_device(pool, recipe):
    """Check that shards keep the bytes or raise te_fsdp's error. They are never dequantized silently."""
    for outcome in pool.run(alignment.on_the_device, 4, recipe=recipe):
        if recipe == "nvfp4":
            assert outcome["error"] == "PrecisionError" and "use te_fsdp.fully_shard" in outcome["text"]
        else:
            assert outcome == {"error": "", "text": "", "compared": 2}


@pytest.mark.covering(days=2)
@pytest.mark.ranks(5)
@pytest.mark.parametrize(
    ("recipe", "hidden", "middle", "here", "there"),
    [
        ("current", 48, 16, (5, 1), (2, 1)),  # uneven and empty shards to even ones
        ("delayed", 48, 16, (5, 1), (2, 1)),
        ("mxfp8", 128, 96, (2, 1), (1, 1)),  # columns to the full length
        ("mxfp8", 96, 256, (4, 2), (3, 1)),  # columns cut by tp and by FSDP2 to rows
        ("block", 320, 256, (2, 1), (1, 1)),  # a short last block
        (
            "nvfp4",
            64,
            48,
            (2, 1),
            (3, 1),
        ),  # columns of the first, rows of the second; then the other way round
    ],
)
def test_checkpoints_of_uneven_shards(pool, tmp_path, recipe, hidden, middle, here, there):
    """Check logical values and optimizer state bit for bit, on the same mesh and on a different one."""
    shape = {"recipe": recipe, "hidden": hidden, "middle": middle, "directory": str(tmp_path)}
    assert min(pool.run(alignment.saved, here[0], tp=here[1], **shape)) >= 8
    assert min(pool.run(alignment.loaded, there[0], tp=there[1], **shape)) >= 8
