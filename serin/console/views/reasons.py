"""A recorded request and the reason for its answer. `serin explain` computes it in another process, with less priority:
the console loads no model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from serin.console.views.models import model_tab
from serin.console.views.view import Parameters, Recent
from serin.reports.charts import Bar, bars
from serin.spec.roles import Access

_MOST_KEPT: Final = 200
_KEPT_S: Final = 600.0  # a record and the release that answered it do not change
_LONGEST_S: Final = 120.0
_WAIT_S: Final = 60.0  # for another explanation
_MOST_BARS: Final = 12
_LONGEST_ID: Final = 300
_NICE: Final = 10

_recent = Recent[list[dict[str, Any]]](_MOST_KEPT)
_one = threading.Lock()  # a model may need much memory


class _NotExplained(Exception):
    """Why there are no contributions, for the page."""


def read_request(home: Path, parameters: Parameters, access: Access) -> dict[str, Any]:
    del access
    model, request = parameters["model"], parameters.get("id", "").strip()[:_LONGEST_ID]
    row = int(text) if (text := parameters.get("row", "0")).isdecimal() else 0
    shown = {**model_tab(home, model, "captures"), "request": request, "row": row, "outputs": [], "why": ""}
    if not request:
        return shown
    try:
        entries = _recent.get((home, model, request, row), _KEPT_S, lambda: _explain(model, request, row))
    except _NotExplained as error:
        return {**shown, "why": str(error)}
    return {**shown, "outputs": [_output(entry) for entry in entries]}


def _output(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {**entry, "t": datetime.fromisoformat(entry["t"]).timestamp(), "chart": _chart(entry)}


def _explain(model: str, request: str, row: int) -> list[dict[str, Any]]:
    """One entry for each output. Raises _NotExplained with what the command says."""
    if not _one.acquire(timeout=_WAIT_S):
        raise _NotExplained("another answer is being explained; try again")
    try:
        return _run(["explain", model, f"--id={request}", f"--row={row}", "--json"])
    except subprocess.TimeoutExpired as error:
        reason = f"this takes longer than {_LONGEST_S:.0f} s; use `serin explain {model} --id {request}`"
        raise _NotExplained(reason) from error
    finally:
        _one.release()


def _run(words: list[str]) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "serin.cli", *words]
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            os.setpriority(os.PRIO_PROCESS, process.pid, _NICE)
            output, problem = process.communicate(timeout=_LONGEST_S)
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        said = problem.strip().rpartition("serin: ")[2]
        raise _NotExplained(said or f"the command ended with {process.returncode} and said nothing")
    found: list[dict[str, Any]] = json.loads(output)
    return found


def _chart(entry: Mapping[str, Any]) -> str:
    """Draws what the largest contributions add, and the others together."""
    adds = list(entry["contributions"].items())  # the largest first
    hidden = {name: f"{name} ({how})" for name, how in entry["masked"].items()}
    rows = [_bar(hidden.get(name, name), value) for name, value in adds[:_MOST_BARS]]
    if rest := adds[_MOST_BARS:]:
        rows.append(_bar(f"{len(rest)} other columns", sum(value for _, value in rest)))
    words = ", ".join(f"{bar.label} {bar.text}" for bar in rows)
    return bars(rows, width=920, label=220).embedded(f"Contributions to the margin: {words}")


def _bar(name: str, adds: float) -> Bar:
    return Bar(label=name, value=adds, text=f"{adds:+.4f}", colour="line" if adds > 0 else "blue")
