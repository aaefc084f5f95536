"""Test handlers that count writes of ``torch._foreach_`` functions while models need them."""

from __future__ import annotations

import gc
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from te_fsdp.upstream.torch_mixed_lists import foreach_writes


class Owner:
    """Stand-in for a model."""


@pytest.fixture
def tensor():
    gc.collect()
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    tensor = DTensor.from_local(torch.ones(4, 4), dist.init_device_mesh("cpu", (2,)), [Shard(0)])
    torch._foreach_mul_([tensor], 1.0)  # removes the handlers of earlier tests' models
    yield tensor
    dist.destroy_process_group()


def handlers():
    return dict(DTensor._op_dispatcher._custom_op_handlers)


def test_foreach_handlers_are_removed_when_unused(tensor):
    writes, owner = foreach_writes(), Owner()
    before, version = handlers(), tensor._version
    writes.count(owner)
    with pytest.raises(RuntimeError):
        torch._foreach_add_([tensor], [torch.ones(3, 3)])
    torch._foreach_mul_([tensor], 2.0)
    assert tensor._version > version
    writes.ignore(owner)
    assert handlers() == before, handlers().keys() ^ before.keys()
    writes.count(owner)
    del owner
    gc.collect()
    torch._foreach_mul_([tensor], 2.0)
    assert handlers() == before, handlers().keys() ^ before.keys()


def test_foreach_handlers_are_thread_safe(tensor):
    """One thread steps while another evaluates a model."""
    writes, owner, before = foreach_writes(), Owner(), handlers()
    stop, errors, interval = threading.Event(), [], sys.getswitchinterval()

    def step():
        try:
            while not stop.is_set():
                torch._foreach_mul_([tensor], 1.0)
        except BaseException as error:
            errors.append(repr(error))

    thread = threading.Thread(target=step)
    sys.setswitchinterval(1e-5)
    try:
        thread.start()
        until = time.monotonic() + 2
        while time.monotonic() < until:
            writes.count(owner)
            writes.ignore(owner)
    finally:
        sys.setswitchinterval(interval)
        stop.set()
        thread.join()
    assert errors == []
    writes.count(owner)
    torch._foreach_mul_([tensor], 1.0)
    writes.ignore(owner)
    assert handlers() == before, handlers().keys() ^ before.keys()
