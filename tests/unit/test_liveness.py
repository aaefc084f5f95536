"""Check that processes are reported as exited only if that is certain."""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Iterator

import pytest

from te_fsdp.collectives.liveness import Liveness


@pytest.fixture
def port() -> Iterator[socket.socket]:
    """Return the open port of a rank."""
    with socket.create_server(("127.0.0.1", 0), backlog=1) as listener:
        yield listener


def address_of(listener: socket.socket) -> str:
    return f"{socket.gethostname()} 127.0.0.1 {listener.getsockname()[1]}"


def on_this_machine() -> Liveness:
    return Liveness(text=f"{socket.gethostname()} 127.0.0.1 1")


def on_another_machine() -> Liveness:
    return Liveness(text="other 192.0.2.1 1")


@pytest.mark.parametrize("accepted", [True, False])
def test_closed_port_of_a_connected_process_means_exit(port: socket.socket, accepted: bool) -> None:
    """When the process exits, the kernel closes accepted connections and resets pending ones."""
    watcher, addresses = on_another_machine(), {3: address_of(port)}
    assert watcher.ended(addresses) == []
    with port.accept()[0] if accepted else contextlib.nullcontext():
        assert watcher.ended(addresses) == []
        port.close()
    assert watcher.ended(addresses) == [3]
    assert watcher.ended(addresses) == [3], "also in the next check"


def test_refused_connection_on_this_machine_means_exit(port: socket.socket) -> None:
    addresses = {3: address_of(port)}
    port.close()
    assert on_this_machine().ended(addresses) == [3]


def test_refused_connection_behind_a_firewall_does_not_mean_exit(port: socket.socket) -> None:
    """Bug class: ranks on other nodes report a late rank as exited because a firewall refuses connections."""
    addresses = {3: address_of(port)}
    port.close()
    watcher = on_another_machine()
    watcher.reach_machines(addresses.values())
    assert watcher.ended(addresses) == []


def test_refused_connection_on_a_reachable_machine_means_exit(port: socket.socket) -> None:
    """One connection per machine while all ranks run shows that no firewall blocks its other ranks."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        addresses = {2: address_of(other), 3: address_of(port)}
        watcher = on_another_machine()
        watcher.reach_machines(addresses.values())
        assert len(watcher.outgoing) == 1
        assert watcher.ended({}) == []
        port.close()
        assert watcher.ended(addresses) == [3]


def test_this_machine_needs_no_connections_in_advance(port: socket.socket) -> None:
    watcher = on_this_machine()
    watcher.reach_machines([address_of(port)])
    assert not watcher.outgoing


def test_reset_connection_does_not_mean_exit(port: socket.socket) -> None:
    """A full accept queue or a firewall may reset connections."""
    watcher, addresses = on_this_machine(), {3: address_of(port)}
    assert watcher.ended(addresses) == []
    peer = port.accept()[0]
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    peer.close()
    assert watcher.ended(addresses) == []
    port.close()
    assert watcher.ended(addresses) == [3], "the control"


def test_unresponsive_ranks_do_not_delay_the_check(port: socket.socket) -> None:
    """Bug class: each unreachable rank delays the check by one second, up to a minute in total."""
    full = [socket.socket() for _ in range(8)]
    for connection in full:
        connection.setblocking(False)
        connection.connect_ex(port.getsockname())  # further ones get no answer
    time.sleep(0.1)
    watcher, began = on_this_machine(), time.monotonic()
    addresses = {rank: f"{address_of(port)}" for rank in range(20)}
    assert watcher.ended(addresses) == []
    connection = watcher.outgoing[address_of(port)]
    with pytest.raises(OSError, match="not connected"):
        connection.getpeername()  # the control
    assert time.monotonic() - began < 1
    for connection in full:
        connection.close()
