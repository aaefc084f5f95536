"""All-gathers of some of a unit's parameters that no plan of an earlier all-gather covers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState

from te_fsdp.upstream import fsdp2_gather


def test_records_along_another_dim_use_fsdp2():
    """A plan of one record along dim 0 does not apply to one record along dim 1."""
    first, second = (
        SimpleNamespace(_unsharded_param=None, fsdp_placement=SimpleNamespace(dim=dim), offload_to_cpu=False)
        for dim in (0, 1)
    )
    group: Any = SimpleNamespace(
        _all_gather_result=None,
        _sharded_state=ShardedState.SHARDED,
        _training_state=SimpleNamespace(_name_="FORWARD"),
        post_forward_mesh_info=None,
        fsdp_params=[second],
        _all_gather_process_group=None,
        _reshard_after_forward_event=None,
        comm_ctx=SimpleNamespace(all_gather_stream=None),
        _all_gather_output_fn=fsdp2_gather._STOCK_COPY_OUT,
    )
    calls: list[bool] = []
    plan: Any = SimpleNamespace(records=[first])
    fsdp2_gather._unshard(group, calls.append, {(False, True, 1): plan})
    assert calls == [False]
