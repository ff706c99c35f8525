"""What `serin up` refuses, and that it has started nothing then. What it starts is in tests/e2e/stack/test_stack.py."""

import os
import socket
import threading
from pathlib import Path

import pytest

from serin.cluster.agent.run import run_agent
from serin.cluster.agent.settings import AgentSettings
from serin.errors import AlreadyUp, PortTaken, StackError, TritonMissing
from serin.host.process_scan import stack_processes
from serin.host.state import changing_stack
from serin.host.wiring import key_file
from serin.machine.ports import free_ports
from serin.serving.envoy.tls import TlsFiles
from serin.stack.up import bring_up, check_address
from tests.kit.stacks import stack_in


def nothing_started(home: Path) -> bool:
    return not stack_processes(home) and not (home / "stack.json").exists()


def test_a_stack_that_is_up_already_is_named(tmp_path: Path) -> None:
    stack_in(tmp_path)
    with pytest.raises(AlreadyUp, match=f"process {os.getpid()}"):
        bring_up(tmp_path)


def test_a_second_up_at_the_same_moment_is_refused(tmp_path: Path) -> None:
    with changing_stack(tmp_path), pytest.raises(StackError, match="is changing"):
        bring_up(tmp_path)
    assert nothing_started(tmp_path)


def serve_once(home: Path) -> None:
    stop = threading.Event()
    stop.set()
    port = free_ports(1)[0]
    settings = AgentSettings(host="a", address="127.0.0.1", port=port, advertise="127.0.0.1", alone=True)
    run_agent(home, settings, stop)


@pytest.mark.parametrize("option", ["--port", "--ui-port"])
def test_a_taken_port_names_the_option_to_change(tmp_path: Path, option: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        asked = {option.removeprefix("--").replace("-", "_"): server.getsockname()[1]}
        with pytest.raises(PortTaken, match=f"name another with {option}"):
            bring_up(tmp_path, **asked)
    assert nothing_started(tmp_path)


@pytest.mark.parametrize(
    ("tls", "keys", "missing"),
    [
        (False, False, r"TLS \(--tls-cert and --tls-key\) and API keys \(`serin keys create NAME`\)$"),
        (True, False, r"needs API keys"),
        (False, True, r"needs TLS \(--tls-cert and --tls-key\)$"),
    ],
)
def test_other_machines_do_not_reach_a_gateway_that_lacks_tls_or_keys(
    tmp_path: Path, tls: bool, keys: bool, missing: str
) -> None:
    if keys:
        key_file(tmp_path).require(True)
    files = TlsFiles(certificate=tmp_path / "cert.pem", key=tmp_path / "key.pem") if tls else None
    with pytest.raises(StackError, match=missing):
        bring_up(tmp_path, address="0.0.0.0", tls=files)
    assert nothing_started(tmp_path)


def test_other_machines_do_not_reach_a_gateway_without_the_request_filter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serin.stack.up.find_request_filter", lambda: None)
    key_file(tmp_path).require(True)
    files = TlsFiles(certificate=tmp_path / "cert.pem", key=tmp_path / "key.pem")
    with pytest.raises(StackError, match="needs the request filter"):
        check_address(tmp_path, "0.0.0.0", files)
    for loopback in ("127.0.0.1", "127.0.0.9", "::1"):
        check_address(tmp_path, loopback, None)


@pytest.mark.parametrize("address", ["192.0.2.77", "localhost", "", "0.0.0.0:80", "2001:db8::1"])
def test_an_address_that_is_not_this_machines_is_named(tmp_path: Path, address: str) -> None:
    with pytest.raises(StackError, match=f"--address {address} is not an IP address of this machine"):
        bring_up(tmp_path, address=address)
    assert nothing_started(tmp_path)


def test_a_company_server_that_does_not_answer_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "http://prefect.invalid/api")
    with pytest.raises(StackError, match=r"prefect.invalid/api does not answer: PREFECT_API_URL names it"):
        bring_up(tmp_path)
    assert nothing_started(tmp_path)


def test_without_triton_nothing_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERIN_TRITON", str(tmp_path / "nowhere"))
    with pytest.raises(TritonMissing, match="serin install triton"):
        bring_up(tmp_path / "home")
    assert not (tmp_path / "home").exists()
