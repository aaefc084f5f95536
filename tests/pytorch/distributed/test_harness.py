"""The harness itself.

It notices every way in which a rank can fail. Its comparisons can fail.
"""

from __future__ import annotations

import math
import os
import random
import re
import signal
import threading
import time

import harness
import numpy
import pytest
import torch
import torch.distributed as dist
from harness import BodyFailed, Comparisons, WorkerPool, collectives, decisions, pool as pool_module
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._ops import utils


@pytest.fixture(scope="module")
def plain_pool(python):
    """Yield workers without TE: these tests are about processes."""
    ranks = 4 if harness.device_type() == "cpu" else harness.gpu_ranks()
    with WorkerPool(ranks, te=False, python=python) as pool:
        yield pool


@pytest.fixture
def short_grace(monkeypatch):
    monkeypatch.setattr(pool_module, "FAILURE_GRACE", 1.5)


# ---------------------------------------------------------------- bodies


def sum_of_ranks() -> dict:
    value = torch.tensor([float(dist.get_rank())], device=harness.device())
    dist.all_reduce(value)
    return {
        "rank": dist.get_rank(),
        "size": dist.get_world_size(),
        "sum": value.item(),
        "pid": os.getpid(),
        "threads": torch.get_num_threads(),
        "env": (os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["LOCAL_RANK"]),
    }


def fail_alone(failing: int) -> int:
    if dist.get_rank() == failing:
        raise ValueError(f"only rank {failing} saw this")
    dist.barrier()
    return 0


def hang(stuck: int) -> int:
    if dist.get_rank() == stuck:
        time.sleep(600)
    return dist.get_rank()


def die(dying: int) -> int:
    if dist.get_rank() == dying:
        os.kill(os.getpid(), signal.SIGKILL)
    return 0


def raise_on(ranks: list) -> str:
    if dist.get_rank() in ranks:
        raise RuntimeError(f"rank {dist.get_rank()} refuses")
    return "fine"


def raise_no_exception_subclass() -> None:
    raise KeyboardInterrupt("not an Exception")


def draw() -> tuple:
    return torch.rand(2).tolist(), float(numpy.random.rand()), random.random()


def change_process_state() -> bool:
    os.environ["LEFT_BEHIND"] = "1"
    os.chdir("/")
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    return True


def read_process_state() -> tuple:
    return os.environ.get("LEFT_BEHIND"), os.getcwd(), str(torch.get_default_dtype()), torch.is_grad_enabled()


def read_variable(name: str):
    return os.environ.get(name)


def join_by_hand() -> int:
    assert not dist.is_initialized()
    if harness.device_type() == "cuda":
        torch.cuda.set_device(harness.device())
    dist.init_process_group(harness.backend())
    return dist.get_world_size()


def matmul_on_mesh(names: list, shape: list, twice: bool) -> torch.Tensor:
    """Fill DTensor's caches with a mesh, which meshes of other runs that compare equal must not find."""
    mesh = init_device_mesh(harness.device_type(), tuple(shape), mesh_dim_names=tuple(names))
    if twice:  # shifts the numbers of the groups against those of a run without it
        mesh = init_device_mesh(harness.device_type(), tuple(shape), mesh_dim_names=tuple(names))
    placements = [Shard(0), Replicate()][: len(shape)]
    left = torch.arange(24.0, device=harness.device()).view(6, 4)
    right = torch.arange(12.0, device=harness.device()).view(4, 3)
    left_d = distribute_tensor(left, mesh, placements).requires_grad_()
    right_d = distribute_tensor(right, mesh, [Replicate()] * len(shape)).requires_grad_()
    product = left_d @ right_d
    product.sum().backward()
    checks = Comparisons()
    checks.close("product", product, left @ right, rtol=1e-6, why="fp32")
    checks.close("grad", right_d.grad, left.t() @ torch.ones(6, 3, device=left.device), rtol=1e-6, why="fp32")
    checks.require(2)
    return harness.full(product)


def decisions_of_a_matmul(spoil: bool) -> int:
    """Return the number of new sharding decisions; spoilt: the meshes of an earlier run's decisions stay in it."""
    known = DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding_non_cached
    before = known.made
    with pytest.MonkeyPatch.context() as patch:
        if spoil:
            patch.setattr(decisions, "_on", lambda decision, meshes: decision)
        matmul_on_mesh(["a", "b"], [2, 2], twice=spoil)
    return known.made - before


def decisions_as_torch_makes_them() -> int:
    """Compare what is decided of lists, cast and updated tensors with what torch decides; returns of how many."""
    known = DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding_non_cached
    known.known.clear()
    mesh = init_device_mesh(harness.device_type(), (2, 2), mesh_dim_names=("a", "b"))
    held = [
        (Shard(0), Shard(1)),
        (Shard(0), Replicate()),
        (Replicate(), Shard(0)),
        (Replicate(), Replicate()),
    ]
    values = [distribute_tensor(torch.ones(3, 8), mesh, placements) for placements in (*held, *held[::-1])]
    parameters = [torch.nn.Parameter(value) for value in values]
    for parameter in parameters:
        parameter.grad = parameter.detach().to(torch.bfloat16).float()
    for how in ({"foreach": True}, {"fused": True}, {"foreach": False}):
        torch.optim.AdamW(parameters, **how).step()
    torch._foreach_norm(values)
    with pytest.MonkeyPatch.context() as patch:
        expand = utils.expand_to_full_mesh_op_strategy
        patch.setattr(utils, expand.__name__, expand.__wrapped__)
        for schema, decision in known.known.items():
            assert known.decide(schema) == decision, schema
    return len(known.known)


def return_a_dtensor() -> DTensor:
    mesh = init_device_mesh(harness.device_type(), (dist.get_world_size(),))
    return distribute_tensor(torch.ones(2), mesh, [Replicate()])


def gather_uneven() -> dict:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = init_device_mesh(harness.device_type(), (2, 2), mesh_dim_names=("dp_shard", "tp"))
    model = torch.nn.Linear(3, 10, device=harness.device())
    expected = model.weight.detach().clone()
    parallelize_module(model, mesh["tp"], ColwiseParallel())
    fully_shard(model, mesh=mesh["dp_shard"])
    checks = Comparisons()
    checks.bitwise_equal("weight", model.weight, expected)
    return checks.require(1)


# ---------------------------------------------------------------- the pool


@pytest.mark.ranks(4)
def test_results_are_in_rank_order_for_each_world_size(plain_pool):
    seen = {}
    for size in (2, 4, 1, 4, 3):
        results = plain_pool.run(sum_of_ranks, size)
        assert [result["rank"] for result in results] == list(range(size))
        assert {result["size"] for result in results} == {size}
        assert {result["sum"] for result in results} == {size * (size - 1) / 2}
        assert {result["threads"] for result in results} == {1}
        assert [result["env"] for result in results] == [(str(r), str(size), str(r)) for r in range(size)]
        for result in results:
            assert seen.setdefault(result["rank"], result["pid"]) == result["pid"], "a worker was restarted"


@pytest.mark.ranks(4)
def test_failed_and_waiting_ranks_are_reported(plain_pool, short_grace):
    started = time.monotonic()
    with pytest.raises(BodyFailed) as caught:
        plain_pool.run(fail_alone, 4, failing=2)
    text = str(caught.value)
    assert "rank 2: ValueError: only rank 2 saw this" in text
    assert "in fail_alone" in text and "raise ValueError" in text
    assert {rank: kind for rank, (kind, _) in caught.value.answers.items()} == {
        0: "stuck",
        1: "stuck",
        2: "error",
        3: "stuck",
    }
    assert "barrier" in text, "the stacks of the stuck ranks must show where they wait"
    assert time.monotonic() - started < 20
    assert len(plain_pool.run(sum_of_ranks, 4)) == 4


@pytest.mark.ranks(2)
def test_hang_is_reported(plain_pool):
    with pytest.raises(BodyFailed) as caught:
        plain_pool.run(hang, 2, stuck=1, timeout=1.5)
    # Seconds as TE_FSDP_TEST_TIMEOUT_SCALE has stretched them.
    assert re.search(r"rank 1: stuck \(no answer within the run's \d+ s\)", str(caught.value))
    assert "in hang" in str(caught.value)
    assert list(caught.value.answers) == [1]
    assert plain_pool.run(hang, 2, stuck=-1) == [0, 1]


@pytest.mark.ranks(2)
def test_dead_process_is_reported(plain_pool, short_grace):
    with pytest.raises(BodyFailed, match=r"rank 0: the process died \(exit code -9"):
        plain_pool.run(die, 2, dying=0)
    assert plain_pool.run(die, 2, dying=-1) == [0, 0]


@pytest.mark.cpu
@pytest.mark.ranks(2)
def test_ctrl_c_ends_the_run_and_not_the_fork_server(plain_pool):
    """A terminal sends the signal to pytest and the server. Without a server all later tests would fail."""
    plain_pool.run(hang, 2, stuck=-1)
    server = plain_pool._processes._server
    interrupt = threading.Timer(
        0.5, lambda: [os.kill(pid, signal.SIGINT) for pid in (server.pid, os.getpid())]
    )
    interrupt.start()
    with pytest.raises(KeyboardInterrupt):
        plain_pool.run(hang, 2, stuck=1)
    assert plain_pool.run(hang, 2, stuck=-1) == [0, 1]


def test_base_exceptions_are_reported(plain_pool):
    with pytest.raises(BodyFailed, match="KeyboardInterrupt: not an Exception"):
        plain_pool.run(raise_no_exception_subclass, 1)


@pytest.mark.ranks(2)
def test_run_expect_error_returns_the_errors(plain_pool):
    plain_pool.run(sum_of_ranks, 2)
    starts = plain_pool.starts
    errors = plain_pool.run_expect_error(raise_on, 2, ranks=[0, 1])
    assert errors == [("RuntimeError", "rank 0 refuses"), ("RuntimeError", "rank 1 refuses")]
    assert plain_pool.starts == starts, "an expected error costs no restart"
    assert plain_pool.run(raise_on, 2, ranks=[]) == ["fine", "fine"]
    with pytest.raises(BodyFailed, match="must raise on all 2 ranks; it raised on rank 1 and .* on rank 0"):
        plain_pool.run_expect_error(raise_on, 2, ranks=[1])
    with pytest.raises(BodyFailed, match="it raised on no rank"):
        plain_pool.run_expect_error(raise_on, 2, ranks=[])


@pytest.mark.ranks(2)
def test_expected_error_that_leaves_ranks_waiting_fails(plain_pool, short_grace):
    with pytest.raises(BodyFailed, match="stuck"):
        plain_pool.run_expect_error(fail_alone, 2, failing=0)


@pytest.mark.ranks(2)
def test_seeds_are_reset_and_equal_on_all_ranks(plain_pool):
    first, second = plain_pool.run(draw, 2), plain_pool.run(draw, 2)
    assert first[0] == first[1] == second[0] == second[1]
    assert plain_pool.run(draw, 2, seed=1) != first


@pytest.mark.ranks(2)
def test_process_state_is_restored(plain_pool):
    before = plain_pool.run(read_process_state, 2)
    assert all(plain_pool.run(change_process_state, 2))
    assert plain_pool.run(read_process_state, 2) == before
    assert plain_pool.run(read_variable, 2, name="ONE_RUN", env={"ONE_RUN": "x"}) == ["x", "x"]
    assert plain_pool.run(read_variable, 2, name="ONE_RUN") == [None, None]


@pytest.mark.ranks(2)
def test_body_may_create_the_process_group(plain_pool):
    assert plain_pool.run(join_by_hand, 2, init_group=False) == [2, 2]
    assert plain_pool.run(join_by_hand, 2, init_group=False) == [2, 2]


@pytest.mark.parametrize("world_size", [2, 4])
def test_meshes_of_earlier_runs_are_dropped(plain_pool, world_size):
    half = world_size // 2
    for names, shape in (
        (("a", "b"), (half, 2)),
        (("a",), (half,)),
        (("a", "b"), (half, 2)),
        (("a",), (2 * half,)),
    ):
        for twice in (True, False):
            size = math.prod(shape)
            results = plain_pool.run(matmul_on_mesh, size, names=list(names), shape=list(shape), twice=twice)
            assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.cpu
@pytest.mark.ranks(4)
def test_sharding_decisions_are_cached(plain_pool):
    plain_pool.run(decisions_of_a_matmul, 4, spoil=False)
    assert plain_pool.run(decisions_of_a_matmul, 4, spoil=False) == [0] * 4
    with pytest.raises(BodyFailed):  # the control: a group of an earlier run
        plain_pool.run(decisions_of_a_matmul, 4, spoil=True)


@pytest.mark.cpu
@pytest.mark.ranks(4)
def test_cached_sharding_decisions_equal_torch(plain_pool):
    assert min(plain_pool.run(decisions_as_torch_makes_them, 4)) >= 40


@pytest.mark.ranks(4)
def test_full_gathers_strided_and_uneven_shards(plain_pool):
    assert [result["real"] for result in plain_pool.run(gather_uneven, 4)] == [1] * 4


def test_misuse_of_the_pool_raises(plain_pool):
    def local() -> None: ...

    with pytest.raises(TypeError, match="top level of a module"):
        plain_pool.run(local, 1)
    with pytest.raises(BodyFailed, match="return harness.full"):
        plain_pool.run(return_a_dtensor, 1)
    if harness.device_type() == "cpu":
        with pytest.raises(ValueError, match="outside 1..4"):
            plain_pool.run(sum_of_ranks, 5)


# ---------------------------------------------------------------- comparisons


def test_negative_control_assert_bitwise_equal():
    a = torch.tensor([1.0, float("nan"), 0.0])
    assert harness.assert_bitwise_equal("w", a, a.clone()) == (3, 0.0, True)
    other_nan = a.view(torch.int32).clone()
    other_nan[1] += 1
    with pytest.raises(AssertionError, match=r"w: 1 of 3 elements differ in bits; first at \(1,\)"):
        harness.assert_bitwise_equal("w", other_nan.view(torch.float32), a)
    with pytest.raises(AssertionError, match=r"expected 0.0 \(0x00000000\), got -0.0 \(0x80000000\)"):
        harness.assert_bitwise_equal("w", torch.tensor([1.0, float("nan"), -0.0]), a)
    with pytest.raises(AssertionError, match="dtype: expected torch.float32, got torch.float64"):
        harness.assert_bitwise_equal("w", a.double(), a)
    with pytest.raises(AssertionError, match=r"shape: expected \(3,\), got \(3, 1\)"):
        harness.assert_bitwise_equal("w", a[:, None], a)


def test_negative_control_assert_close():
    expected = torch.full((4, 25), 2.0)
    actual = expected.clone()
    actual[1, 2] += 1e-3
    assert harness.assert_close("g", actual, expected, 1e-3, "made so").real
    with pytest.raises(
        AssertionError, match=r"g: .*by norm.*allowed 1.000e-04 \(because\); worst at \(1, 2\)"
    ):
        harness.assert_close("g", actual, expected, 1e-4, "because")
    # one bad element among many hides in the norm: 5e-4 of 2 in one of 100 is 2.5e-5 by norm
    actual[1, 2] = 2.0 + 5e-4
    with pytest.raises(AssertionError, match="2.500e-05 by norm, 2.500e-04 at the worst element"):
        harness.assert_close("g", actual, expected, 1e-4, "because")
    # and a small error everywhere hides from the element bound
    peaked = torch.tensor([100.0, 0.0, 0.0, 0.0])
    with pytest.raises(AssertionError, match="by norm"):
        harness.assert_close("g", peaked + 0.9, peaked, 1e-2, "because")
    with pytest.raises(AssertionError, match=r"got nan at \(0,\)"):
        harness.assert_close("g", torch.tensor([float("nan")]), torch.ones(1), 1.0, "because")
    with pytest.raises(AssertionError, match="by norm"):
        harness.assert_close("g", torch.tensor([1e-30]), torch.zeros(1), 1e-5, "zero must be zero")
    assert not harness.assert_close("g", torch.tensor([1e-9]), torch.zeros(1), 1e-5, "noise", floor=1.0).real
    with pytest.raises(ValueError, match="say where the tolerance"):
        harness.assert_close("g", expected, expected, 1e-5, "")


def test_comparing_nothing_fails():
    checks = Comparisons()
    checks.bitwise_equal("empty", torch.empty(0), torch.empty(0))
    checks.close("zeros", torch.zeros(3), torch.zeros(3), rtol=1e-5, why="exact")
    with pytest.raises(AssertionError, match="at least 1 comparisons .* made 0 .*empty, zeros"):
        checks.require()
    checks.close("ones", torch.ones(3) * 1.25, torch.ones(3), rtol=0.5, why="wide on purpose")
    assert checks.require(1) == {
        "real": 1,
        "vacuous": ["empty", "zeros"],
        "elements": 7 - 1,
        "worst": (0.25, "ones"),
    }


def test_recorded_collectives_leave_process_groups_as_they_were():
    """Check that methods of process groups are restored as methods."""
    before = dict(vars(dist.ProcessGroup))
    with collectives.recorded():
        assert any(method is not before[name] for name, method in vars(dist.ProcessGroup).items())
    assert dict(vars(dist.ProcessGroup)) == before
