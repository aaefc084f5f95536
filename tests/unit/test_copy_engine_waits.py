"""Test waits of copy-engine all-gathers, with fake streams."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from te_fsdp.upstream.fsdp2_copy_engine import CopyEngineGathers, _PendingCopy


@pytest.mark.parametrize(
    ("phase", "stays_unsharded"), [("FORWARD", True), ("FORWARD", False), ("PRE_BACKWARD", True)]
)
def test_unsharded_weights_wait_until_peers_have_read_their_shards(phase, stays_unsharded):
    """Bug class: `load_state_dict` after an evaluation writes to a shard that a different rank still copies."""
    memory = torch.empty(1, dtype=torch.uint8)
    peer_memory: Any = SimpleNamespace(parts=[memory], local=memory, barrier=lambda: None)
    gathers = CopyEngineGathers(peer_memory, lambda size: peer_memory, lambda tensor: ())
    waited: list[str] = []
    stream = SimpleNamespace(wait_event=waited.append, record_event=lambda: "now")
    group: Any = SimpleNamespace(
        _all_gather_result=_PendingCopy("own copies have ended"),
        _training_state=SimpleNamespace(name=phase, _name_=phase),
        _to_unsharded=lambda: None,
        comm_ctx=SimpleNamespace(),
        device=SimpleNamespace(index=0),
        device_handle=SimpleNamespace(current_stream=lambda index: stream),
        fsdp_params=[],
        post_forward_mesh_info=None if stays_unsharded else object(),
    )
    gathers._read[id(group)] = "no rank reads"
    gathers.wait_for_unshard(group, lambda: None)
    expected = "no rank reads" if phase == "FORWARD" and stays_unsharded else "own copies have ended"
    assert waited == [expected]
