"""Fixtures of the conformance tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from te_fsdp import emulation
from tests.conformance.inputs import Env


@pytest.fixture(scope="module")
def env(request: pytest.FixtureRequest) -> Iterator[Env]:
    """Yield the emulation, as the architecture that the test module names in `ARCH`."""
    try:
        emulation.install_from_env(default="10.0")
    except emulation.EmulationError as error:  # a machine with a GPU, or with the real extension
        pytest.skip(str(error))
    before = "{}.{}".format(*emulation.arch())
    emulation.switch_arch(request.module.ARCH)
    torch.set_num_threads(1)
    yield Env("cpu")
    emulation.switch_arch(before)
