"""The process that computes online windows on this host, and where its files are."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from serin.errors import EventsUnfit, StateUnavailable
from serin.formats.windows import WindowPlan
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
    """Keeps the plans of the models that are served here, and runs the process when there are any. Events of a model
    that is not served any more stay until they expire: the process runs for them, too."""
    folder = plans_folder(home)
    for path in folder.glob("*.json"):
        if path.stem not in plans:
            path.unlink()
    for model, plan in plans.items():
        path, text = folder / f"{model}.json", json.dumps(plan, sort_keys=True)
        if not path.exists() or path.read_text() != text:
            folder.mkdir(parents=True, exist_ok=True)
            write_secret(path, text)
    if plans or state_folder(home).exists():
        _start(home)


def served_plan(home: Path, model: str) -> WindowPlan | None:
    """How the windows of a model are computed here now; None when none are."""
    try:
        return WindowPlan.load((plans_folder(home) / f"{model}.json").read_bytes())
    except FileNotFoundError:
        return None


def keeps_events(home: Path) -> bool:
    """Whether events of any model may be kept here, or in the place that hosts share."""
    return state_folder(home).exists() or any(plans_folder(home).glob("*.json"))


def _start(home: Path) -> None:
    supervisor = Supervisor(home)
    if not supervisor.runs(WINDOWS):
        supervisor.start(windows_process(home))


def begin_windows(home: Path) -> None:
    """Starts the process, also for a model that is not served yet, and waits until it answers."""
    _start(home)
    deadline = time.monotonic() + _START_S
    while True:
        try:
            ask_windows(home, "/status")
            return
        except StateUnavailable:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def send_history(home: Path, model: str, plan: WindowPlan, batch: Mapping[str, Any]) -> dict[str, int]:
    """Counts events that may have arrived earlier in the windows of `plan`; how many events had which outcome."""
    body = {"plan": plan.to_json(), **batch}
    found: dict[str, int] = ask_windows(home, "/history", body, model=model)
    return found


def forget_keys(home: Path, model: str, plan: WindowPlan, rows: Mapping[str, list[Any]]) -> int:
    """Deletes the events of these keys in the windows of `plan` that are by exactly the columns of `rows`; returns of
    how many keys there were any. Folders that were moved aside after a power failure may hold them: they go, too."""
    state = state_folder(home)
    for aside in state.parent.glob(f"{state.name}-before-*"):
        with suppress(FileNotFoundError):  # another call removes it
            shutil.rmtree(aside)
    body = {"plan": plan.to_json(), "rows": rows}
    found: int = ask_windows(home, "/forget", body, model=model)["keys"]
    return found


def ask_windows(
    home: Path, path: str, body: Any = None, *, model: str = "", within_s: float = _ANSWER_S
) -> Any:
    """Asks the process itself, as the owner of the stack. StateUnavailable when it does not answer or cannot use the
    events; EventsUnfit when it refuses what was sent."""
    connection = UnixConnection(windows_socket(home), within_s)
    try:
        connection.request("POST", path, json.dumps(body).encode(), {"x-serin-model": model})
        answer = connection.getresponse()
        text = answer.read()
    except OSError as error:
        raise StateUnavailable(
            reason=f"the process {WINDOWS!r} does not answer ({error}); is the stack up, and a model with online "
            "windows live here?"
        ) from error
    finally:
        connection.close()
    reason = text.decode(errors="replace")
    if answer.status == 503:
        raise StateUnavailable(reason=reason.removeprefix(str(StateUnavailable(reason=""))))
    if answer.status != 200:
        raise EventsUnfit(model=model, reason=reason)
    return json.loads(text)
