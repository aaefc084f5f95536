"""All-gathers that FSDP2 frees unused at the end of a backward."""

from types import SimpleNamespace
from unittest import mock

from te_fsdp.upstream import fsdp2_unused


def test_current_stream_waits_for_an_unused_gather():
    """FSDP2's own wait does nothing on a GPU; tests/pytorch/distributed/test_repeated_gathers.py trains there."""
    calls = mock.Mock()
    gather = SimpleNamespace(all_gather_event="gathered")
    handle = SimpleNamespace(current_stream=lambda index: calls)
    device = SimpleNamespace(index=0)
    for pending in (gather, None, SimpleNamespace(all_gather_event=None)):
        group = SimpleNamespace(
            _all_gather_result=pending, _post_reduce_event=None, device_handle=handle, device=device
        )
        fsdp2_unused._finalize(group, SimpleNamespace(undecided={}), calls.stock)
    assert calls.mock_calls == [mock.call.wait_event("gathered"), *[mock.call.stock()] * 3]
