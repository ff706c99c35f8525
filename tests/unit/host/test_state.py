"""The state of a host's stack: its processes, ports, guard, and its end."""

import json
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from serin.errors import FileBroken, NotUp, PortTaken, StackError
from serin.host import exec_wrapper
from serin.host.down import clear_away, take_down
from serin.host.guard import Guard, read_guard
from serin.host.process_scan import STACK_MARK, end_processes, environment_of, record_folder, stack_processes
from serin.host.state import (
    changing_stack,
    read_stack,
    running_stack,
    stack_file,
    stack_name,
    write_stack,
)
from serin.host.wiring import build_gateway, key_file
from serin.machine.in_memory import remove_sockets, socket_folder
from serin.machine.ports import Claims, choose_port, is_free
from serin.prefect import processes
from serin.prefect.login import make_login, stack_api
from serin.serving.envoy.issuers import Issuer
from serin.serving.envoy.tls import TlsFiles
from serin.serving.triton.process import new_place
from serin.store.artifacts import Release
from tests.e2e.serving_certificates import Authority
from tests.kit.stacks import stack_in
from tests.logs import heard


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    written = stack_in(tmp_path, gateway_port=8080)
    assert read_stack(tmp_path) == running_stack(tmp_path) == written
    assert written.gateway_url == "http://127.0.0.1:8080"


def test_a_pid_that_was_given_to_another_process_is_not_the_stack(tmp_path: Path) -> None:
    write_stack(replace(stack_in(tmp_path), supervisor_ticks=1))
    with pytest.raises(NotUp, match="start one with `serin up`"):
        running_stack(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": "serin.stack", "version": 99}', "null"])
def test_an_unreadable_file_is_not_taken_for_a_stack_that_is_down(tmp_path: Path, content: str) -> None:
    stack_file(tmp_path).write_text(content)
    with pytest.raises(FileBroken, match=r"stack\.json.*`serin down` ends it"):
        read_stack(tmp_path)
    assert stack_file(tmp_path).read_text() == content


def test_a_second_change_of_the_same_stack_is_refused(tmp_path: Path) -> None:
    with (
        changing_stack(tmp_path),
        pytest.raises(StackError, match="another `serin up` or `serin down`"),
        changing_stack(tmp_path),
    ):
        pytest.fail("two at a time")


def test_a_process_is_found_by_its_mark_and_ended(tmp_path: Path) -> None:
    other = tmp_path / "other"
    marked = {**os.environ, STACK_MARK: str(tmp_path)}
    # A session of its own, as Prefect's flow runs have: no process group would find it.
    child = subprocess.Popen(["sleep", "600"], env=marked, start_new_session=True)
    bystander = subprocess.Popen(["sleep", "600"], env={**os.environ, STACK_MARK: str(other)})
    try:
        assert stack_processes(tmp_path) == [child.pid]
        end_processes([child.pid], grace_s=5.0)
        assert child.wait(timeout=30) == -signal.SIGTERM
        assert bystander.poll() is None
    finally:
        for process in (child, bystander):
            process.kill()
            process.wait()


def test_a_process_is_known_from_its_first_moment(tmp_path: Path) -> None:
    # Popen returns in the middle of execve, where about one process in a hundred shows no environment yet.
    mark = f"{STACK_MARK}={tmp_path}".encode()
    for number in range(1000):
        with subprocess.Popen(["sleep", "600"], env={STACK_MARK: str(tmp_path)}) as child:
            try:
                if number % 2:
                    assert mark in environment_of(child.pid)
                else:
                    assert mark in exec_wrapper.environment_of(child.pid)
            finally:
                child.kill()


def test_what_shows_no_environment_for_good_is_not_waited_for() -> None:
    with subprocess.Popen(["sleep", "600"], env={}) as bare:
        try:
            assert environment_of(bare.pid) == [b""]
        finally:
            bare.kill()
    assert environment_of(2) in ([], [b""])  # of the kernel, or somebody else's


def test_a_process_that_ignores_sigterm_is_killed_after_its_grace() -> None:
    child = subprocess.Popen(
        ["sh", "-c", 'trap "" TERM; echo ready; while :; do sleep 1; done'], stdout=subprocess.PIPE
    )
    child.stdout.readline()
    end_processes([child.pid], grace_s=0.1)
    assert child.wait(timeout=30) == -signal.SIGKILL
    child.stdout.close()


def test_a_stack_shows_its_own_server_its_login_and_another_what_the_caller_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", "ada:lovelace")
    monkeypatch.setenv("PREFECT_API_KEY", "pnu_1")
    own = stack_in(tmp_path, prefect_port=4200)
    login = make_login(tmp_path)
    assert (stack_api(own).login, stack_api(own).key) == (login, None)
    foreign = replace(own, prefect_port=None)
    assert (stack_api(foreign).login, stack_api(foreign).key) == ("ada:lovelace", "pnu_1")


def test_only_a_reconciler_for_another_s_server_is_given_the_caller_s_credentials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", "ada:lovelace")
    own = stack_in(tmp_path, prefect_port=4200)
    foreign = replace(own, prefect_port=None, prefect_api_url="http://company.example/api")
    assert "PREFECT_API_AUTH_STRING" not in processes.reconciler(own).environment
    given = processes.reconciler(foreign).environment
    assert given["PREFECT_API_AUTH_STRING"] == "ada:lovelace"
    assert given["PREFECT_API_URL"] == "http://company.example/api"


def test_two_stacks_have_two_names_and_keep_them(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for home in (one, two):
        (home / "stack").mkdir(parents=True)
    assert stack_name(one) == stack_name(one) != stack_name(two)
    assert processes.workers_of(one) == (f"serin-cpu-{stack_name(one)}", f"serin-gpu-{stack_name(one)}")


@pytest.mark.parametrize("made_once", [stack_name, socket_folder])
def test_processes_that_start_together_agree(made_once: Callable[[Path], object], tmp_path: Path) -> None:
    homes = [tmp_path / str(number) for number in range(100)]
    together = threading.Barrier(4)

    def ask(home: Path) -> object:
        together.wait(30)
        return made_once(home)

    with ThreadPoolExecutor(4) as threads:
        for home in homes:
            assert len(set(threads.map(ask, [home] * 4))) == 1
    for home in homes if made_once is socket_folder else []:
        assert remove_sockets(home) == 0


def listening() -> socket.socket:
    server = socket.create_server(("127.0.0.1", 0))
    server.listen(1)
    return server


def test_a_port_in_use_that_was_asked_for_is_refused_by_name() -> None:
    with listening() as server, Claims() as claims:
        port = server.getsockname()[1]
        with pytest.raises(PortTaken, match=f"port {port} is taken; name another with --ui-port"):
            choose_port(claims, asked=port, option="--ui-port", preferred=())


def test_the_first_preferred_port_that_is_free_is_taken() -> None:
    with listening() as server, listening() as other, Claims() as claims:
        taken, free = server.getsockname()[1], other.getsockname()[1]
        other.close()
        assert choose_port(claims, asked=None, option="--port", preferred=(taken, free)) == free


def test_without_a_free_preferred_port_another_one_is_found() -> None:
    with listening() as server, Claims() as claims:
        taken = server.getsockname()[1]
        found = choose_port(claims, asked=None, option="--port", preferred=(taken,))
        assert found != taken
        assert is_free(found)


def test_two_stacks_that_start_at_once_get_different_ports() -> None:
    with listening() as server:
        port = server.getsockname()[1]
    with Claims() as first, Claims() as second:
        assert choose_port(first, asked=None, option="--port", preferred=(port,)) == port
        assert choose_port(second, asked=None, option="--port", preferred=(port,)) != port


def test_a_claim_ends_with_its_block() -> None:
    with listening() as server:
        port = server.getsockname()[1]
    for _ in range(2):
        with Claims() as claims:
            assert claims.claim(port)


def test_a_gateway_without_a_guard_reports_it(tmp_path: Path) -> None:
    assert read_guard(tmp_path).words == "no TLS; no API keys: anyone who can reach this port gets answers"


def test_keys_are_counted_and_a_broken_file_is_said_aloud(tmp_path: Path) -> None:
    keys = key_file(tmp_path)
    for name in ("ada", "bob", "eve"):
        keys.create(name, lasts_s=1e-9 if name == "eve" else None)
    keys.revoke("bob")
    assert read_guard(tmp_path).words == "no TLS; API keys required (1 valid)"
    issuer = Issuer(name="corp", url="https://login.example.com", audiences=("serin",), added=1.0)
    keys.add_issuer(issuer)
    assert read_guard(tmp_path).words == "no TLS; API keys required (1 valid, 1 issuer of tokens)"
    keys.path.write_text("{")
    assert read_guard(tmp_path).words.startswith("no TLS; NOT OPEN: the gateway is closed: ")


def test_tls_is_known_from_the_bootstrap_also_while_no_gateway_runs(tmp_path: Path) -> None:
    files = TlsFiles(certificate=tmp_path / "cert.pem", key=tmp_path / "key.pem")
    Authority().pair().write(files.certificate, files.key)
    gateway = build_gateway(tmp_path / "home")
    gateway.write_bootstrap(1, tls=files, request_filter=tmp_path / "filter.so")
    found = read_guard(tmp_path / "home")
    assert found == Guard(tls=True, certificate_days=None, keys_required=False, good_keys=0)
    gateway.write_bootstrap(1, request_filter=tmp_path / "filter.so")
    assert not read_guard(tmp_path / "home").tls
    assert not (tmp_path / "home" / "gateway" / "tls" / "tls.json").exists(), "no copy of a key is left"


def test_a_gateway_without_its_filter_listens_on_loopback_only_and_reports_it(tmp_path: Path) -> None:
    gateway, library = build_gateway(tmp_path), tmp_path / "filter.so"
    for request_filter, address in ((library, "0.0.0.0"), (None, "127.0.0.1")):
        gateway.write_bootstrap(1, "0.0.0.0", request_filter=request_filter)
        listener = tmp_path / "gateway" / "listener" / "listener.json"
        (public,) = json.loads(listener.read_text())["resources"]
        assert public["address"]["socket_address"]["address"] == address
        assert ("no request filter" in read_guard(tmp_path).words) == (request_filter is None)


def test_nothing_to_end_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(NotUp):
        take_down(tmp_path / "never")
    assert not (tmp_path / "never").exists()


def test_leftovers_of_a_crash_are_removed_and_reported(tmp_path: Path) -> None:
    orphan = subprocess.Popen(
        ["sleep", "600"], env={**os.environ, STACK_MARK: str(tmp_path)}, start_new_session=True
    )
    sockets = socket_folder(tmp_path)
    (sockets / "supervisor.sock").touch()
    place = new_place(Release(model="flights", version=3), (1, 2, 3))
    record = tmp_path / "releases" / "flights-v3" / "release.json"
    record.parent.mkdir(parents=True)
    record.write_text(json.dumps({"place": place.to_json()}))
    region = Path("/dev/shm") / f"{place.shared_memory_prefix}region"
    region.touch()
    program = tmp_path / "stack" / "conf.d" / "flights-v3.ini"
    program.parent.mkdir()
    program.touch()

    said: list[str] = []
    with heard(said.append):
        take_down(tmp_path)

    assert orphan.wait(timeout=30) < 0
    assert said == ["the stack had crashed; cleaned up 1 process, 1 shared memory segment, 1 socket"]
    assert not any(path.exists() for path in (sockets, region, program))
    assert clear_away(tmp_path) == ""


def test_a_release_record_that_a_crash_cut_short_does_not_stop_the_cleaning(tmp_path: Path) -> None:
    record = tmp_path / "releases" / "flights-v3" / "release.json"
    record.parent.mkdir(parents=True)
    record.write_text('{"place": {')
    of_a_run = record_folder(tmp_path) / "1"
    of_a_run.parent.mkdir(parents=True)
    of_a_run.write_text("0d9f1f6e 1")
    assert clear_away(tmp_path) == ""
    assert not of_a_run.parent.exists()
