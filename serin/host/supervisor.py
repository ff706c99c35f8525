"""The supervisor: keeps the stack's processes alive, adds new ones at run time, ends them.

Facts about supervisord that shape this file: a program added at run time needs its file, then reloadConfig, then
addProcessGroup; BACKOFF waits one second longer after each failed start; EXITED is left without help when autorestart
is on. Its settings format cannot quote every character, so commands and environments are passed in JSON files that
exec_wrapper.py reads.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import shlex
import subprocess
import sys
import time
import xmlrpc.client
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from serin.errors import ProcessFailed, StackUnusable, SupervisorGone, SupervisorRefused
from serin.host import exec_wrapper
from serin.host.exec_wrapper import stat_of
from serin.host.logs import log_tail
from serin.host.process_scan import (
    STACK_MARK,
    end_processes,
    group_members,
    process_name,
    stack_processes,
)
from serin.host.state import Stack
from serin.host.watchdog import (
    REPORTED_S,
    Replaced,
    forget_lives,
    is_stopped,
    read_replaced,
    silent_for_s,
)
from serin.machine.durable import write_secret
from serin.machine.heartbeat import beat
from serin.machine.in_memory import socket_folder
from serin.machine.process import Process, ProcessState
from serin.machine.unix_http import UnixConnection

_DAEMON = "serin.host.supervisord"  # by name: every process of the stack imports this file, one that one
READY_S = 600.0  # seconds of work; minutes on a busy machine. A process that ends is noticed at once
_LOOK_S = 0.05
_ALIVE_S = 0.5  # asking the supervisor costs it and us more than a look at a port or a log
_SAID_S = 30.0  # a busy process may be silent for a while
_FRESH_S: Final = 0.1
_BAD_NAME, _ALREADY_ADDED, _ALREADY_STARTED, _NOT_RUNNING = 10, 90, 60, 70  # supervisord's fault codes
_STATES: Mapping[str, ProcessState] = {
    "STOPPED": "absent",
    "STARTING": "starting",
    "RUNNING": "running",
    "STOPPING": "running",
    "BACKOFF": "failed",  # it will be retried, but now nothing runs
    "EXITED": "failed",
    "FATAL": "failed",
    "UNKNOWN": "failed",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Child:
    """A process of the stack as the supervisor sees it."""

    name: str
    state: ProcessState
    pid: int | None
    detail: str
    problem: str = ""  # of one that runs: why it does not work, or did not a moment ago
    frozen: bool = False  # it does not work now


class Supervisor:
    """supervisord for the stack in `home`. A ProcessHost: any process of the stack may use one, in any number."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.folder = home / "stack"
        self.logs = home / "logs"
        self.pid_file = self.folder / "supervisord.pid"
        self.log = self.logs / "supervisord.log"
        self.socket = socket_folder(home) / "supervisor.sock"
        self._programs = self.folder / "conf.d"
        self._seen: tuple[float, list[Child]] = (-_FRESH_S, [])  # when, and which children there were

    def launch(self, environment: Mapping[str, str]) -> int:
        """Starts supervisord without children, in its own session; returns its pid when it answers."""
        self._write_settings()
        output = self.logs / "supervisord.err"
        with output.open("wb") as stream:
            daemon = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    _DAEMON,
                    "-n",
                    "-c",
                    str(self.folder / "supervisord.conf"),
                ],
                env=dict(environment),
                cwd=self.home,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stream,
                start_new_session=True,
            )
        deadline = time.monotonic() + 20.0
        while time.monotonic() < deadline:
            if daemon.poll() is not None:
                reason = f"exited with code {daemon.returncode}"
                raise ProcessFailed(
                    name="supervisord", reason=reason, log=output, tail=output.read_text()[-2000:]
                )
            try:
                self._call("getState")
                return daemon.pid
            except SupervisorGone:
                time.sleep(0.03)
        daemon.kill()
        daemon.wait()
        raise ProcessFailed(name="supervisord", reason="no answer within 20 s", log=self.log)

    def start(self, process: Process) -> None:
        """Runs `process` as described and keeps it alive. Does nothing when it already runs like that."""
        changed = self._describe(process)
        child = self._child_now(process.name)
        if child is not None and changed:
            self._end(process.name)
            child = None
        if child is None:
            self._call("reloadConfig")
            self._tolerate(_ALREADY_ADDED, "addProcessGroup", process.name)
        elif child.state in ("absent", "failed") and child.detail != "BACKOFF":
            self._tolerate(_ALREADY_STARTED, "startProcess", process.name, False)

    def stop(self, name: str) -> None:
        """Ends `name` and its children (SIGTERM, its stop time, SIGKILL) and removes it."""
        child = self._child_now(name)
        if child is not None:
            self._end(name)
            # supervisord watches the process alone, not the rest of its group, which may still start others.
            while child.pid is not None and (left := group_members(self.home, child.pid)):
                end_processes(left, grace_s=0.0)
        for suffix in (".ini", ".json", ".group"):
            (self._programs / f"{name}{suffix}").unlink(missing_ok=True)

    def state(self, name: str) -> ProcessState:
        child = self.child(name)
        return "absent" if child is None else child.state

    def runs(self, name: str) -> bool:
        return self.state(name) == "running"

    def pid(self, name: str) -> int | None:
        child = self.child(name)
        return None if child is None else child.pid

    def child(self, name: str) -> Child | None:
        """Returns a process as it was a moment ago: a look at several asks supervisord once."""
        asked_at, children = self._seen
        if time.monotonic() - asked_at > _FRESH_S:
            children = self.children()
        return next((child for child in children if child.name == name), None)

    def _child_now(self, name: str) -> Child | None:
        return next((child for child in self.children() if child.name == name), None)

    def children(self) -> list[Child]:
        asked_at = time.monotonic()
        found = [
            Child(
                name=str(info["name"]),
                state=_STATES.get(str(info["statename"]), "failed"),
                pid=int(info["pid"]) or None,
                detail=str(info["statename"]),
            )
            for info in self._call("getAllProcessInfo")
        ]
        self._seen = asked_at, found
        return found

    def request_stop(self, name: str) -> None:
        """Asks `name` to end without waiting; it is not restarted."""
        self._tolerate(_NOT_RUNNING, "stopProcess", name, False)

    def shut_down(self) -> None:
        """Asks supervisord itself to end."""
        try:
            self._call("shutdown")
        except SupervisorGone:
            return

    def forget_programs(self) -> None:
        """Removes the programs of an earlier supervisor; only for a supervisor that does not run."""
        for path in self._programs.glob("*"):
            path.unlink()

    def _end(self, name: str) -> None:
        self._tolerate(_NOT_RUNNING, "stopProcess", name, False)
        deadline = time.monotonic() + self._stop_seconds(name) + 10.0
        while True:
            child = self._child_now(name)
            if child is None:
                return
            if child.pid is None:
                try:
                    self._tolerate(_BAD_NAME, "removeProcessGroup", name)
                    return
                except SupervisorRefused:  # STILL_RUNNING: between two states
                    pass
            if time.monotonic() > deadline:
                raise StackUnusable(problem=f"{name} (process {child.pid}) does not exit")
            time.sleep(0.05)

    def _stop_seconds(self, name: str) -> float:
        try:
            return float(json.loads((self._programs / f"{name}.json").read_text())["stop_s"])
        except (OSError, ValueError, KeyError):
            return 10.0

    def _call(self, method: str, *arguments: Any) -> Any:
        if not method.startswith("get"):
            self._seen = (-_FRESH_S, [])
        return call_supervisor(self.socket, method, *arguments)

    def _tolerate(self, code: int, method: str, *arguments: Any) -> None:
        try:
            self._call(method, *arguments)
        except SupervisorRefused as refusal:
            if refusal.fields["code"] != code:
                raise

    def _describe(self, process: Process) -> bool:
        """Writes the two files of a program; True when their content changed."""
        description = self._programs / f"{process.name}.json"
        process.log.parent.mkdir(parents=True, exist_ok=True)
        written = json.dumps(
            {
                "parent_pid_file": str(self.pid_file),
                "command": list(process.command),
                "environment": {
                    **process.environment,
                    STACK_MARK: str(self.home),
                    exec_wrapper.PROCESS_MARK: process.name,
                },
                "leaves": {
                    "marks": [STACK_MARK, exec_wrapper.PROCESS_MARK],
                    "shared_memory": process.leaves.shared_memory,
                    "children": process.leaves.children,
                }
                if process.leaves
                else None,
                "asks": str(process.asks) if process.asks else None,
                "stop_s": process.stop_s,
            }
        )
        command = shlex.join([sys.executable, "-I", "-S", exec_wrapper.__file__, str(description)])
        settings = f"""\
[program:{process.name}]
command={_safe(command)}
directory={_safe(str(process.folder))}
autostart=true
autorestart=true
startsecs={max(1, round(process.settle_s))}
startretries=30
stopsignal=TERM
stopwaitsecs={max(1, round(process.stop_s))}
stopasgroup=true
killasgroup=true
redirect_stderr=true
stdout_logfile={_safe(str(process.log))}
stdout_logfile_maxbytes=10MB
stdout_logfile_backups=3
"""
        new = [_replace(description, written), _replace(self._programs / f"{process.name}.ini", settings)]
        return any(new)

    def _write_settings(self) -> None:
        self._programs.mkdir(parents=True, exist_ok=True)
        self.logs.mkdir(parents=True, exist_ok=True)
        self.pid_file.unlink(missing_ok=True)
        self.socket.unlink(missing_ok=True)
        forget_lives(self.home)
        settings = f"""\
[unix_http_server]
file={_safe(str(self.socket))}
chmod=0700

[supervisord]
logfile={_safe(str(self.log))}
logfile_maxbytes=5MB
logfile_backups=2
pidfile={_safe(str(self.pid_file))}
childlogdir={_safe(str(self.logs))}
nocleanup=true

[rpcinterface:supervisor]
supervisor.rpcinterface_factory = supervisor.rpcinterface:make_main_rpcinterface

[include]
files = {self._programs.name}/*.ini
"""
        _replace(self.folder / "supervisord.conf", settings)


class SilentSupervisor(Supervisor):
    """A supervisor that lives and does not answer: its children are found without it."""

    def __init__(self, stack: Stack) -> None:
        super().__init__(stack.home)
        self._pid = stack.supervisor_pid

    def children(self) -> list[Child]:
        found = []
        for pid in stack_processes(self.home):
            with contextlib.suppress(OSError):
                if int(stat_of(pid)[1]) == self._pid:
                    name = process_name(pid)
                    found.append(Child(name=name, state="running", pid=pid, detail="RUNNING"))
        return sorted(found, key=lambda child: child.name)


def find_supervisor(stack: Stack) -> tuple[Supervisor, str]:
    """Returns the supervisor of a stack that is up, and what is wrong with it; empty when it answers."""
    pid, supervisor = stack.supervisor_pid, Supervisor(stack.home)
    way_out = "no process is restarted until it works again"
    if is_stopped(pid):
        problem = f"FROZEN: process {pid} was stopped by a signal; {way_out} (kill -CONT {pid})"
        return SilentSupervisor(stack), problem
    try:
        supervisor.children()
    except SupervisorGone as error:
        problem = f"SILENT: process {pid} does not answer ({error.fields['reason']}); {way_out} (serin down, serin up)"
        return SilentSupervisor(stack), problem
    return supervisor, ""


def with_problems(home: Path, children: Iterable[Child], now: float) -> tuple[Child, ...]:
    """Returns the children with what the watchdog knows of them (watchdog.py)."""
    replaced = {each.name: each for each in read_replaced(home) if now - each.t < REPORTED_S}
    return tuple(_with_problem(home, child, replaced.get(child.name), now) for child in children)


def _with_problem(home: Path, child: Child, last: Replaced | None, now: float) -> Child:
    if child.pid and is_stopped(child.pid):
        return replace(child, problem="FROZEN: stopped by a signal", frozen=True)
    if child.pid and (silent_s := silent_for_s(home, child.pid)) > _SAID_S:
        return replace(child, problem=f"NO SIGN OF LIFE for {silent_s:.0f} s", frozen=True)
    if last is not None:
        return replace(child, problem=f"replaced {now - last.t:.0f} s ago: {last.reason}")
    return child


def process_line(child: Child) -> str:
    """Returns a process as a line for people."""
    pid = f"process {child.pid}" if child.pid else ""
    return f"  {child.name:<24} {child.state:<9} {pid:<15} {child.problem}".rstrip()


def _safe(text: str) -> str:
    """Returns `text` if supervisord's settings can hold it: there % expands and a comment may begin after a blank."""
    if any(mark in text for mark in ("%", " ;", " #", "\n")):
        raise StackUnusable(
            problem=f"supervisord cannot work with this path: {text}; choose a SERIN_HOME without percent signs "
            "and ' #'"
        )
    return text


def _replace(path: Path, content: str) -> bool:
    """Writes `content`, readable for the owner only, by rename; False when it was already there."""
    try:
        if path.read_text() == content:
            return False
    except OSError:
        pass
    write_secret(path, content)
    return True


class _UnixTransport(xmlrpc.client.Transport):
    def __init__(self, path: Path, seconds: float) -> None:
        super().__init__()
        self._path = path
        self._seconds = seconds

    def make_connection(self, host: Any) -> http.client.HTTPConnection:
        connection = UnixConnection(self._path, self._seconds)
        self._connection = host, connection  # the base class closes this connection
        return connection


def call_supervisor(socket_path: Path, method: str, *arguments: Any, seconds: float = 10.0) -> Any:
    """Returns the answer of `supervisor.<method>`. Raises SupervisorRefused or, when nothing answers,
    SupervisorGone."""
    proxy = xmlrpc.client.ServerProxy("http://supervisor", transport=_UnixTransport(socket_path, seconds))
    beat(within_s=seconds)
    try:
        with proxy:
            return getattr(proxy.supervisor, method)(*arguments)
    except xmlrpc.client.Fault as fault:
        call = f"{method}{arguments}"
        raise SupervisorRefused(call=call, code=fault.faultCode, reason=fault.faultString) from fault
    except (OSError, http.client.HTTPException, xmlrpc.client.ProtocolError) as error:
        raise SupervisorGone(socket=socket_path, reason=str(error)) from error


def wait_until_ready(supervisor: Supervisor, process: Process, ready: Callable[[], bool]) -> None:
    """Waits until `ready` is true; raises ProcessFailed with the end of the log, at once when the process has died."""

    def ended() -> str | None:
        child = supervisor.child(process.name)
        if child is None or child.state == "failed":
            return f"it ended ({'gone' if child is None else child.detail.lower()})"
        return None

    wait_while_alive(process.name, process.log, ready, ended)


def wait_while_alive(
    name: str, log: Path, ready: Callable[[], bool], ended: Callable[[], str | None]
) -> None:
    """`wait_until_ready` for any process. `ended`: how it has died, None while it lives."""
    began = asked = time.monotonic()
    while not ready():
        reason, now = None, time.monotonic()
        if now - asked >= _ALIVE_S:
            reason, asked = ended(), now
        if reason is None and now > began + READY_S:
            reason = f"not ready within {READY_S:.0f} s"
        if reason is not None:
            raise ProcessFailed(name=name, reason=reason, log=log, tail=log_tail(log))
        time.sleep(_LOOK_S)
