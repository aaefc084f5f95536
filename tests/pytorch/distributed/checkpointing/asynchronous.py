"""Bodies of asynchronous saves: weights changed during the write, errors, destroyed process groups."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import harness
import torch
import torch.distributed as dist

from checkpointing.bodies import differing, local_state
from checkpointing.mistakes import Small, adam, error_of, shard
from checkpointing.models import Case, Run


@contextmanager
def writing_waits_for(event: threading.Event) -> Iterator[None]:
    """Delay all writes until the event is set."""
    from te_fsdp.checkpoint import planner

    original = planner.RankWriter.blocks

    def late(self: Any) -> Any:
        assert event.wait(60)
        return original(self)

    planner.RankWriter.blocks = late
    try:
        yield
    finally:
        event.set()
        planner.RankWriter.blocks = original


def snapshot(case: Case, axes: dict[str, int], directory: str, *, spoil: bool = False) -> dict[str, Any]:
    """Save in the background, train on before anything is written, load: the state of the time of the call.

    Twice, so that the second save reuses the memory of the first.

    Args:
        case: What is saved.
        axes: The mesh.
        directory: Where checkpoints go.
        spoil: Negative control: the copies are left out.
    """
    import te_fsdp
    from te_fsdp.checkpoint.planner import RankWriter

    run, outcome = Run(case, axes, seed=0), []
    run.steps(2)
    copy = RankWriter.copy
    if spoil:
        RankWriter.copy = lambda self, staging: None
    try:
        for number in (1, 2):
            saved, written = local_state(run), threading.Event()
            with writing_waits_for(written):
                handle = te_fsdp.checkpoint.save(
                    f"{directory}/{number}", run.model, run.optimizer, extra={"n": number}, asynchronous=True
                )
                assert not handle.done() and not handle.wait(0.01)
                losses = run.steps(1)  # collectives of training, while the save runs
                changed = len(differing(saved, local_state(run)))
                written.set()
                path = handle.result()
            assert handle.done() and path == Path(directory, str(number))
            other = Run(case, axes, seed=1)
            other.position = run.position - 1
            extra = te_fsdp.checkpoint.load(path, other.model, other.optimizer, verify=True)
            assert extra == {"n": number}
            wrong = differing(saved, local_state(other))
            losses_again = other.steps(1)
            results = {"wrong": wrong, "tensors": len(saved), "changed": changed, "stall": handle.stall}
            outcome.append({**results, "bytes": handle.bytes, "same_loss": losses_again == losses})
    finally:
        RankWriter.copy = copy
    return {"saves": outcome}


def several_saves(directory: str) -> dict[str, Any]:
    """Check that a second save waits for the first. Its handle raises a failure, or else the next save."""
    import te_fsdp
    from te_fsdp.checkpoint import planner

    model = shard(Small())
    optimizer = adam(model)
    save = te_fsdp.checkpoint.save
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("te_fsdp")
    log.addHandler(handler)
    level = log.level
    log.setLevel(logging.INFO)
    try:
        go = threading.Event()
        with writing_waits_for(go):
            first = save(f"{directory}/1", model, optimizer, asynchronous=True)
            threading.Timer(0.3, go.set).start()
            second = save(f"{directory}/2", model, optimizer, asynchronous=True)
            first_done = first.done()
            second.result()
        original = planner.RankWriter.blocks

        def broken(self: Any) -> Any:
            raise OSError(28, "No space left on device")

        if dist.get_rank() == dist.get_world_size() - 1:
            planner.RankWriter.blocks = broken
        asked = save(f"{directory}/3", model, optimizer, asynchronous=True)
        message = error_of(asked.result)
        unasked = save(f"{directory}/4", model, optimizer, asynchronous=True)
        if dist.get_rank() == 0:  # one rank requests the error: all ranks get it
            error_of(unasked.result)
        unasked.wait()
        planner.RankWriter.blocks = original
        refused = error_of(lambda: save(f"{directory}/5", model, optimizer))
        again = save(f"{directory}/5", model, optimizer)
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
    dist.barrier()
    return {
        "first_done": first_done,
        "stall": second.stall,
        "held_up": [m for m in messages if "save returned after" in m],
        "errors": [m for m in messages if "No space left" in m],
        "told": message,
        "refused": refused,
        "again": again.done(),
        "left": sorted(p.name for p in Path(directory).iterdir()),
    }


def groups_destroyed(directory: str) -> dict[str, Any]:
    """Destroy the process groups while a save runs. It completes on all ranks."""
    import te_fsdp

    dist.init_process_group(harness.backend())
    model = shard(Small())
    optimizer = adam(model)
    expected = [p.to_local().detach().clone() for p in model.parameters()]
    go = threading.Event()
    with writing_waits_for(go):
        handle = te_fsdp.checkpoint.save(f"{directory}/1", model, optimizer, asynchronous=True)
        running = not handle.done()
        dist.destroy_process_group()
        go.set()
        path = handle.result(60)
    te_fsdp.checkpoint.verify(path)
    return {"running": running, "elements": sum(t.numel() for t in expected)}


def out_of_memory(directory: str) -> tuple[str, str]:
    """Run out of memory on one rank. No rank waits for it, and all raise."""
    import te_fsdp
    from te_fsdp.checkpoint.host_memory import Staging

    model = shard(Small())
    original = Staging.copy

    def broken(self: Any, tensors: Any) -> Any:
        raise MemoryError("no host memory")

    if dist.get_rank() == 1:
        Staging.copy = broken  # type: ignore[method-assign]
    try:
        handle = te_fsdp.checkpoint.save(f"{directory}/1", model, asynchronous=True)
    finally:
        Staging.copy = original  # type: ignore[method-assign]
    result = error_of(handle.result)
    dist.barrier()
    assert not list(Path(directory).iterdir())
    return result


def plan_reuse(directory: str) -> dict[str, Any]:
    """Check that later saves reuse the plan, unless a value on any rank has changed."""
    import te_fsdp
    from te_fsdp.checkpoint import PerRank, saving

    model, rank = shard(Small()), dist.get_rank()
    model.register_buffer("ours", torch.ones(3, device=next(model.parameters()).device))
    optimizer, plans, plan = adam(model), [], saving.plan_entries
    saving.plan_entries = lambda *args: plans.append(1) or plan(*args)
    counts, wrong = [], []
    try:
        # A different length on rank 1 only.
        for number, length in enumerate([2, 2, 2 + rank, 2 + rank, 2]):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.to_local().add_(1)
            expected = [p.to_local().detach().clone() for p in model.parameters()]
            own = torch.full((length,), float(number + 10 * rank))
            path = f"{directory}/{number}"
            # Both ways write in one order, though AdamW counts steps on the host where weights are on a GPU.
            options = {"extra": {"own": PerRank(own)}, "asynchronous": bool(number % 2)}
            te_fsdp.checkpoint.save(path, model, optimizer, **options).result()
            counts.append(len(plans))
            other = shard(Small())
            other.register_buffer("ours", torch.zeros_like(model.ours))
            loaded = te_fsdp.checkpoint.load(path, other, adam(other), verify=True)
            results = [p.to_local().detach() for p in other.parameters()]
            same = all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))
            wrong += [] if same and torch.equal(loaded["own"], own) else [number]
        model.ours += rank
        # With the plan of the previous save, then without further entries, which needs a new plan.
        drifted = error_of(lambda: te_fsdp.checkpoint.save(f"{directory}/no", model, optimizer, **options))
        again = error_of(lambda: te_fsdp.checkpoint.save(f"{directory}/no", model, optimizer))
    finally:
        saving.plan_entries = plan
    dist.barrier()
    return {"counts": counts, "wrong": wrong, "drifted": drifted, "again": again}
