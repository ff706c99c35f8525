"""The local stack for real: Prefect, two workers, Envoy and the controller under supervisord; twice on one machine."""

import base64
import json
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from serin.host.state import Stack as Running
from serin.host.state import read_stack, running_stack
from serin.machine.ports import is_free
from serin.prefect import rest_api
from serin.prefect.login import stack_api
from serin.stack.backup.contents import is_known
from tests.e2e.whole_stack import Stack, until
from tests.signals import hit

PARTS = {"prefect", "worker-cpu", "worker-gpu", "gateway", "controller", "reconciler", "watcher", "console"}


@pytest.fixture
def second(stack: Stack, tmp_path: Path) -> Iterator[Stack]:
    """Another on this machine, for which the first one's Prefect server is a company's: it asks for a login."""
    variables = {
        "PREFECT_API_URL": running_stack(stack.home).prefect_api_url,
        "PREFECT_API_AUTH_STRING": stack.login,
    }
    made = Stack(tmp_path / "second", **variables)
    try:
        yield made
    finally:
        made.kill()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=30) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def lets_in(api: str, origin: str) -> bool:
    """Whether a browser would let a page from `origin` send requests to the API."""
    headers = {"Origin": origin, "Access-Control-Request-Method": "POST"}
    request = urllib.request.Request(f"{api}/deployments/filter", method="OPTIONS", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return response.headers.get("Access-Control-Allow-Origin") in (origin, "*")
    except urllib.error.HTTPError as refusal:
        return refusal.headers.get("Access-Control-Allow-Origin") in (origin, "*")


@pytest.mark.timeout(900)  # a cold start of Prefect
def test_a_stack_that_is_up_answers_and_is_the_only_one_in_its_folder(stack: Stack) -> None:
    status, up = stack.ask("status"), running_stack(stack.home)
    assert status["well"]
    assert {process["name"]: process["state"] for process in status["processes"]} == dict.fromkeys(
        PARTS, "running"
    )
    assert answers(f"{up.gateway_url}/v2/health/live")
    assert answers(f"{up.prefect_api_url}/health")

    assert "a stack is up" in stack.serin("up", code=1)
    assert stack.pids() == {process["name"]: process["pid"] for process in status["processes"]}

    exported = stack.serin("env")
    assert f"export PREFECT_API_URL={up.prefect_api_url}\n" in exported
    assert stack.login not in exported


@pytest.mark.timeout(900)
def test_strangers_and_pages_of_others_cannot_talk_to_the_prefect_server(stack: Stack) -> None:
    up = running_stack(stack.home)
    assert not lets_in(up.prefect_api_url, "http://evil.example")
    assert lets_in(up.prefect_api_url, up.prefect_ui_url)
    _keeps_strangers_out(stack, up)


@pytest.mark.timeout(900)
def test_the_prefect_server_accepts_all_of_many_runs_at_once(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a client that asks again. They are due tomorrow, so nobody runs them."""
    monkeypatch.setattr(rest_api, "_BUSY_PAUSES_S", ())
    api, due = stack_api(running_stack(stack.home)), datetime.now(UTC) + timedelta(days=1)
    deployment = rest_api.call(api, "GET", "/deployments/name/reconcile/on-demand")["id"]
    later = {"type": "SCHEDULED", "state_details": {"scheduled_time": due.isoformat()}}

    def request(number: int) -> str:
        body = {"state": later, "tags": [f"crowd-{number}"]}
        return str(rest_api.call(api, "POST", f"/deployments/{deployment}/create_flow_run", body)["id"])

    with ThreadPoolExecutor(16) as threads:
        runs = list(threads.map(request, range(32)))
        list(threads.map(lambda run: rest_api.call(api, "DELETE", f"/flow_runs/{run}"), runs))
    assert len(set(runs)) == 32


@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", ["controller", "gateway"])
def test_a_part_that_is_killed_comes_back_and_does_its_work(stack: Stack, part: str) -> None:
    log, gateway = stack.home / "logs" / "controller.log", running_stack(stack.home).gateway_url
    killed, before = stack.pids()[part], log.read_text().count("the controller has started")
    assert killed
    hit(killed)
    began = time.monotonic()
    until(lambda: not alive(killed), f"{part} dies", within_s=60)
    if part == "gateway":
        until(lambda: answers(f"{gateway}/v2/health/live"), "the gateway answers again", within_s=60)
    else:
        until(
            lambda: log.read_text().count("the controller has started") > before,
            "it ticks again",
            within_s=60,
        )
    print(f"{part} back after {time.monotonic() - began:.1f} s")
    until(lambda: stack.pids()[part] not in (killed, None), "the supervisor knows the new one", within_s=60)


@pytest.mark.timeout(900)
def test_a_second_stack_leaves_the_first_alone_and_dies_with_its_supervisor(
    stack: Stack, second: Stack
) -> None:
    """Killed as soon as it has parts that answer: the rest of its start would take as long as that of the first."""
    first, before = running_stack(stack.home), stack.pids()
    taken = second.serin("up", "--port", str(first.gateway_port), code=1)
    assert f"port {first.gateway_port} is taken; name another with --port" in taken
    assert second.processes() == []

    starting = second.start("up")
    other = until(lambda: read_stack(second.home), "the second stack's supervisor")
    assert other.gateway_port != first.gateway_port
    until(lambda: answers(f"{other.gateway_url}/v2/health/live"), "the second gateway")
    assert second.pids().keys() >= {"gateway", "controller"}
    hit(starting.pid, signal.SIGSTOP)  # it would clean up itself
    hit(other.supervisor_pid)
    until(lambda: second.processes() == [], "every part dies with its supervisor", within_s=60)
    starting.send_signal(signal.SIGCONT)
    said, _ = starting.communicate(timeout=300)
    assert starting.returncode == 1, said
    assert "taking everything down again" in said
    assert second.processes() == []
    assert second.ask("status")["up"] is False
    assert is_free(other.gateway_port)
    assert stack.pids() == before


def _keeps_strangers_out(stack: Stack, up: Running) -> None:
    """Neither without the login, nor as a page in the browser of somebody who is logged in."""
    for name in ("prefect-login", "metrics-token"):
        assert (stack.home / name).stat().st_mode & 0o777 == 0o600
    names = {entry.name for entry in stack.home.iterdir() if not entry.name.endswith(".lock")}
    undecided = {name for name in names if not is_known(name)}
    assert undecided <= {"store", "inventory.json"}, (
        "say in stack/backup/contents.py whether a backup holds it"
    )
    runs, body = f"{up.prefect_api_url}/flow_runs/filter", b"{}"
    credentials = base64.b64encode(stack.login.encode()).decode()
    token = urllib.request.Request(
        f"{up.prefect_api_url}/csrf-token?client=test", headers={"Authorization": f"Basic {credentials}"}
    )
    with urllib.request.urlopen(token, timeout=30) as response:
        forgery = {"Prefect-Csrf-Token": json.load(response)["token"], "Prefect-Csrf-Client": "test"}
    said = {"Content-Type": "application/json"}
    for headers, code in (
        ({**said, **forgery}, 401),
        ({**said, **forgery, "Authorization": "Basic c2VyaW46d3Jvbmc="}, 401),
        ({**said, "Authorization": f"Basic {credentials}"}, 403),
        ({**said, **forgery, "Authorization": f"Basic {credentials}"}, 200),
    ):
        assert _status_of(urllib.request.Request(runs, data=body, headers=headers, method="POST")) == code


def _status_of(request: urllib.request.Request) -> int:
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return int(response.status)
    except urllib.error.HTTPError as refusal:
        return refusal.code
