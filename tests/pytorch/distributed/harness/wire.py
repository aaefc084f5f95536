"""Messages between the pool and its workers: plain pickles over a socket, tensors always by value."""

from __future__ import annotations

import pickle
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch


def send(connection: Connection, message: Any) -> None:
    """Send one message.

    `Connection.send` is avoided on purpose: torch teaches its pickler to pass tensors as shared-memory file
    descriptors, which die with the sender.
    """
    connection.send_bytes(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))


def receive(connection: Connection) -> Any:
    """Block until one message has arrived. Raises EOFError or OSError when the peer is gone."""
    return pickle.loads(connection.recv_bytes())


def stack_file(run_dir: str, pid: int) -> str:
    """Where the process `pid` writes its Python stacks on SIGUSR1."""
    return str(Path(run_dir) / f"stacks-{pid}.txt")


def by_value(value: Any) -> Any:
    """Copy a result so that it can leave its process: tensors detached, on the CPU, owning their storage.

    Args:
        value: nested dicts, lists, tuples and anything that pickles.

    Raises:
        TypeError: for a DTensor or another tensor subclass; gather it with `full()` first.
    """
    if isinstance(value, torch.Tensor):
        if type(value) not in (torch.Tensor, torch.nn.Parameter):
            raise TypeError(
                f"a body returned a {type(value).__name__}, which means nothing in another process: "
                "return harness.full(tensor) or a plain tensor"
            )
        return value.detach().cpu().clone()
    if isinstance(value, dict):
        return {key: by_value(item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(by_value(item) for item in value))
    if type(value) in (list, tuple, set):
        return type(value)(by_value(item) for item in value)
    return value
