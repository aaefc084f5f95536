"""Fixtures: process groups in which one process simulates one of many ranks, with an emulated TransformerEngine."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from hypothesis import settings
from torch.testing._internal.distributed.fake_pg import FakeStore

from te_fsdp import emulation
from tests.forkserver import interpreter

# The same cases on every machine and in every run: a failure seen once can be seen again. HYPOTHESIS_PROFILE=search
# draws new ones.
# No deadlines: how long a case takes is the machine's affair.
settings.register_profile("search", deadline=None)
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


def start_fake_world(size: int, rank: int = 0) -> None:
    """Simulate rank `rank` of `size` without the other ranks. Collectives return this rank's values at once."""
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)


@pytest.fixture(scope="module", autouse=True)
def small_heap() -> None:
    """Hide imported modules and earlier files' objects from the garbage collector: a load inspects all it has."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def fake_world() -> Iterator[Callable[..., None]]:
    """Start a world, `fake_world(size, rank=0)`; a second call ends the first.

    torch caches meshes by their ranks, beyond the life of a world. A test that runs FSDP2 therefore starts one world
    only; to play all ranks of a mesh, it is one rank in the middle of a large world, and moves the mesh.
    """
    assert not dist.is_initialized(), "an earlier test has left its process group"
    yield start_fake_world
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(scope="session")
def python() -> Iterator[str]:
    """Replace `sys.executable` in commands that need torch, which is already imported there."""
    with interpreter() as executable:
        yield executable


@pytest.fixture(scope="module")
def te() -> Iterator[object]:
    """Yield `transformer_engine.pytorch`, emulated, architecture 10.0.

    A process has one TransformerEngine, so it stays imported for later modules; the architecture is restored.
    """
    try:
        emulation.install_from_env(default="10.0")
    except emulation.EmulationError as error:  # a machine with a GPU, or with the real extension
        pytest.skip(str(error))
    import transformer_engine.pytorch

    torch.set_num_threads(1)
    before = "{}.{}".format(*emulation.arch())
    emulation.switch_arch("10.0")
    yield transformer_engine.pytorch
    emulation.switch_arch(before)


@pytest.fixture
def hopper(te: object) -> Iterator[object]:
    """Yield the same on architecture 9.0."""
    emulation.switch_arch("9.0")
    yield te
    emulation.switch_arch("10.0")
