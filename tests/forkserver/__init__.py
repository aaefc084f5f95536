"""Python processes that start at once, forked by a server that has imported torch.

Importing torch takes 1.4 s of CPU time, what FSDP2, DCP and TransformerEngine bring along 2 s more, and some thirty
tests start programs as users do. A path replaces Python in their command lines:

    with interpreter() as python:
        subprocess.run([python, "-m", "te_fsdp.emulation", "script.py"], capture_output=True, cwd=folder)

Such a process has the arguments, environment, folder and streams of its command, a `__main__` of its own, and ends as
Python does. It is `sys.executable` for itself, so that torchrun starts its ranks in the same way. torch and what
`server.PRELOADED` names are in `sys.modules` before it begins, te_fsdp and TransformerEngine are not. A test of what
is imported first, or of a process's memory, takes the real `sys.executable`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

_HERE = Path(__file__).parent
START_TIMEOUT = 300.0


@contextmanager
def interpreter() -> Iterator[str]:
    """Yield a fork server's executable; where there are GPUs, whose state does not survive a fork, Python itself.

    A process that a fork server has forked continues to use that server.
    """
    in_fork = Path(sys.executable).with_name("socket").exists()
    if in_fork or torch.cuda.is_available():
        yield sys.executable
        return
    server = ForkServer()
    try:
        yield server.executable
    finally:
        server.close()


class ForkServer:
    """A server with its own folder, for as long as this process lives or until `close`."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="te_fsdp_forks_")
        launcher = Path(self._folder.name, "python")
        # -I and -S: nothing of PYTHONPATH and site-packages, which would take longer than the fork.
        launcher.write_text(f"#!{sys.executable} -IS\n{(_HERE / 'launcher.py').read_text()}")
        launcher.chmod(0o700)
        self.executable = str(launcher)
        # Children measure coverage themselves (`server.py`), and find modules by their own PYTHONPATH.
        dropped = ("PYTHONPATH", "COVERAGE_PROCESS_START", "COVERAGE_PROCESS_CONFIG")
        environment = {name: value for name, value in os.environ.items() if name not in dropped}
        # But it must import what they would import, for example the same version of torch.
        first = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
        self._process = subprocess.Popen(
            [sys.executable, str(_HERE / "server.py"), self._folder.name, *first],
            stdin=subprocess.PIPE,  # closed with this process, which ends the server
            stdout=subprocess.PIPE,
            env={**environment, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
            start_new_session=True,  # a Ctrl-C is for the processes that were started, not for the server
        )
        assert self._process.stdout is not None
        if self._process.stdout.readline() != b"ready\n":
            self.close()
            raise RuntimeError("the fork server did not start; its output says why")

    def close(self) -> None:
        """End the server, and with it all processes that it has forked."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)
        self._process.stdout.close()
        self._folder.cleanup()
