"""Bodies of collective calls that ranks make late, alone or not at all. Timeouts are short. Rank 0 is early."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import harness
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

REPORT_AFTER = 0.2  # instead of 10 s


class LogCapture(logging.Handler):
    """Collect te_fsdp's log records."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@contextmanager
def capture_warnings(timeout: float, report_after: float = REPORT_AFTER) -> Iterator[list[str]]:
    """Set short timeouts and yield the list of warnings."""
    import te_fsdp
    from te_fsdp.collectives import rendezvous

    heard, log = LogCapture(), logging.getLogger("te_fsdp")
    before, rendezvous.REPORT_AFTER = rendezvous.REPORT_AFTER, report_after
    te_fsdp.set_collective_timeout(timeout)
    log.addHandler(heard)
    try:
        yield heard.texts
    finally:
        log.removeHandler(heard)
        rendezvous.REPORT_AFTER = before
        te_fsdp.set_collective_timeout(rendezvous.DEFAULT_TIMEOUT)


def _calls(folder: str) -> dict[str, Callable[[], object]]:
    """Return every public collective call outside the step, prepared on all ranks."""
    import transformer_engine.pytorch as te

    import te_fsdp

    kind = harness.device_type()
    meshes = te_fsdp.Meshes.build(dp_replicate=2, dp_shard=dist.get_world_size() // 2, device_type=kind)
    model = te.Linear(32, 32, device="meta", params_dtype=torch.float32)
    te_fsdp.fully_shard(model, meshes, outer_strategy="optim")
    te_fsdp.materialize(model, seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    whole = te.Linear(32, 32, device="meta")
    bound = te.Linear(32, 32, device="meta")
    tp = init_device_mesh(kind, (dist.get_world_size(),), mesh_dim_names=("tp",))
    te_fsdp.set_device_mesh(bound, tp)
    return {
        "Meshes.build": lambda: te_fsdp.Meshes.build(dp_shard=-1, device_type=kind),
        "Meshes.from_device_mesh": lambda: te_fsdp.Meshes.from_device_mesh(tp),
        "fully_shard": lambda: te_fsdp.fully_shard(whole, meshes),
        "materialize": lambda: te_fsdp.materialize(bound, seed=0),
        "reset_parameters": lambda: bound.reset_parameters(),
        "broadcast_params": lambda: te_fsdp.broadcast_params(model),
        "shard_optimizer": lambda: te_fsdp.shard_optimizer(optimizer),
        "checkpoint.save": lambda: te_fsdp.checkpoint.save(Path(folder, "step-1"), model),
        "checkpoint.load": lambda: te_fsdp.checkpoint.load(Path(folder, "step-0"), model),
        "checkpoint.load_huggingface": lambda: te_fsdp.checkpoint.load_huggingface(folder, model),
        "checkpoint.save_huggingface": lambda: te_fsdp.checkpoint.save_huggingface(folder, model, config={}),
    }


def call_on_rank_0_only(call: str, folder: str) -> dict[str, object]:
    """Call on rank 0 until it times out. The other ranks make the call afterwards and raise at once."""
    from te_fsdp import CollectiveError

    make = _calls(folder)[call]
    dist.barrier()
    with capture_warnings(timeout=1.0) as texts:
        if dist.get_rank():
            time.sleep(2.0)
        try:
            make()
        except CollectiveError as error:
            return {"error": str(error), "warnings": texts}
    return {"error": None, "warnings": texts}


def late_rank(folder: str) -> dict[str, object]:
    """Call on the last rank one second after the first report. The save is complete."""
    import te_fsdp

    make = _calls(folder)["checkpoint.save"]
    dist.barrier()
    with capture_warnings(timeout=60.0) as texts:
        if dist.get_rank() == dist.get_world_size() - 1:
            time.sleep(5 * REPORT_AFTER)
        make().result()
        te_fsdp.checkpoint.verify(Path(folder, "step-1"))
    return {"warnings": texts}


def different_calls(folder: str) -> str:
    """Save on rank 0 while the others load. No rank waits for the timeout."""
    from te_fsdp import CollectiveError

    calls = _calls(folder)
    dist.barrier()
    began = time.monotonic()
    with capture_warnings(timeout=100.0):
        try:
            calls["checkpoint.load" if dist.get_rank() else "checkpoint.save"]()
        except CollectiveError as error:
            assert time.monotonic() - began < 50
            return str(error)
    return ""


def different_calls_before_all_ranks_arrive() -> str:
    """Make different calls on ranks 0 and 1. The last rank, which arrives later, raises too."""
    from te_fsdp import CollectiveError
    from te_fsdp.collectives.rendezvous import collective_call

    rank = dist.get_rank()
    with capture_warnings(timeout=100.0):
        time.sleep(rank * 2 * REPORT_AFTER if rank < 2 else 2.0)
        try:
            with collective_call(f"call_{rank}"):
                pass
        except CollectiveError as error:
            return str(error)
    return ""


def rendezvous_of_subgroups() -> list[str]:
    """Run different numbers of rendezvous in halves of the world, then one of all ranks. None reports an error."""
    from te_fsdp.collectives.rendezvous import collective_call

    mesh = init_device_mesh(harness.device_type(), (2, dist.get_world_size() // 2), mesh_dim_names=("a", "b"))
    # On a loaded machine ranks may be a second late, which is not an error.
    with capture_warnings(timeout=20.0, report_after=10.0) as texts:
        for _ in range(1 + 3 * mesh.get_local_rank("a")):
            with collective_call("half", mesh["b"]):
                pass
        with collective_call("whole", mesh), collective_call("inner"):
            pass  # the inner call waits for no rank: all are here
    return texts


def nested_calls() -> int:
    """Return store keys of nested calls of one set of ranks. A call within a call adds none."""
    from te_fsdp.collectives.rendezvous import collective_call
    from te_fsdp.upstream import torch_dtensor as _torch

    with collective_call("outer"), collective_call("inner"):
        dist.barrier()
        count = _torch.default_store().check(["te_fsdp/calls/world/1/came"])
        dist.barrier()
    return int(count)


def store_keys_after(rounds: int) -> int:
    """Return the store's keys after this number of calls and one that all ranks have completed."""
    from te_fsdp.collectives.rendezvous import collective_call
    from te_fsdp.upstream import torch_dtensor as _torch

    for number in range(rounds):
        with collective_call(f"call_{number % 3}"):
            pass
    dist.barrier()
    count = _torch.default_store().num_keys()
    dist.barrier()
    return count


def call_after_a_failed_call() -> list[str]:
    """Check that the next call works after a failed one."""
    from te_fsdp import CollectiveError
    from te_fsdp.collectives.rendezvous import collective_call

    seen = []
    with capture_warnings(timeout=0.5):
        if dist.get_rank():
            time.sleep(1.5)
        try:
            with collective_call("first"):
                seen.append("first")
        except CollectiveError:
            seen.append("error")
    dist.barrier()
    with capture_warnings(timeout=20.0), collective_call("second"):
        seen.append("second")
    return seen


def restarted_by_torchrun(restarts: str) -> str:
    """Start ranks of which one ends while it waits, and start again with the same store. All make a different call."""
    from te_fsdp import CollectiveError
    from te_fsdp.collectives import rendezvous

    with pytest.MonkeyPatch.context() as patch, capture_warnings(timeout=20.0):
        for name, value in {"USE_AGENT_STORE": "True", "RESTART_COUNT": "0"}.items():
            patch.setenv(f"TORCHELASTIC_{name}", value)
        patch.setenv("GROUP_WORLD_SIZE", "1")
        if dist.get_rank() == 0:
            left = rendezvous.Rendezvous.next("first", (0, 1))
            for key in ("0/came", "0/in/first"):
                left.store.add(key, 1)
            rendezvous._process().jobs.clear()  # as in a new process
        dist.barrier()
        patch.setenv("TORCHELASTIC_RESTART_COUNT", restarts)
        # If both arrive at the same time, one counts the other's call for that of the dead rank and lets both go on.
        time.sleep(0.3 * dist.get_rank())
        try:
            with rendezvous.collective_call("second"):
                return "went on"
        except CollectiveError as error:
            return str(error)


def build_after_a_restart() -> list[str]:
    """Return the error of Meshes.build if it initializes torch.distributed in a rank restarted by torchrun."""
    import te_fsdp

    with capture_warnings(timeout=20.0) as texts:
        te_fsdp.Meshes.build(device_type=harness.device_type())
    return texts


def errors_raised_on_rank_0() -> list[tuple[str, str]]:
    """Return the class and text on this rank for each kind of error of rank 0."""
    from torch.distributed.checkpoint import CheckpointException

    from te_fsdp.collectives.agreement import from_rank_0
    from te_fsdp.errors import OrderError

    results = []
    for error in (OrderError("rows"), KeyError("key"), CheckpointException("plan", {})):

        def fail(error: BaseException = error) -> None:
            assert dist.get_rank() == 0
            raise error

        try:
            from_rank_0(fail)
        except Exception as raised:
            results.append((type(raised).__name__, str(raised)))
    return results
