"""torch.compile around an optimizer step.

Functions of te_fsdp between two backwards are compiled, too.
"""

from __future__ import annotations

import pytest
import torch
from strategies import compiled_steps

#: Dynamo of torch 2.11 cannot make a fake tensor of a DTensor that is a view of a buffer of one dim (2.13 can).
TRACES_VIEWS = pytest.mark.skipif(
    torch.torch_version.TorchVersion(torch.__version__) < (2, 13), reason="a fault of torch before 2.13"
)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("axes", "way", "optimizer", "dtype"),
    [
        pytest.param({}, "step", "SGD", "float32", marks=TRACES_VIEWS),
        ({"tp": 2}, "update", "SGD", "float32"),
        ({}, "update", "SGD", "bfloat16"),
        pytest.param({}, "step", "FusedAdam", "bfloat16", marks=TRACES_VIEWS),
    ],
    ids=["dp", "tp", "main_weights", "fused_adam"],
)
def test_compiled_update_is_bitwise_equal(pool, axes, way, optimizer, dtype):
    given = {"axes": axes, "way": way, "optimizer": optimizer, "dtype": dtype}
    assert min(pool.run(compiled_steps.updated, 2, **given, timeout=200)) == 14
