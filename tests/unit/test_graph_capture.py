"""Test recording into CUDA graphs, with fake graphs."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed.tensor

from te_fsdp.features import cuda_recorder
from te_fsdp.upstream import torch_dtensor as _torch


class Graph:
    """A CUDA graph."""

    def __init__(self) -> None:
        self.registered: list[Any] = []
        self.id: Any = None

    def register_generator_state(self, generator: Any) -> None:
        self.registered.append(generator)

    def pool(self) -> Any:
        return self.id


class Device:
    """Record of the captures."""

    def __init__(self) -> None:
        self.pools: list[Any] = []
        self.ended: list[Any] = []
        self.graphs: list[list[Any]] = []
        self.failing = False

    @contextlib.contextmanager
    def graph(self, graph: Graph, *, pool: Any = None, **_: Any) -> Iterator[None]:
        graph.id = pool
        self.pools.append(pool)
        self.graphs.append(list(graph.registered))
        yield
        if self.failing:
            self.failing = False
            raise RuntimeError("operation failed due to a previous error during capture")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device, number = Device(), iter(range(1, 100))
    monkeypatch.setattr(torch.cuda, "Stream", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", device.graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, next(number)))
    monkeypatch.setattr(_torch, "end_failed_capture", lambda _, pool: device.ended.append(pool))
    return device


def test_graph_pool_is_reused_while_one_of_its_graphs_exists(device: Device) -> None:
    recorder = cuda_recorder.CudaRecorder(torch.device("cpu"))
    first, _ = recorder.record(lambda: 1)
    second, _ = recorder.record(lambda: 2)
    assert device.pools == [(0, 1), (0, 1)]
    del first
    third, _ = recorder.record(lambda: 3)
    assert device.pools[-1] == (0, 1)
    del second, third
    gc.collect()
    recorder.record(lambda: 4)
    assert device.pools[-1] == (0, 2)


def test_failed_capture_resets_random_generators(device: Device) -> None:
    generator = torch.Generator()
    recorder = cuda_recorder.CudaRecorder(torch.device("cpu"), [generator])
    device.failing = True
    with pytest.raises(RuntimeError, match="previous error during capture"):
        recorder.record(lambda: 1)
    assert device.ended == [(0, 1)]
    # A second, empty capture takes the generators out of the state of the first.
    assert device.pools == [(0, 1), None] and device.graphs == [[generator]] * 2
    recorder.record(lambda: 2)
    assert device.pools[-1] == (0, 2)


def test_exception_of_the_captured_function_is_raised_first(device: Device) -> None:
    def fails() -> None:
        raise ValueError("of the function")

    for ends in (True, False):
        device.failing = not ends
        with pytest.raises(ValueError, match="of the function"):
            cuda_recorder.CudaRecorder(torch.device("cpu")).record(fails)
    assert len(device.ended) == 1
    assert gc.isenabled()


def test_dtensor_support_for_fused_sgd_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not _torch.dtensor_supports("_fused_sgd_.tensor_lr")
    tables = torch.distributed.tensor.DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs
    monkeypatch.setitem(tables, torch.ops.aten._fused_sgd_.tensor_lr, None)
    assert _torch.dtensor_supports("_fused_sgd_.tensor_lr")
