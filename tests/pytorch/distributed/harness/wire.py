"""Messages of the pool to or from its workers: plain pickles over a socket, tensors always by value."""

from __future__ import annotations

import io
import pickle
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def send(connection: Connection, message: Any) -> None:
    """Send one message.

    `Connection.send` is not used: torch makes its pickler pass tensors as shared-memory file descriptors, which are
    closed with the sender.
    """
    connection.send_bytes(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))


def receive(connection: Connection) -> Any:
    """Block until one message has arrived. Raise EOFError or OSError if the peer has ended."""
    return pickle.loads(connection.recv_bytes())


def stack_file(run_dir: str, pid: int) -> str:
    """Return where the process `pid` writes its Python stacks on SIGUSR1."""
    return str(Path(run_dir) / f"stacks-{pid}.txt")


class _Pickler(pickle.Pickler):
    """Write tensors as bytes: torch's own pickling, a nested file for each, takes ten times as long."""

    def reducer_override(self, obj: Any) -> Any:
        """Return description of a plain tensor."""
        if type(obj) is not torch.Tensor:
            return NotImplemented
        data = obj.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return _tensor, (data, obj.dtype, obj.shape)


def _tensor(data: bytes, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    if not data:  # which `frombuffer` refuses
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).view(shape)


def gather(value: Any) -> list[Any]:
    """Return every rank's value, by rank, tensors on the CPU. Collective over the world, if there is one."""
    if not dist.is_initialized():
        return [value]
    file = io.BytesIO()
    _Pickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    pickled: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(pickled, file.getvalue())
    return [pickle.loads(item) for item in pickled]


def by_value(value: Any) -> Any:
    """Copy a result so that it can leave its process: tensors detached, on the CPU, owning their storage.

    Args:
        value: nested dicts, lists, tuples and anything that pickles.

    Raises:
        TypeError: for a DTensor or a different tensor subclass; gather it with `full()` first.
    """
    if isinstance(value, torch.Tensor):
        if type(value) not in (torch.Tensor, torch.nn.Parameter):
            raise TypeError(
                f"a body returned a {type(value).__name__}, which has no meaning in a different process: "
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
