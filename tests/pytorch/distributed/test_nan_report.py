"""`report_nan`: the report of gradients that are not finite.

It names the parameter, rank and microbatch before a step or clipping spreads them.
"""

from __future__ import annotations

import pytest
from precision import nan_report

CASES = {
    "each reduced": {"policy": {}},
    "no policy": {},
    "infinity, bf16 wire": {"policy": {"grad_comm_dtype": "bfloat16"}, "value": float("inf")},
    "no_sync": {"context": "no_sync"},
    "clipped": {"policy": {"main_params_dtype": None}, "clip": True},
}


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("axes", "ranks"),
    [({}, 2), ({"dp_replicate": 2}, 2), ({"tp": 2}, 4), ({"dp_shard": 1, "tp": 2}, 2)],
    ids=["dp2", "replicate2", "dp2xtp2", "tp2"],
)
def test_nan_report_names_rank_and_microbatch(pool, axes, ranks):
    cases = CASES if "tp" not in axes else {"each reduced": CASES["each reduced"]}
    control = {"not watched": {"watch": False}}
    for found in pool.run(nan_report.errors_of_one_nan, ranks, cases=cases | control, axes=axes):
        assert found.pop("not watched") == ["", "", "the weights hold NaN"]
        for name, (first, second, weights) in found.items():
            assert first.startswith(
                f"gradients with NaN or infinity: second.weight: rank {nan_report.RANK} "
            ), (
                name,
                first,
            )
            assert f"(microbatch {nan_report.MICROBATCH})" in first and first.count("(microbatch") == 1, (
                name,
                first,
            )
            assert (second, weights) == ("", ""), name


SEVERAL = {
    "optimizer.zero_grad": {},
    "filled with zeros": {"clear": "zeros"},
    "te_fsdp.zero_grad": {"clear": "te_fsdp", "context": "no_sync"},
    "te_fsdp.zero_grad with zeros": {"clear": "te_fsdp zeros", "skip": True},
    "clipped": {"clip": True},
    "given up by the loop": {"skip": True},
    "not sharded": {"exempt": True},
    "not sharded, no_sync": {"exempt": True, "context": "no_sync"},
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("axes", [{}, {"dp_replicate": 2}], ids=["dp2", "replicate2"])
def test_nan_report_names_the_current_step_only(pool, axes):
    """Check that the error names the parameters of this step, not of a discarded one."""
    for found in pool.run(
        nan_report.errors_of_several_nans, 2, cases=SEVERAL | {"control": {"fault": True}}, axes=axes
    ):
        control = found.pop("control")
        assert control[1].count("(microbatch") == 2, control
        for name, errors in found.items():
            for step, (where, error) in enumerate(zip(nan_report.STEPS, errors, strict=True)):
                skipped = SEVERAL[name].get("skip") and step < len(nan_report.STEPS) - 1
                if where is None or skipped:
                    assert error == "", (name, step, error)
                    continue
                rank, number = where
                assert f": rank {rank} (microbatch {number})" in error, (name, step, error)
                assert error.count("(microbatch") == 1, (name, step, error)
