"""The process that computes online windows on this host, and where its files are."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from serin.errors import StateUnavailable
from serin.host.standing import standing_process
from serin.host.supervisor import Supervisor
from serin.machine import environment
from serin.machine.durable import write_secret
from serin.machine.in_memory import socket_folder
from serin.machine.process import Process
from serin.machine.unix_http import UnixConnection
from serin.windows.valkey_place import ValkeyPlace

WINDOWS: Final = "windows"
_ANSWER_S: Final = 60.0
_START_S: Final = 30.0


def windows_socket(home: Path) -> Path:
    """Where the gateway asks for windows: only the owner of the stack can open it."""
    return socket_folder(home) / "windows.sock"


def plans_folder(home: Path) -> Path:
    return home / "windows" / "plans"


def state_folder(home: Path) -> Path:
    return home / "windows" / "state"


def shared_events() -> ValkeyPlace | None:
    """Where events are kept for several hosts; None: each home keeps its own. Raises SpecError."""
    found = environment.events_place()
    return None if found is None else ValkeyPlace.read(*found)


def windows_process(home: Path) -> Process:
    return standing_process(home, WINDOWS, "serin.cluster.windows_step")


def apply_plans(home: Path, plans: Mapping[str, Mapping[str, Any]]) -> None:
    """Writes the plans of the models that are served here, and starts the process when there are any. Events of a model
    that is not served any more stay until they expire."""
    folder = plans_folder(home)
    for model, plan in plans.items():
        path, text = folder / f"{model}.json", json.dumps(plan, sort_keys=True)
        if not path.exists() or path.read_text() != text:
            folder.mkdir(parents=True, exist_ok=True)
            write_secret(path, text)
    supervisor = Supervisor(home)
    if plans and not supervisor.runs(WINDOWS):
        supervisor.start(windows_process(home))


def begin_plan(home: Path, model: str, plan: Mapping[str, Any]) -> None:
    """Lets the process compute the windows of a model that is not served yet; the plan of one that is stays."""
    path = plans_folder(home) / f"{model}.json"
    apply_plans(home, {model: json.loads(path.read_text()) if path.exists() else plan})
    deadline = time.monotonic() + _START_S
    while True:
        try:
            ask_windows(home, "/status")
            return
        except StateUnavailable:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def send_history(home: Path, model: str, batch: Mapping[str, Any]) -> dict[str, int]:
    """Counts events that may have arrived earlier; the outcome of each."""
    found: dict[str, int] = ask_windows(home, "/history", batch, model=model)
    return found


def ask_windows(
    home: Path, path: str, body: Any = None, *, model: str = "", within_s: float = _ANSWER_S
) -> Any:
    """Asks the process itself, as the owner of the stack. StateUnavailable when it does not answer."""
    connection = UnixConnection(windows_socket(home), within_s)
    try:
        connection.request("POST", path, json.dumps(body).encode(), {"x-serin-model": model})
        answer = connection.getresponse()
        text = answer.read()
    except OSError as error:
        raise StateUnavailable(
            reason=f"the process {WINDOWS!r} does not answer ({error}); is a model with online windows live here?"
        ) from error
    finally:
        connection.close()
    if answer.status != 200:
        raise StateUnavailable(reason=text.decode(errors="replace"))
    return json.loads(text)
