"""Writes to local tensors of views, which have a different version counter. The next step starts from them."""

from __future__ import annotations

import pytest
from quantization import user_writes


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads_params", "torch"])
@pytest.mark.parametrize("way", user_writes.LOCAL_WAYS)
def test_step_uses_writes_to_local_tensors(pool, way, strategy):
    options = {"optimizer": "AdamW", "strategy": strategy, "way": way}
    for found in pool.run(user_writes.trained, 2, recipe="none", **options):
        assert found["written"]
