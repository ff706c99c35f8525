"""The local stack for real: Prefect, two workers, Envoy and the controller under supervisord; twice on one machine.

One story in one test: each `up` costs seconds, and every step needs what the step before has built.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from serin.serving.ports import is_free

PARTS = {"prefect", "worker-cpu", "worker-gpu", "gateway", "controller", "reconciler"}


class Home:
    """One stack's folder and the command that works on it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.seconds = 0.0

    def serin(
        self, *arguments: str, code: int | None = 0, seconds: float = 600.0
    ) -> subprocess.CompletedProcess[str]:
        """`code` None: any."""
        began = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "serin.cli", *arguments],
            env={**os.environ, "SERIN_HOME": str(self.folder)},
            capture_output=True,
            text=True,
            timeout=seconds,
        )
        self.seconds = time.monotonic() - began
        assert code in (done.returncode, None), f"serin {' '.join(arguments)}: {done.stdout}{done.stderr}"
        return done

    def status(self, *, code: int | None = 0) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.serin("status", "--json", code=code).stdout)
        return found

    def pids(self) -> dict[str, int]:
        return {process["name"]: process["pid"] for process in self.status()["processes"]}

    def processes(self) -> list[int]:
        """Found by their environment, without any of the code under test."""
        mark = f"SERIN_STACK={self.folder}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:
                continue
        return found


@pytest.fixture
def homes(tmp_path: Path) -> Iterator[tuple[Home, Home]]:
    pair = Home(tmp_path / "one"), Home(tmp_path / "two")
    yield pair
    for home in pair:
        for pid in home.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def until(true: Callable[[], bool], what: str, *, seconds: float = 60.0) -> float:
    began = time.monotonic()
    while not true():
        assert time.monotonic() - began < seconds, f"{what}: not within {seconds} s"
        time.sleep(0.05)
    return time.monotonic() - began


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=1) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def lets_in(api: str, origin: str) -> bool:
    """Whether a browser would let a page from `origin` send requests to the API."""
    headers = {"Origin": origin, "Access-Control-Request-Method": "POST"}
    request = urllib.request.Request(f"{api}/deployments/filter", method="OPTIONS", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=5) as response:
            return response.headers.get("Access-Control-Allow-Origin") in (origin, "*")
    except urllib.error.HTTPError as refusal:
        return refusal.headers.get("Access-Control-Allow-Origin") in (origin, "*")


@pytest.mark.timeout(1500)  # two cold starts of Prefect: a minute on two idle cores
def test_a_stack_comes_up_mends_itself_and_leaves_nothing(homes: tuple[Home, Home]) -> None:
    one, two = homes
    up = json.loads(one.serin("up", "--json").stdout)
    print(f"up: {one.seconds:.1f} s")
    status = one.status()
    assert status["well"]
    assert {process["name"]: process["state"] for process in status["processes"]} == dict.fromkeys(
        PARTS, "running"
    )
    assert answers(f"{up['gateway']}/v2/health/live")
    assert answers(f"{up['prefect_api']}/health")

    assert not lets_in(up["prefect_api"], "http://evil.example")
    assert lets_in(up["prefect_api"], up["prefect"])

    _keeps_strangers_out(one, up)

    refused = one.serin("up", code=1)
    assert "a stack is up" in refused.stderr
    assert one.pids() == {process["name"]: process["pid"] for process in status["processes"]}

    exported = one.serin("env").stdout
    assert f"export PREFECT_API_URL={up['prefect_api']}\n" in exported
    assert login(one) not in exported

    for part in ("controller", "gateway"):
        _comes_back(one, part, up["gateway"])

    gateway_port = int(up["gateway"].rpartition(":")[2])
    taken = two.serin("up", "--port", str(gateway_port), code=1)
    assert f"port {gateway_port} is taken; name another with --port" in taken.stderr
    assert two.processes() == []

    before = one.pids()
    second = json.loads(two.serin("up", "--json").stdout)
    print(f"second up: {two.seconds:.1f} s")
    assert {up["gateway"], up["prefect"]}.isdisjoint({second["gateway"], second["prefect"]})
    assert two.status()["well"]

    os.kill(json.loads((two.folder / "stack.json").read_text())["supervisor_pid"], signal.SIGKILL)
    until(lambda: two.processes() == [], "every part dies with its supervisor")
    assert two.status(code=1)["up"] is False
    assert "the stack had crashed" in two.serin("down").stderr

    assert one.pids() == before
    one.serin("down")
    print(f"down: {one.seconds:.1f} s")
    for home, addresses in ((one, up), (two, second)):
        assert home.processes() == []
        assert all(is_free(int(addresses[name].rpartition(":")[2])) for name in ("gateway", "prefect"))
        assert "no stack is up" in home.serin("down", code=1).stderr
        assert [path for path in Path("/proc/net/unix").read_text().split() if str(home.folder) in path] == []


def login(home: Home) -> str:
    return (home.folder / "prefect-login").read_text().strip()


def _keeps_strangers_out(home: Home, up: dict[str, Any]) -> None:
    """Neither without the login, nor as a page in the browser of somebody who is logged in."""
    assert (home.folder / "prefect-login").stat().st_mode & 0o777 == 0o600
    runs, body = f"{up['prefect_api']}/flow_runs/filter", b"{}"
    credentials = base64.b64encode(login(home).encode()).decode()
    token = urllib.request.Request(
        f"{up['prefect_api']}/csrf-token?client=test", headers={"Authorization": f"Basic {credentials}"}
    )
    with urllib.request.urlopen(token, timeout=10) as response:
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
        with urllib.request.urlopen(request, timeout=10) as response:
            return int(response.status)
    except urllib.error.HTTPError as refusal:
        return refusal.code


def _comes_back(home: Home, part: str, gateway: str) -> None:
    """kill -9, and soon the same part runs again under another pid and does its work."""
    killed = home.pids()[part]
    os.kill(killed, signal.SIGKILL)
    began = time.monotonic()
    until(lambda: not alive(killed), f"{part} dies")
    if part == "gateway":
        until(lambda: answers(f"{gateway}/v2/health/live"), "the gateway answers again")
    else:
        log = home.folder / "logs" / "controller.log"
        until(lambda: log.read_text().count("the controller has begun") == 2, "it ticks again")
    print(f"{part} back after {time.monotonic() - began:.1f} s")
    # It does its work before the supervisor, which waits a second for every start, calls it running.
    until(lambda: bool(home.status(code=None)["well"]), f"all is well after {part} was killed")
    assert home.pids()[part] not in (killed, None)
