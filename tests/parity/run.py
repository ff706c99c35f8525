"""Runs scenarios in a place, keeps what came of each in a file, and makes the table of the docs of these files."""

from __future__ import annotations

import hashlib
import json
import subprocess
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from http.client import HTTPException
from pathlib import Path
from typing import Literal

from tests.parity.place import Place, Refused
from tests.parity.scenarios import SCENARIOS, Scenario

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).with_name("results")
PAGE = ROOT / "docs" / "reference" / "parity.md"
BEGIN, END = "<!-- parity: written by `make parity` from tests/parity/results -->", "<!-- end of parity -->"
PLACES = {
    "machine": "one machine",
    "hosts": "three hosts",
    "kubernetes": "Kubernetes",
    "foreign": "servers that are not Serin's",
}
_BESIDE = 2  # slow scenarios at once


@dataclass(frozen=True)
class Cell:
    """`why`: the reason of a refusal or of a failure. `code`: a digest of the product's sources."""

    outcome: Literal["passed", "refused", "failed"]
    why: str = ""
    seconds: float = 0.0
    code: str = ""


def play(scenario: Scenario, place: Place) -> Cell:
    began = time.monotonic()
    outcome: Literal["passed", "refused", "failed"]
    try:
        scenario.run(place, scenario.model)
    except Refused as error:
        why = str(error)
        said = why.replace(scenario.model, "")
        outcome = "refused" if any(word in said for word in scenario.words) else "failed"
    except (
        AssertionError,
        OSError,
        ValueError,
        LookupError,
        subprocess.SubprocessError,
        HTTPException,
    ) as error:
        (place.folder / f"{scenario.model}.txt").write_text(traceback.format_exc())
        outcome, why = "failed", _short(error)
    else:
        outcome, why = "passed", ""
    place.clean(scenario.model)
    return Cell(outcome=outcome, why=why, seconds=round(time.monotonic() - began, 1), code=code_digest())


def _short(error: Exception) -> str:
    first = next((line for line in str(error).splitlines() if line.strip()), "")
    said = first if isinstance(error, AssertionError) and first else f"{type(error).__name__}: {first}"
    return said[:300]


def run(place: Place, wanted: Iterable[str], keep: Callable[[str, Cell], None]) -> dict[str, Cell]:
    """Slow scenarios run beside the others; key rotation, the last of all, runs alone."""
    names = list(wanted)
    *early, last = SCENARIOS
    done: dict[str, Cell] = {}

    def one(name: str) -> None:
        done[name] = play(SCENARIOS[name], place)
        keep(name, done[name])

    with ThreadPoolExecutor(_BESIDE) as beside:
        slow = [beside.submit(one, name) for name in early if name in names and SCENARIOS[name].slow]
        for name in early:
            if name in names and not SCENARIOS[name].slow:
                one(name)
        for each in slow:
            each.result()
    if last in names:
        one(last)
    return done


@cache
def code_digest() -> str:
    found = hashlib.sha256()
    for path in sorted((ROOT / "serin").rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            found.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return found.hexdigest()[:12]


def stored(place: str) -> dict[str, Cell]:
    path = RESULTS / f"{place}.json"
    return (
        {name: Cell(**each) for name, each in json.loads(path.read_text()).items()} if path.exists() else {}
    )


def store(place: str, name: str, cell: Cell) -> None:
    """Adds a cell, in the order of the scenarios, and writes the table again."""
    cells = {**stored(place), name: cell}
    ordered = {each: asdict(cells[each]) for each in SCENARIOS if each in cells}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{place}.json").write_text(json.dumps(ordered, indent=1, ensure_ascii=False) + "\n")
    PAGE.write_text(updated(PAGE.read_text()))


def missing(place: str, named: Sequence[str], *, again: bool) -> list[str]:
    """The scenarios to run: those that have not passed on this code, unless they are asked for again."""
    found, code = stored(place), code_digest()
    passed = {name for name, cell in found.items() if (cell.outcome, cell.code) == ("passed", code)}
    return [name for name in named or SCENARIOS if again or name not in passed]


def table() -> str:
    """Returns the table of all places, how many cells each has of a kind, and the reasons."""
    cells = {place: stored(place) for place in PLACES}
    lines = ["| | " + " | ".join(PLACES.values()) + " |", "|---" * (len(PLACES) + 1) + "|"]
    notes: list[str] = []
    for name in SCENARIOS:
        row = []
        for place, title in PLACES.items():
            cell = cells[place].get(name)
            if cell is None:
                row.append("not run")
            elif cell.outcome == "passed":
                row.append("passed")
            else:
                notes.append(f"{len(notes) + 1}. {name}, {title}: {cell.why.replace('|', '/')}")
                row.append(f"{cell.outcome} ({len(notes)})")
        lines.append(f"| {name} | " + " | ".join(row) + " |")
    kinds = ("passed", "refused", "failed")
    found: list[list[str]] = [[cell.outcome for cell in each.values()] for each in cells.values()]
    counts = [" / ".join(str(each.count(kind)) for kind in kinds) for each in found]
    lines.append("| **passed / refused / failed** | " + " | ".join(counts) + " |")
    return "\n".join([*lines, "", *notes]).rstrip()


def updated(page: str) -> str:
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{rest.split(END)[1]}"
