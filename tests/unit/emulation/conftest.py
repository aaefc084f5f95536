"""Installation of the emulation for this folder's tests; tests with the fixture ``arch`` run on both."""

import pytest
import torch

from te_fsdp import emulation
from te_fsdp.emulation import _state

try:
    emulation.install_from_env(default="10.0")
    REFUSED = None
except emulation.EmulationError as error:  # a machine with a GPU, or with the real extension
    REFUSED = str(error)


def pytest_collection_modifyitems(items):
    """Skip this folder with a reason if the emulation cannot be installed."""
    if REFUSED is not None:
        for item in items:
            if "emulation" in item.path.parts:
                item.add_marker(pytest.mark.skip(reason=REFUSED))


@pytest.fixture(autouse=True)
def _one_thread_and_same_arch():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    before = _state.arch_name()
    yield
    if before is not None:
        emulation.switch_arch(before)


@pytest.fixture(params=["9.0", "10.0"])
def arch(request):
    """Name of the architecture that the test runs on."""
    emulation.switch_arch(request.param)
    return request.param


@pytest.fixture
def te(arch):
    """Return ``transformer_engine.pytorch`` on the architecture of ``arch``."""
    import transformer_engine.pytorch

    return transformer_engine.pytorch
