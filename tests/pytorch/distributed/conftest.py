"""Pytest settings of the distributed tests; `harness` describes how to write one."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

sys.path.insert(
    0, str(Path(__file__).parent)
)  # so that `import harness` works in every import mode of pytest
sys.path.append(str(Path(__file__).parents[3]))  # and `import tests` with another configuration of pytest

from harness import WorkerPool, bodies, devices
from harness.side_by_side import (
    pytest_xdist_auto_num_workers,
    pytest_xdist_make_scheduler,
    received_timings,
    send_timings,
)
from matrix import rotated, rotation

from tests.forkserver import interpreter

__all__ = ["pytest_xdist_auto_num_workers", "pytest_xdist_make_scheduler"]

CPU_RANKS = 8
DEFAULT_ARCHS = ("10.0",)
#: Tests whose cases are a covering of `matrix.definitions`. On the CPU it is spread over days, like those of the mark
#: and of the files of `matrix.rotated`.
COVERINGS = ("test_matrix.py::test_training_on_blackwell", "test_matrix.py::test_training_on_hopper")
_POOLS = pytest.StashKey["Pools"]()


class Pools:
    """The pool in use, started when asked for, and what the device supports by architecture."""

    def __init__(self) -> None:
        self.python = sys.executable
        self.current: WorkerPool | None = None
        self.timings: list = []
        self._support: dict[str, dict[str, tuple[bool, str]]] = {}
        self._single: dict[tuple[str, str], str] = {}

    def get(self, arch: str) -> WorkerPool:
        """Return the pool, whose next runs are on an architecture."""
        if self.current is None:
            ranks = devices.gpu_ranks() if devices.device_type() == "cuda" else CPU_RANKS
            self.current = WorkerPool(ranks, python=self.python)
        self.current.arch = arch
        return self.current

    def support(self, arch: str) -> dict[str, tuple[bool, str]]:
        """Return TE's support of each recipe, queried in a worker because this process never loads TE."""
        pool = self.get(arch)
        if arch not in self._support:
            self._support[arch] = pool.run(bodies.recipe_support, 1, init_group=False)[0]
        return self._support[arch]

    def single_grouped_problem(self, arch: str, recipe: str) -> str:
        """Return why the device cannot train one parameter for all experts, or an empty text."""
        pool = self.get(arch)
        if (arch, recipe) not in self._single:
            self._single[arch, recipe] = pool.run(
                bodies.single_grouped_problem, 1, recipe=recipe, init_group=False
            )[0]
        return self._single[arch, recipe]

    def close(self) -> None:
        """End the workers."""
        if self.current is not None:
            self.timings += self.current.timings
            self.current.close()
            self.current = None


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("te_fsdp distributed tests")
    group.addoption(
        "--device",
        choices=["cpu", "cuda", "auto"],
        default=None,
        help="where distributed tests run (default auto)",
    )
    group.addoption(
        "--nodes",
        type=int,
        default=None,
        help="pretend that this machine's GPUs are this number of nodes: more ranks than GPUs (default 1)",
    )
    group.addoption(
        "--matrix",
        choices=["covering", "formats", "full", "subset"],
        default="covering",
        help="how much of test_matrix.py: every pair of values (CPU: in five days), all formats in all modules, all, "
        "or what 4 GPUs run; full: all cases of tests with the mark `covering` too",
    )
    group.addoption(
        "--matrix-seed",
        type=int,
        default=None,
        help="which cases test_matrix.py and tests with the mark `covering` run (default: today's; the header says it)",
    )
    group.addoption(
        "--pool-durations", type=int, default=5, help="show this number of slowest pool runs (0: none)"
    )


def pytest_configure(config: pytest.Config) -> None:
    wanted = config.getoption("--device", default=None)
    if wanted is not None:
        os.environ[devices.DEVICE_VARIABLE] = wanted
    nodes = config.getoption("--nodes", default=None)
    if nodes is not None:
        os.environ[devices.NODES_VARIABLE] = str(nodes)
    # On GPUs TE multiplies fp32 in TF32, for which no tolerance of these tests makes sense. cuBLAS reads this when a
    # worker, which has this environment, first multiplies.
    os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")
    try:
        devices.choose()
    except ValueError as error:
        raise pytest.UsageError(str(error)) from None
    for line in (
        "ranks(n): the test needs n ranks; skipped where there are fewer GPUs",
        "arch(*names): architectures that the emulation pretends, default 10.0; GPUs have one",
        "recipe(name): skipped, with TE's reason, where the device does not support the recipe",
        "single_grouped: skipped, with TE's reason, where the device cannot train one parameter for all experts",
        "covering(always=[], strength=2, days=0, shift=0): cases that guard a fault, and a part of the others that "
        "rotates from day to day; five days have all pairs of values (strength 1: all values; 0: is one "
        "case; days n: every n-th); all with --matrix full",
        "gpu: runs only on GPUs",
        "cpu: runs only on the CPU",
    ):
        config.addinivalue_line("markers", line)
    config.stash[_POOLS] = Pools()


def pytest_report_header(config: pytest.Config) -> str:
    return (
        f"te_fsdp distributed tests: device {devices.device_type()}, backend {devices.backend()}, "
        f"--matrix-seed {rotation.seed_of(config)}"
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "arch" not in metafunc.fixturenames:
        return
    marker = metafunc.definition.get_closest_marker("arch")
    archs = marker.args if marker else DEFAULT_ARCHS
    if devices.device_type() == "cuda":
        archs = (_gpu_arch(),)
    metafunc.parametrize("arch", archs)


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Generator[None, object, object]:
    """Deselect the cases that `covering` excludes."""
    _check_names(config, items)
    result = yield  # -k and -m choose
    _leave_out(config, items)
    _run_early(config, items)
    return result


def _check_names(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Raise where `covering` names a case that is none: the fault that it guards would be guarded no more.

    GPUs have one architecture, so that cases of the others do not exist there.
    """
    if devices.device_type() != "cpu" or any("[" in asked for asked in config.args):
        return
    for test, cases in _covered(items).items():
        mark = cases[0].get_closest_marker("covering")
        for wanted in mark.kwargs.get("always", ()):
            if not any(rotation.is_named(item.callspec.params, wanted) for item in cases):
                raise pytest.UsageError(f"{test}: `covering` names a case that is none: {wanted}")


def _leave_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep, of tests with the mark `covering`, the cases due today and those requested by their full names."""
    if config.getoption("--matrix", default="covering") == "full":
        return
    left: set[pytest.Item] = set()
    for cases in _covered(items).values():
        mark = cases[0].get_closest_marker("covering")
        parameters = [item.callspec.params for item in cases]
        taken = {
            cases[place]
            for place in rotation.chosen(parameters, **mark.kwargs, seed=rotation.seed_of(config))
        }
        if "shift" in mark.kwargs:  # the mark is of `rotated`
            taken |= {item for item in cases if item.nodeid in rotated.guards()}
        left |= {item for item in cases if item not in taken and not _is_asked_for(config, item)}
    if left:
        items[:] = [item for item in items if item not in left]
        config.hook.pytest_deselected(items=list(left))


def _run_early(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Move the comparison of all results in `harness.decisions` to the front on four days of five.

    It computes again what all earlier tests of its pool needed: 3 CPU seconds at the front, 46 in its place.
    """
    if _is_spread(config) and rotation.seed_of(config) % rotation.COVER_DAYS:
        items.sort(key=lambda item: item.path.name != "test_harness_decisions.py")


def _is_spread(config: pytest.Config) -> bool:
    """Return whether a run has a day's part of the cases that have no mark in their files."""
    return devices.device_type() == "cpu" and config.getoption("--matrix", "covering") == "covering"


def _covered(items: list[pytest.Item]) -> dict[str, list[pytest.Item]]:
    """Return the cases of each test with the mark `covering`."""
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("covering"):
            tests.setdefault(item.nodeid.split("[")[0], []).append(item)
    return tests


def _is_asked_for(config: pytest.Config, item: pytest.Item) -> bool:
    return any("[" in asked and item.nodeid.endswith(asked.lstrip("./")) for asked in config.args)


def pytest_itemcollected(item: pytest.Item) -> None:
    if not _is_spread(item.config) or not hasattr(item, "callspec"):
        return
    test = item.nodeid.split("[")[0]
    if test.endswith(COVERINGS):
        item.add_marker(pytest.mark.covering(days=rotation.COVER_DAYS))
    elif rotated.is_rotated(item.path) and not item.get_closest_marker("covering"):
        shift = rotated.shift_of(test)
        item.add_marker(pytest.mark.covering(days=rotation.COVER_DAYS, shift=shift))


def pytest_runtest_setup(item: pytest.Item) -> None:
    on_gpu = devices.device_type() == "cuda"
    if item.get_closest_marker("gpu") and not on_gpu:
        pytest.skip("needs a GPU with the real TransformerEngine")
    if item.get_closest_marker("cpu") and on_gpu:
        pytest.skip("tests the CPU emulation")
    marker = item.get_closest_marker("ranks")
    needed = max(marker.args[0] if marker else 1, _parameter(item, "world_size", int) or 1)
    if on_gpu and needed > devices.gpu_ranks():
        pytest.skip(f"needs {needed} GPUs, found {devices.gpu_ranks()} (--nodes can pretend more)")


def pytest_sessionfinish(session: pytest.Session) -> None:
    send_timings(session.config, session.config.stash[_POOLS].timings)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node) -> None:
    node.config.stash[_POOLS].timings += received_timings(node)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    pools, wanted = config.stash.get(_POOLS, None), config.getoption("--pool-durations", default=5)
    if pools is None or not pools.timings or not wanted:
        return
    total = sum(timing.seconds for timing in pools.timings)
    terminalreporter.section(f"slowest of {len(pools.timings)} pool runs ({total:.1f} s)")
    for timing in sorted(pools.timings, key=lambda timing: -timing.seconds)[:wanted]:
        terminalreporter.line(
            f"{timing.seconds:7.2f} s  {timing.world_size} ranks  {timing.test or '?'}  {timing.body}"
        )
    files: dict[str, float] = {}
    for timing in pools.timings:
        name = Path((timing.test or "?").split("::")[0]).name
        files[name] = files.get(name, 0.0) + timing.cpu_seconds
    shares = sorted(files.items(), key=lambda item: -item[1])
    terminalreporter.line(
        f"CPU seconds of the ranks, {sum(files.values()):.0f} in all: "
        + ", ".join(f"{name} {seconds:.0f}" for name, seconds in shares)
    )


@pytest.fixture(scope="session")
def python() -> Iterator[str]:
    """Yield a stand-in for `sys.executable` for programs that need torch, with torch imported already."""
    with interpreter() as executable:
        yield executable


@pytest.fixture(scope="session")
def device_type() -> str:
    """Return `"cpu"` or `"cuda"`."""
    return devices.device_type()


@pytest.fixture(scope="session")
def matrix_seed(request: pytest.FixtureRequest) -> int:
    """Return the seed of today's selection; the header prints it, `--matrix-seed` sets it."""
    return rotation.seed_of(request.config)


@pytest.fixture(scope="session")
def _pools(request: pytest.FixtureRequest, python: str) -> Iterator[Pools]:
    pools = request.config.stash[_POOLS]
    pools.python = python
    yield pools
    pools.close()


@pytest.fixture
def pool(request: pytest.FixtureRequest, _pools: Pools, arch: str) -> WorkerPool:
    """Return the worker pool on this test's architecture; skips for a recipe that the device does not support."""
    marker = request.node.get_closest_marker("recipe")
    for recipe in {marker.args[0] if marker else None, _parameter(request.node, "recipe", str)}:
        if recipe in bodies.RECIPES:
            supported, reason = _pools.support(arch)[recipe]
            if not supported:
                pytest.skip(reason)
    if request.node.get_closest_marker("single_grouped"):
        problem = _pools.single_grouped_problem(arch, _parameter(request.node, "recipe", str) or "none")
        if problem:
            pytest.skip(problem)
    return _pools.get(arch)


def _parameter(item: pytest.Item, name: str, kind: type):
    callspec = getattr(item, "callspec", None)
    value = callspec.params.get(name) if callspec else None
    return value if isinstance(value, kind) else None


def _gpu_arch() -> str:
    import torch

    return "{}.{}".format(*torch.cuda.get_device_capability(0))
