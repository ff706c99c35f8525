from __future__ import annotations

import socket

import pytest

from serin.errors import PortTaken
from serin.machine.ports import is_free
from serin.stack.host.ports import choose_port, port_claims


def listening() -> socket.socket:
    server = socket.create_server(("127.0.0.1", 0))
    server.listen(1)
    return server


def test_a_port_in_use_that_was_asked_for_is_refused_by_name() -> None:
    with listening() as server, port_claims() as claims:
        port = server.getsockname()[1]
        with pytest.raises(PortTaken, match=f"port {port} is taken; name another with --ui-port"):
            choose_port(claims, asked=port, option="--ui-port", preferred=())


def test_the_first_preferred_port_that_is_free_is_taken() -> None:
    with listening() as server, listening() as other, port_claims() as claims:
        taken, free = server.getsockname()[1], other.getsockname()[1]
        other.close()
        assert choose_port(claims, asked=None, option="--port", preferred=(taken, free)) == free


def test_without_a_free_preferred_port_another_one_is_found() -> None:
    with listening() as server, port_claims() as claims:
        taken = server.getsockname()[1]
        found = choose_port(claims, asked=None, option="--port", preferred=(taken,))
        assert found != taken
        assert is_free(found)


def test_two_stacks_that_start_at_once_get_different_ports() -> None:
    with listening() as server:
        port = server.getsockname()[1]
    with port_claims() as first, port_claims() as second:
        assert choose_port(first, asked=None, option="--port", preferred=(port,)) == port
        assert choose_port(second, asked=None, option="--port", preferred=(port,)) != port


def test_a_claim_ends_with_its_block() -> None:
    with listening() as server:
        port = server.getsockname()[1]
    for _ in range(2):
        with port_claims() as claims:
            assert claims.claim(port)
