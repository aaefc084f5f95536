"""Distributed test bodies on a pool of worker processes, the same on CPU or GPUs.

On the CPU the workers use gloo and emulated TE, on GPUs NCCL and real TE; small collectives of gloo go through shared
memory (`harness.shared_memory`; not with TE_FSDP_TEST_GLOO=1). Write a *body*, a function at the top level of a test
module (or of a module next to it), and call it through the `pool` fixture. It runs on each rank, in a fresh default
process group, with all generators seeded with 0 and one torch thread:

    import harness

    def body(dp: int, tp: int, recipe: str) -> dict:
        mesh = init_device_mesh(harness.device_type(), (dp, tp), mesh_dim_names=("dp_shard", "tp"))
        model = te.Linear(32, 64, device=harness.device())
        checks = harness.Comparisons()
        for name, parameter in model.named_parameters():
            checks.close(name, parameter.grad, expected[name], rtol=1e-5, why="fp32, 64 terms reordered")
        return checks.require(2)       # plain values or plain tensors; harness.full(dtensor) makes one

    @pytest.mark.ranks(4)                                      # GPUs: skips with "needs 4 GPUs, found 2"
    @pytest.mark.arch("9.0", "10.0")                           # default "10.0"; GPUs: the real one
    @pytest.mark.parametrize("recipe", ["none", "current", "mxfp8"])   # skips with TE's reason
    def test_something(pool, recipe):
        results = pool.run(body, 4, dp=2, tp=2, recipe=recipe)       # list, one entry per rank

    def test_error(pool):
        errors = pool.run_expect_error(bad_body, 2)                  # every rank must raise
        assert errors[0].type_name == "MeshError" and "tp_mesh" in errors[1].message

`pool.run(fn, world_size, *, timeout=120, env=None, init_group=True, seed=0, **kwargs)`; the names before
`kwargs` are reserved. `env` sets variables for this run; `init_group=False` leaves
`dist.init_process_group(backend)` to the body (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT are
set as torchrun does). `pool.run_expect_error` takes the same and returns `RaisedError(type_name, message)`
per rank.

A failing, dying or hanging rank raises `BodyFailed` (an AssertionError) with tracebacks and stacks: a hang
is noticed 15 s after the first failure, or at `timeout`; then the workers are replaced. Between runs
workers keep only imported modules and, on the CPU, DTensor's sharding decisions (`harness.decisions`, without meshes):
process groups, DTensor caches, TE's `FP8GlobalStateManager`, os.environ, the working directory, seeds and torch
defaults are restored. Undo monkeypatches yourself.

Fixtures: `pool`, `arch` ("9.0", "10.0"; the real capability on GPUs), `device_type`. Markers: `ranks(n)` (a
test parameter `world_size` counts as well), `arch(...)`, `gpu` (only on GPUs), `cpu` (only on the CPU),
`recipe(name)` (a test parameter `recipe` counts as well; names: none, delayed, current, block, mxfp8,
nvfp4), `covering(always=[{"recipe": "mxfp8", "mesh": "dp4"}], strength=2, days=0)`: run only the named cases of a
parametrized test, which guard a fault, and a different part of the rest each day (`matrix.rotation`; on the CPU also
the tests of the files in `matrix.rotated`; the header prints the seed, `--matrix-seed N` repeats it, `--matrix full`
runs all). Options, when pytest is started with this folder: `--device cpu|cuda|auto`, `--pool-durations N`. Started
elsewhere: TE_FSDP_TEST_DEVICE. TE_FSDP_TEST_TIMEOUT_SCALE=3 stretches all timeouts on a slow machine. Under torchrun:
`torchrun --nproc-per-node 2 -m harness.torchrun module:function '{"dp": 2}'`.
"""

from __future__ import annotations

from .compare import Comparisons, Difference, assert_bitwise_equal, assert_close, full
from .devices import backend, device, device_type, gpu_ranks
from .pool import RaisedError, WorkerPool
from .report import BodyFailed
from .tp_init import shift_rows_by_rank

__all__ = [
    "BodyFailed",
    "Comparisons",
    "Difference",
    "RaisedError",
    "WorkerPool",
    "assert_close",
    "assert_bitwise_equal",
    "backend",
    "device",
    "device_type",
    "full",
    "gpu_ranks",
    "shift_rows_by_rank",
]
