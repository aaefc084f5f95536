"""Detection of other ranks' processes that have ended."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

#: Most seconds to wait for new connections in one check.
_PATIENCE = 0.2


class _State(Enum):
    """State of a connection to another rank's port."""

    OPEN = auto()
    CLOSED = auto()  # by the other process, or by the kernel as it ended
    REFUSED = auto()  # no process listens, or a firewall rejects
    UNKNOWN = auto()  # not connected yet, or unreachable


# [Note: liveness] Each rank listens on a port, which the kernel closes when the process ends. The rank publishes its
# address in the store before its first collective call. A waiting rank connects to that address and keeps the
# connection. No thread is needed: the kernel answers even while the process is stopped, or while it computes without
# releasing the GIL.
#
# A closed connection means that the process has ended. A refused one means so on this machine only, or on a machine
# that this rank has reached before: firewalls refuse connections, too. Therefore each rank connects to one rank of
# each other machine in the first call, in which all are alive. In all other cases, such as a missing route, the rank
# continues to wait.
@dataclass(eq=False)
class Liveness:
    """Listening port of this process, with its connections from and to the ports of other ranks."""

    listener: socket.socket | None = None
    text: str = ""  #: Published address: machine, host and port
    incoming: list[socket.socket] = field(default_factory=list)
    outgoing: dict[str, socket.socket] = field(default_factory=dict)
    #: Machines with their hosts that have accepted a connection
    reached: set[str] = field(default_factory=set)

    def publish(self) -> str:
        """Return the address for other ranks, empty without a free port. Open the port on the first call."""
        if self.listener is None:
            try:
                # Without a route to the master, other processes of this machine can still connect.
                family, host = socket.AF_INET, "127.0.0.1"
                with contextlib.suppress(OSError):
                    master = os.environ.get("MASTER_ADDR", "")
                    address = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
                    with socket.socket(*address[:3]) as probe:
                        probe.connect(address[4])  # sends nothing
                        family, host = address[0], probe.getsockname()[0]
                self.listener = socket.socket(family, socket.SOCK_STREAM)
                self.listener.bind((host, 0))
                self.listener.listen(socket.SOMAXCONN)
                self.listener.setblocking(False)
                self.text = f"{socket.gethostname()} {host} {self.listener.getsockname()[1]}"
            except OSError:
                self.text = ""
            # A child process created by os.fork() would keep the port open after this process ends.
            reference = weakref.WeakMethod(self._close)
            os.register_at_fork(after_in_child=lambda: (close := reference()) and close())
        self._accept()
        return self.text

    def _close(self) -> None:
        for connection in (self.listener, *self.incoming, *self.outgoing.values()):
            if connection is not None:
                connection.close()
        self.listener, self.text, self.incoming, self.outgoing = None, "", [], {}

    def _accept(self) -> None:
        """Accept pending connections, since the port's queue is short, and drop closed ones."""
        for peer in list(self.incoming):
            with contextlib.suppress(OSError):
                if _is_open(peer):
                    continue
            self.incoming.remove(peer)
            peer.close()
        with contextlib.suppress(OSError):  # raised when none is pending
            while self.listener is not None:
                self.incoming.append(self.listener.accept()[0])
                self.incoming[-1].setblocking(False)

    def reach_machines(self, addresses: Iterable[str]) -> None:
        """Start to connect to one address of each other machine. Does not wait."""
        for address in {_machine_of(address): address for address in addresses}.values():
            if _machine_of(address) != _machine_of(self.text):
                self._state(address)

    def ended(self, addresses: Mapping[int, str]) -> list[int]:
        """Return the ranks that have certainly ended. Takes at most a fraction of a second."""
        self._accept()
        until = time.monotonic() + _PATIENCE
        states = {rank: self._state(address) for rank, address in addresses.items()}
        # New connections to all ranks are established at the same time.
        while _State.UNKNOWN in states.values() and time.monotonic() < until:
            time.sleep(_PATIENCE / 20)
            unknown = [rank for rank, state in states.items() if state is _State.UNKNOWN]
            states |= {rank: self._state(addresses[rank]) for rank in unknown}
        known = {_machine_of(self.text), *self.reached}
        return [
            rank
            for rank, state in sorted(states.items())
            if state is _State.CLOSED or (state is _State.REFUSED and _machine_of(addresses[rank]) in known)
        ]

    def _state(self, address: str) -> _State:
        """Return the state of the connection to an address, and start to connect without one."""
        try:
            if address not in self.outgoing:
                self._connect(address)
            connection = self.outgoing[address]
            if not _is_open(connection):
                return _State.CLOSED
            with contextlib.suppress(OSError):
                connection.getpeername()  # raises while it is being connected
                self.reached.add(_machine_of(address))
                return _State.OPEN
            return _State.UNKNOWN
        except OSError as error:
            # A reset alone proves nothing, since a full queue of a port resets connections. The next check connects
            # again.
            if (failed := self.outgoing.pop(address, None)) is not None:
                failed.close()
            return _State.REFUSED if error.errno == errno.ECONNREFUSED else _State.UNKNOWN

    def _connect(self, address: str) -> None:
        """Start to connect. Raises OSError if that fails at once, for example without a free file descriptor."""
        machine, host, port = address.split(" ")
        if host.startswith("127.") and machine != socket.gethostname():
            raise OSError(f"{host} is an address of {machine} only")
        connection = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        self.outgoing[address] = connection
        connection.setblocking(False)
        with contextlib.suppress(BlockingIOError):  # while it is being connected
            connection.connect((host, int(port)))


def _machine_of(address: str) -> str:
    """Return machine and host of an address. Containers may have equal hosts, and machines equal names."""
    return address.rpartition(" ")[0]


def _is_open(connection: socket.socket) -> bool:
    """Return whether the peer has not closed a connection; raise its OSError. Peers never send data."""
    try:
        return bool(connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
    except (BlockingIOError, InterruptedError):
        return True
