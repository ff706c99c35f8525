"""The hosts that other tests in this folder use behave as hosts."""

import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.cluster.namespaces import Host, end, hosts, wait_for
from tests.cluster.part import need

_ECHO = """
import socket, sys
server = socket.create_server((sys.argv[1], 0))
print(server.getsockname()[1], flush=True)
while True:
    client, _ = server.accept()
    while data := client.recv(65536):
        client.sendall(data)
"""


@pytest.fixture(autouse=True)
def _namespaces() -> None:
    need("namespaces")


def echo_server(host: Host) -> tuple[subprocess.Popen[str], int]:
    server = host.popen([sys.executable, "-S", "-c", _ECHO, host.address], stdout=subprocess.PIPE)
    return server, int(server.stdout.readline())


def round_trip_s(client: socket.socket) -> float:
    began = time.monotonic()
    client.sendall(b"x")
    assert client.recv(1) == b"x"
    return time.monotonic() - began


def test_hosts_have_names_that_the_others_resolve_and_leave_nothing_behind(tmp_path: Path) -> None:
    own = Path("/proc/self/ns/net").stat().st_ino
    links = Path("/proc/net/dev").read_text().count("\n")
    with hosts("one", "two", prefix="198.18.20") as network:
        assert network["one"].run(["hostname"]).stdout == "one\n"
        found = network["two"].run(["getent", "hosts", "one"]).stdout.split()
        assert found == ["198.18.20.1", "one"]
        here = network["one"].run([sys.executable, "-S", "-c", "import os; print(os.getcwd())"], cwd=tmp_path)
        assert here.stdout == f"{tmp_path}\n"
        lasting = network["one"].popen(["sleep", "600"])
        assert wait_for(network["one"].processes, within_s=5) == [lasting.pid]
    assert lasting.wait(5) == -9
    assert Path("/proc/self/ns/net").stat().st_ino == own
    assert Path("/proc/net/dev").read_text().count("\n") == links


def test_a_host_that_is_cut_off_is_not_reached_until_it_is_restored() -> None:
    with hosts("one", "two", prefix="198.18.20") as network:
        server, port = echo_server(network["one"])
        with network["two"].inside(), socket.create_connection(("198.18.20.1", port), timeout=5) as client:
            round_trip_s(client)
            network["one"].cut()
            client.settimeout(1)
            with pytest.raises(TimeoutError):
                round_trip_s(client)
            network["one"].restore()
            client.settimeout(10)
            assert client.recv(1) == b"x"  # sent again by TCP
        assert end(server) == -15


def test_a_slow_link_delays_and_loses_frames_and_keeps_every_byte() -> None:
    with hosts("one", "two", prefix="198.18.20") as network:
        _, port = echo_server(network["one"])
        with network["two"].inside(), socket.create_connection(("198.18.20.1", port), timeout=30) as client:
            network["one"].slow(delay_ms=20, loss=0.01)
            assert min(round_trip_s(client) for _ in range(5)) >= 0.04
            sent = os.urandom(1 << 20)
            threading.Thread(target=client.sendall, args=(sent,)).start()
            arrived = b""
            while len(arrived) < len(sent):
                arrived += client.recv(65536)
            assert arrived == sent
            network["one"].fast()
            assert wait_for(lambda: round_trip_s(client) < 0.02, within_s=10)


def test_two_hosts_that_block_each_other_still_reach_a_third() -> None:
    with hosts("one", "two", "three", prefix="198.18.20") as network:
        _, port = echo_server(network["one"])
        network["one"].block(network["two"])
        with network["two"].inside(), pytest.raises(TimeoutError):
            socket.create_connection(("198.18.20.1", port), timeout=0.5)
        with network["three"].inside(), socket.create_connection(("198.18.20.1", port), timeout=5) as client:
            round_trip_s(client)
        network["one"].unblock(network["two"])
        with network["two"].inside(), socket.create_connection(("198.18.20.1", port), timeout=5) as client:
            round_trip_s(client)
