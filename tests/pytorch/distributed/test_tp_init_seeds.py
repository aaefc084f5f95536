"""Initial values on ranks of tp or ep. Different parts must not be drawn from equal seeds."""

from __future__ import annotations

import pytest
from parity import tp_init_seeds


def _refused(results: list[tuple[str, str]], *words: str) -> None:
    for kind, text in results:
        assert kind == "InitError", text
        missing = [word for word in (*words, "te_fsdp.materialize", "RNG tracker") if word not in text]
        assert not missing, f"{missing} not in: {text}"


@pytest.mark.ranks(2)
@pytest.mark.parametrize("entry", tp_init_seeds.ENTRIES)
def test_equal_seeds_on_tp_ranks_raise(pool, entry):
    _refused(
        pool.run(tp_init_seeds.error_over_tp, 2, entry=entry, values="drawn"),
        "layernorm_qkv.query_weight (tp ranks 0 and 1)",
    )


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("weights", "dtype"), [("plain", "bfloat16"), ("current", "bfloat16"), ("mxfp8", "bfloat16")]
)
@pytest.mark.parametrize("entry", ["fully_shard", "set_device_mesh"])
def test_equal_seeds_raise_in_every_format(pool, entry, weights, dtype, arch, device_type):
    if weights == "mxfp8" and arch == "9.0":
        pytest.skip("MXFP8 needs Blackwell, or the emulation of one")
    how = {"entry": entry, "weights": weights, "dtype": dtype}
    _refused(pool.run(tp_init_seeds.error_over_tp, 2, values="drawn", **how), "weight (tp ranks 0 and 1)")
    assert pool.run(tp_init_seeds.error_over_tp, 2, values="seeds", **how) == [("", "")] * 2


@pytest.mark.ranks(2)
@pytest.mark.parametrize("entry", ["fully_shard", "set_device_mesh"])
def test_one_equal_weight_raises(pool, entry):
    for kind, text in pool.run(tp_init_seeds.error_over_tp, 2, entry=entry, values="one"):
        assert kind == "InitError" and "self_attention.proj.weight (tp ranks 0 and 1): equal values" in text


@pytest.mark.ranks(2)
@pytest.mark.parametrize("values", ["seeds", "constant", "meant"])
@pytest.mark.parametrize("entry", ["fully_shard", "set_device_mesh"])
def test_correct_initializations_pass(pool, entry, values):
    assert pool.run(tp_init_seeds.error_over_tp, 2, entry=entry, values=values) == [("", "")] * 2


@pytest.mark.ranks(4)
@pytest.mark.parametrize("entry", ["fully_shard", "set_device_mesh"])
def test_equal_seeds_raise_with_data_parallelism(pool, entry):
    axes = {"dp_shard": 2, "tp": 2}
    _refused(pool.run(tp_init_seeds.error_over_tp, 4, entry=entry, values="drawn", axes=axes), "query_weight")
    assert pool.run(tp_init_seeds.error_over_tp, 4, entry=entry, values="seeds", axes=axes) == [("", "")] * 4


@pytest.mark.ranks(2)
def test_equal_seeds_of_experts_raise(pool):
    _refused(
        pool.run(tp_init_seeds.error_over_ep, 2, values="drawn"), "mixture.up.weight0 (ep ranks 0 and 1)"
    )


@pytest.mark.ranks(2)
@pytest.mark.parametrize("values", ["seeds", "constant", "copies"])
def test_correct_experts_pass(pool, values):
    assert pool.run(tp_init_seeds.error_over_ep, 2, values=values) == [("", "")] * 2
