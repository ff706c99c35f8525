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

from starlette.exceptions import HTTPException

from serin.console.views.models import model_tab
from serin.console.views.view import Parameters
from serin.reports.charts import Bar, bars
from serin.spec.roles import Access

_LONGEST_S: Final = 120.0
_WAIT_S: Final = 2.0  # for another explanation
_MOST_BARS: Final = 12
_LONGEST_ID: Final = 300
_LAST_ROW: Final = 2**31 - 1
_NICE: Final = 10

_one = threading.Lock()  # a model may need much memory


class _NotExplained(Exception):
    """Why there are no contributions, for the page."""


def read_request(home: Path, parameters: Parameters, access: Access) -> dict[str, Any]:
    del access
    model, request = parameters["model"], parameters.get("id", "").strip()
    row = _row(parameters.get("row") or "0")
    if len(request) > _LONGEST_ID or not request.isprintable():
        raise HTTPException(400, f"an id has at most {_LONGEST_ID} characters, all of them printable")
    shown = {**model_tab(home, model, "captures"), "request": request, "row": row, "outputs": [], "why": ""}
    if not request:
        return shown
    try:
        entries = _explain(model, request, row)
    except _NotExplained as error:
        return {**shown, "why": str(error)}
    return {**shown, "outputs": [_output(entry) for entry in entries]}


def _row(text: str) -> int:
    small = text.isascii() and text.isdecimal() and len(text) <= len(str(_LAST_ROW))
    if not small or int(text) > _LAST_ROW:
        raise HTTPException(400, f"a row is an integer from 0 to {_LAST_ROW}")
    return int(text)


def _output(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {**entry, "t": datetime.fromisoformat(entry["t"]).timestamp(), "chart": _chart(entry)}


def _explain(model: str, request: str, row: int) -> list[dict[str, Any]]:
    """One entry for each output. Raises _NotExplained with what the command says, and HTTPException while another
    answer is being explained."""
    if not _one.acquire(timeout=_WAIT_S):
        raise HTTPException(503, "another answer is being explained; try again in a moment")
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
