"""Say whether the process of another rank lives: each listens on a port that its kernel closes when the process ends.

A rank publishes its address in the store before its first collective call. A rank that waits for another one connects
to that address and keeps the connection. No thread takes part: the kernel answers also while the process is stopped,
or computes for minutes without releasing Python's lock. A refused or reset connection means that the process has
ended. Anything else, such as no route, means nothing, and the rank waits on.
"""

from __future__ import annotations

import errno
import os
import socket
import weakref
from dataclasses import dataclass, field
from typing import Any

#: Seconds that a connection may take to be made.
_PATIENCE = 1.0


@dataclass(eq=False)
class Liveness:
    """What a process keeps for this: its own port, and connections from and to other ranks' ports."""

    listener: socket.socket | None = None
    text: str = ""  #: What other ranks are to know: machine, address and port
    incoming: list[socket.socket] = field(default_factory=list)
    outgoing: dict[str, socket.socket] = field(default_factory=dict)

    def publish(self) -> str:
        """Return what other ranks need to find this one; empty if no port can be had. The first call opens the port."""
        if self.listener is None:
            try:
                family, host = _own_address()
                self.listener = socket.socket(family, socket.SOCK_STREAM)
                self.listener.bind((host, 0))
                self.listener.listen(socket.SOMAXCONN)
                self.listener.setblocking(False)
                self.text = f"{socket.gethostname()} {host} {self.listener.getsockname()[1]}"
            except OSError:
                self.text = ""
            # A child made by os.fork() would keep the port open when this process ends.
            this = weakref.ref(self)
            os.register_at_fork(after_in_child=lambda: _close(this()))
        self._accept()
        return self.text

    def _accept(self) -> None:
        """Take waiting connections off the port's queue, which is short, and drop those that were closed."""
        self.incoming = [one for one in self.incoming if _is_open(one) or one.close()]
        try:
            while self.listener is not None:
                self.incoming.append(self.listener.accept()[0])
                self.incoming[-1].setblocking(False)
        except OSError:
            return

    def has_ended(self, text: str) -> bool:
        """Return whether the process that has published ``text`` has ended for certain. Takes at most a second."""
        if text not in self.outgoing:
            machine, host, port = text.split(" ")
            if host.startswith("127.") and machine != socket.gethostname():
                return False
            try:
                self.outgoing[text] = socket.create_connection((host, int(port)), timeout=_PATIENCE)
                # With a timeout, a read without data would be an error.
                self.outgoing[text].setblocking(False)
            except OSError as error:
                return error.errno in (errno.ECONNREFUSED, errno.ECONNRESET)
        return not _is_open(self.outgoing[text])


def _close(this: Liveness | None) -> None:
    for one in [] if this is None else [this.listener, *this.incoming, *this.outgoing.values()]:
        if one is not None:
            one.close()
    if this is not None:
        this.listener, this.text, this.incoming, this.outgoing = None, "", [], {}


def _is_open(connection: socket.socket) -> bool:
    """Return whether the other end of a connection, which never sends, has not closed it."""
    try:
        return bool(connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
    except (BlockingIOError, InterruptedError):
        return True
    except OSError:
        return False


def _own_address() -> tuple[Any, str]:
    """Return the family and the address by which this machine reaches the master, and thus the other ranks."""
    try:
        found = socket.getaddrinfo(os.environ.get("MASTER_ADDR", ""), 9, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, address = found[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # sends nothing
            return family, probe.getsockname()[0]
    except OSError:
        return socket.AF_INET, "127.0.0.1"
