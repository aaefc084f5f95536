"""Every sharding strategy on every kind of data-parallel mesh, by value against one process.

By default every pair of factors' values occurs; `--matrix full` runs all combinations, `--matrix subset` those that
4 GPUs can run.
"""

from __future__ import annotations

import pytest
from harness import BodyFailed
from strategies import bodies
from strategies.cases import Case, chosen

#: Cases that share a start of the workers.
TOGETHER = 8


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "cases" in metafunc.fixturenames:
        how = metafunc.config.getoption("--matrix", "covering")
        by_ranks: dict[int, list[Case]] = {}
        for case in chosen("covering" if how == "formats" else how):
            by_ranks.setdefault(case.ranks, []).append(case)
        params = []
        for ranks, cases in sorted(by_ranks.items()):
            for first in range(0, len(cases), TOGETHER):
                several = cases[first : first + TOGETHER]
                name = f"{ranks}ranks-{first // TOGETHER}"
                params.append(pytest.param(several, id=name, marks=pytest.mark.ranks(ranks)))
        metafunc.parametrize("cases", params)


def test_training(pool, cases):
    outcomes = pool.run(bodies.training, cases[0].ranks, cases=[case.kwargs for case in cases])
    for outcome in outcomes:
        assert len(outcome) == len(cases)


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("broken", "case", "words"),
    [
        # Megatron-FSDP's HFSDP adds gradients up instead of averaging them: hidden under Adam, and under clipping.
        ("sum", Case("optim_grads_params", "hfsdp", 1, "plain", "2x2", "AdamW", 1), "norm"),
        ("sum", Case("optim", "none", 3, "microbatch", "dp4", "SGD", 1), "gradient"),
        # Its optim and no_shard strategies, and HSDP, never reduce if the last microbatch is not marked.
        ("unreduced", Case("optim", "none", 3, "plain", "dp4", "SGD", 1), "on one side only"),
        ("unreduced", Case("no_shard", "none", 3, "plain", "dp4", "SGD", 1), "on one side only"),
        ("unreduced", Case("optim_grads_params", "hsdp", 3, "plain", "2x2", "SGD", 1), "on one side only"),
        # Its default corrupts accumulation by reducing what was reduced before.
        ("twice", Case("optim", "none", 3, "plain", "dp4", "SGD", 1), "updated"),
    ],
    ids=lambda value: str(value) if isinstance(value, Case) else None,
)
def test_known_faults_are_seen(pool, broken, case, words):
    with pytest.raises(BodyFailed, match=words):
        pool.run(bodies.training, 4, cases=[case.kwargs], broken=broken)
