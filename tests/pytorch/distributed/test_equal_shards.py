"""Ranks that hold other parts of a weight, or other experts, must not have drawn the same numbers."""

from __future__ import annotations

import pytest
from parity import equal_shards


def _refused(results: list[tuple[str, str]], *words: str) -> None:
    for kind, text in results:
        assert kind == "InitError", text
        missing = [word for word in (*words, "te_fsdp.materialize", "RNG tracker") if word not in text]
        assert not missing, f"{missing} not in: {text}"


@pytest.mark.ranks(2)
@pytest.mark.parametrize("entry", equal_shards.ENTRIES)
def test_equal_seeds_are_refused(pool, entry):
    _refused(
        pool.run(equal_shards.tp, 2, entry=entry, values="drawn"),
        "layernorm_qkv.query_weight (tp ranks 0 and 1)",
    )


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("weights", "dtype"), [("plain", "bfloat16"), ("current", "bfloat16"), ("mxfp8", "bfloat16")]
)
@pytest.mark.parametrize("entry", ["fully_shard", "set_device_mesh"])
def test_of_any_format(pool, entry, weights, dtype, arch, device_type):
    if weights == "mxfp8" and arch == "9.0":
        pytest.skip("MXFP8 needs Blackwell, or the emulation of one")
    how = {"entry": entry, "weights": weights, "dtype": dtype}
    _refused(pool.run(equal_shards.tp, 2, values="drawn", **how), "weight (tp ranks 0 and 1)")
    assert pool.run(equal_shards.tp, 2, values="seeds", **how) == [("", "")] * 2


@pytest.mark.ranks(2)
@pytest.mark.parametrize("entry", ["fully_shard", "set_device_mesh"])
def test_one_weight_among_others(pool, entry):
    for kind, text in pool.run(equal_shards.tp, 2, entry=entry, values="one"):
        assert kind == "InitError" and "self_attention.proj.weight (tp ranks 0 and 1): equal values" in text


@pytest.mark.ranks(2)
@pytest.mark.parametrize("values", ["seeds", "constant", "meant"])
@pytest.mark.parametrize("entry", ["fully_shard", "set_device_mesh"])
def test_what_is_right_goes_on(pool, entry, values):
    assert pool.run(equal_shards.tp, 2, entry=entry, values=values) == [("", "")] * 2


@pytest.mark.ranks(4)
@pytest.mark.parametrize("entry", ["fully_shard", "set_device_mesh"])
def test_beside_data_parallelism(pool, entry):
    axes = {"dp_shard": 2, "tp": 2}
    _refused(pool.run(equal_shards.tp, 4, entry=entry, values="drawn", axes=axes), "query_weight")
    assert pool.run(equal_shards.tp, 4, entry=entry, values="seeds", axes=axes) == [("", "")] * 4


@pytest.mark.ranks(2)
def test_equal_experts_are_refused(pool):
    _refused(pool.run(equal_shards.ep, 2, values="drawn"), "mixture.up.weight0 (ep ranks 0 and 1)")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("values", ["seeds", "constant", "copies"])
def test_experts_that_are_right(pool, values):
    assert pool.run(equal_shards.ep, 2, values=values) == [("", "")] * 2
