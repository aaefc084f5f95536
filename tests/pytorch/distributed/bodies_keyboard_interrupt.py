"""Bodies of calls that KeyboardInterrupt ends on one rank, whose script continues."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any
from unittest import mock

import harness
import torch
import torch.distributed as dist
from bodies_mismatched_collective_calls import capture_warnings


def _error(call: Any) -> str:
    import te_fsdp

    try:
        call()
    except (KeyboardInterrupt, MemoryError, te_fsdp.TeFsdpError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _call(collective: str) -> None:
    """Make a collective call whose collective rank 1 does not reach."""
    from te_fsdp.collectives import agreement, rendezvous

    with rendezvous.collective_call("test"):
        if dist.get_rank() == 1:
            raise KeyboardInterrupt
        if collective == "maximum":
            agreement.on_any_rank(False)
        else:
            agreement.gather("value")


def interrupt_within_call(collective: str) -> list[str]:
    """Return the errors of the interrupted call and of the next one."""
    from te_fsdp.collectives import rendezvous

    with mock.patch.object(rendezvous, "ASK_AFTER", 0.3), capture_warnings(timeout=30):
        first = _error(lambda: _call(collective))
        return [first, _error(lambda: rendezvous.collective_call("next").__enter__())]


def interrupt_before_call() -> list[str]:
    """Interrupt a rank that waits for the others. The next call works."""
    from te_fsdp.collectives import rendezvous

    def arrive() -> None:
        with rendezvous.collective_call("test"):
            pass

    with capture_warnings(timeout=30):
        if dist.get_rank() == 1:
            with mock.patch.object(rendezvous.Rendezvous, "_outcome", side_effect=KeyboardInterrupt):
                first = _error(arrive)
        else:
            time.sleep(0.5)
            first = _error(arrive)
        return [first, _error(arrive)]


def interrupt_saving(folder: str, victim: int, *, by_error: bool = False) -> list[str]:
    """Interrupt a rank that writes a checkpoint. Messages of the other ranks have two parts.

    With ``by_error``, the rank runs out of memory between two agreements.
    """
    import transformer_engine.pytorch as te

    import te_fsdp
    from te_fsdp.checkpoint import saving
    from te_fsdp.collectives import rendezvous

    layers = [te.Linear(32, 32, device="meta", params_dtype=torch.float32) for _ in range(12)]
    model = torch.nn.Sequential(*layers)
    te_fsdp.fully_shard(model, te_fsdp.Meshes.build(device_type=harness.device_type()))
    te_fsdp.materialize(model, seed=0)
    with mock.patch.object(rendezvous, "ASK_AFTER", 0.3), capture_warnings(timeout=20):
        path = Path(folder) / "new"
        if dist.get_rank() == victim:
            name, error = (
                ("RankWriter", MemoryError("no memory")) if by_error else ("plan_entries", KeyboardInterrupt)
            )
            with mock.patch.object(saving, name, side_effect=error):
                first = _error(lambda: te_fsdp.checkpoint.save(path, model))
        else:
            first = _error(lambda: te_fsdp.checkpoint.save(path, model))
        return [first, _error(lambda: te_fsdp.checkpoint.save(path, model))]


def interrupt_loading(folder: str, moment: str) -> tuple[list[str], float]:
    """Interrupt a rank that waits for a reply of two parts, or before it sends data that were read once.

    The other moments are errors of rank 1: between two agreements, in the exchange, and at the end.
    """
    import te_fsdp
    from te_fsdp.checkpoint import loading
    from te_fsdp.checkpoint.reading import ReadShare
    from te_fsdp.collectives import agreement, rendezvous

    model = torch.nn.Linear(8, 8)
    te_fsdp.fully_shard(model, te_fsdp.Meshes.build(dp_replicate=2, device_type=harness.device_type()))
    te_fsdp.broadcast_params(model)
    path, began = Path(folder) / "new", time.monotonic()
    te_fsdp.checkpoint.save(path, model, extra={"long": "x" * 2000})
    receive, handler = agreement.RankMessenger._receive, signal.getsignal(signal.SIGINT)
    pending = [signal.SIGINT]

    def interrupted(*args: Any) -> Any:
        received = receive(*args)
        if pending:  # once
            signal.raise_signal(pending.pop())
        return received

    owner, name, stock = {
        "reply": (agreement.RankMessenger, "_receive", interrupted),
        "exchange": (ReadShare, "exchange", lambda *args: signal.raise_signal(signal.SIGINT)),
        "error": (loading, "for_rank", mock.Mock(side_effect=MemoryError("no memory"))),
        "error in the exchange": (ReadShare, "exchange", mock.Mock(side_effect=MemoryError("no memory"))),
        "error at the end": (loading, "decode", mock.Mock(side_effect=MemoryError("no memory"))),
    }[moment]
    with mock.patch.object(rendezvous, "ASK_AFTER", 0.3), capture_warnings(timeout=20):
        if dist.get_rank() == 1:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            with mock.patch.object(owner, name, stock):
                first = _error(lambda: te_fsdp.checkpoint.load(path, model, read="once"))
            signal.signal(signal.SIGINT, handler)
        else:
            first = _error(lambda: te_fsdp.checkpoint.load(path, model, read="once"))
        seconds = time.monotonic() - began
        return [first, _error(lambda: te_fsdp.checkpoint.load(path, model))], seconds
