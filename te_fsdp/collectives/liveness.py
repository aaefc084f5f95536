"""Detection of ranks whose process has ended."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import weakref
from dataclasses import dataclass, field

#: Timeout of a connection attempt in seconds.
_PATIENCE = 1.0


# [Note: liveness] Each rank listens on a port, which the kernel closes when the process ends. The rank publishes its
# address in the store before its first collective call. A waiting rank connects to that address and keeps the
# connection. No thread is needed: the kernel answers even while the process is stopped, or while it computes without
# releasing the GIL. A refused or reset connection means that the process has ended. On any other error, such as a
# missing route, the rank continues to wait.
@dataclass(eq=False)
class Liveness:
    """Listening port of this process, with its connections from and to the ports of other ranks."""

    listener: socket.socket | None = None
    text: str = ""  #: Published address: machine, host and port
    incoming: list[socket.socket] = field(default_factory=list)
    outgoing: dict[str, socket.socket] = field(default_factory=dict)

    def publish(self) -> str:
        """Return the address for other ranks, empty without a free port. Open the port on the first call."""
        if self.listener is None:
            try:
                # Without a route to the master, other processes of this machine can still connect.
                family, host = socket.AF_INET, "127.0.0.1"
                with contextlib.suppress(OSError):
                    master = os.environ.get("MASTER_ADDR", "")
                    found = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
                    with socket.socket(*found[:3]) as probe:
                        probe.connect(found[4])  # sends nothing
                        family, host = found[0], probe.getsockname()[0]
                self.listener = socket.socket(family, socket.SOCK_STREAM)
                self.listener.bind((host, 0))
                self.listener.listen(socket.SOMAXCONN)
                self.listener.setblocking(False)
                self.text = f"{socket.gethostname()} {host} {self.listener.getsockname()[1]}"
            except OSError:
                self.text = ""
            # A child process created by os.fork() would keep the port open after this process ends.
            this = weakref.ref(self)
            os.register_at_fork(after_in_child=lambda: _close(this()))
        # Accept pending connections, since the port's queue is short, and drop closed ones.
        self.incoming = [one for one in self.incoming if _is_open(one) or one.close()]
        with contextlib.suppress(OSError):  # raised when none is pending
            while self.listener is not None:
                self.incoming.append(self.listener.accept()[0])
                self.incoming[-1].setblocking(False)
        return self.text

    def has_ended(self, text: str) -> bool:
        """Return whether the process that published ``text`` has certainly ended. Takes at most one second."""
        if text not in self.outgoing:
            machine, host, port = text.split(" ")
            if host.startswith("127.") and machine != socket.gethostname():
                return False
            try:
                self.outgoing[text] = socket.create_connection((host, int(port)), timeout=_PATIENCE)
                # With a timeout, reading without available data would raise an error.
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
    """Return whether the peer has kept the connection open. Peers never send data."""
    try:
        return bool(connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
    except (BlockingIOError, InterruptedError):
        return True
    except OSError:
        return False
