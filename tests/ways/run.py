"""Runs the cases of a place, keeps what came of each in a file, and writes the tables of the docs from these files."""

from __future__ import annotations

import json
import re
import subprocess
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from serin.errors import SerinError
from serin.formats.bundle import read_manifest
from tests.parity.run import code_digest
from tests.ways.design import PLACES, SENT, WAYS, WRONG, Case, cases
from tests.ways.place import NO_STORE, Done, Place
from tests.ways.start import Started

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).with_name("results")
PAGE = ROOT / "docs" / "reference" / "ways.md"
BEGIN, END = "<!-- ways: written by `make ways` from tests/ways/results -->", "<!-- end of ways -->"
_SENDING = RESULTS / "sending.json"
_SENDS = "send it with `serin run SPEC`"
# What the message of a wrong one must name: what, where, and what to do.
_SAYS = {
    ("run", "missing"): ("gone.yaml", "no such file", "serin init"),
    ("python", "missing"): ("gone.yaml", "no such file", "serin init"),
    ("package", "missing"): ("package 000000000000", "there is none", "SERIN_STORE"),
    ("deployment", "missing"): ("/nowhere/gone.yaml", "there is no such file on", _SENDS),
    ("schedule", "missing"): ("/nowhere/gone.yaml", "there is no such file on", _SENDS),
    ("run", "unreadable"): (NO_STORE, "is a URL", "prefect deployment run"),
    ("python", "unreadable"): (NO_STORE, "is a URL", "prefect deployment run"),
    ("package", "unreadable"): (NO_STORE, "cannot be"),
    ("deployment", "unreadable"): (NO_STORE, "cannot be read on", _SENDS),
    ("schedule", "unreadable"): (NO_STORE, "cannot be read on", _SENDS),
}


@dataclass(frozen=True)
class Cell:
    """What came of a case. `exit`: of the last command. `form`: what was given as the spec. `said`: why it was refused,
    or how it failed. `code`: a digest of the product's sources."""

    outcome: Literal["completed", "refused", "failed"]
    exit: int | None = None
    form: str = ""
    said: str = ""
    seconds: float = 0.0
    code: str = ""

    @property
    def is_good(self) -> bool:
        return self.outcome != "failed"


def play(place: Place, case: Case, log: Path) -> Cell:
    """`log`: gets all that was said."""
    began, form, code, said = time.monotonic(), "", None, ""
    outcome: Literal["completed", "refused", "failed"] = "refused" if case.is_wrong else "completed"
    try:
        pipelines = _pipelines(place)
        started = Started(place, case)
        done = started.begin()
        form, code = started.form, done.code
        log.write_text(done.said)
        said = (
            _refused(place, case, done, pipelines)
            if case.is_wrong
            else _completed(place, case, started, done)
        )
    except (
        AssertionError,
        OSError,
        ValueError,
        LookupError,
        SerinError,
        subprocess.SubprocessError,
    ) as error:
        log.write_text(f"{log.read_text() if log.exists() else ''}\n{traceback.format_exc()}")
        outcome, said = "failed", next(iter(str(error).splitlines()), "")[:300]
    seconds = round(time.monotonic() - began, 1)
    form = "a package" if form.startswith("package:") else form
    return Cell(outcome=outcome, exit=code, form=form, said=said, seconds=seconds, code=code_digest())


def _completed(place: Place, case: Case, started: Started, done: Done) -> str:
    assert done.code == 0, f"exit code {done.code}: {last_line(done.said)}"
    versions = place.versions(case.model)
    assert versions, "completed, and no version is published"
    with place.inside():
        bundle = place.store.bundle(case.model, versions[-1])
        lineage = read_manifest(Path(bundle.path)).lineage
    if started.form.startswith("package:"):
        assert lineage["package"] == started.form.removeprefix("package:"), lineage
        assert len(versions) == 2, f"it was repeated, and there are the versions {versions}"
    if case.sent == "requirements":
        assert "shelf-tools==1.2" in json.dumps(lineage), lineage
    return ""


def _refused(place: Place, case: Case, done: Done, pipelines: int) -> str:
    """The message, with what it must say. Nothing was started: no run, or one without a single task."""
    assert done.code, "it was wrong, and the exit code is 0"
    text = " ".join(done.said.split())
    lacking = [word for word in _SAYS[case.way, case.sent] if word not in text]
    assert not lacking, f"does not say {lacking}: {last_line(done.said)}"
    runs = _newest_pipelines(place)
    if case.way in ("deployment", "schedule"):
        newest = runs[0]
        assert newest["state_type"] == "FAILED", newest["state_type"]
        wanted = {"flow_runs": {"id": {"any_": [newest["id"]]}}}
        tasks = place.call("POST", "/task_runs/count", wanted)
        assert tasks == 0, f"{tasks} tasks were started"
        return " ".join(str(newest["state"]["message"]).split())
    assert _pipelines(place) == pipelines, "a run was started"
    whole = re.search(r"\S+: 1 problem .*", text)
    return whole[0] if whole else last_line(done.said)


def _pipelines(place: Place) -> int:
    return int(place.call("POST", "/flow_runs/count", {"flows": {"name": {"any_": ["pipeline"]}}}))


def _newest_pipelines(place: Place) -> list[dict[str, Any]]:
    wanted = {"flows": {"name": {"any_": ["pipeline"]}}, "sort": "START_TIME_DESC", "limit": 1}
    began = {"start_time": {"is_null_": False}}
    found: list[dict[str, Any]] = place.call("POST", "/flow_runs/filter", {**wanted, "flow_runs": began})
    return found


def last_line(said: str) -> str:
    """The error of a command."""
    return next((line.strip() for line in reversed(said.splitlines()) if line.strip()), "no output")


def run(place: Place, wanted: Iterable[Case], logs: Path, keep: Callable[[Case, Cell], None]) -> bool:
    """Whether all of them went as they should."""
    good = True
    logs.mkdir(parents=True, exist_ok=True)
    for case in wanted:
        cell = play(place, case, logs / f"{case.model}.txt")
        keep(case, cell)
        good = good and cell.is_good
    return good


def stored(place: str) -> dict[str, Cell]:
    path = RESULTS / f"{place}.json"
    found = json.loads(path.read_text()) if path.exists() else {}
    return {name: Cell(**each) for name, each in found.items()}


def store(case: Case, cell: Cell) -> None:
    """Adds a cell, in the order of the cases, and writes the tables again."""
    cells = {**stored(case.place), case.name: cell}
    names = [each.name for each in cases() if each.place == case.place]
    ordered = {name: asdict(cells[name]) for name in names if name in cells}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{case.place}.json").write_text(json.dumps(ordered, indent=1, ensure_ascii=False) + "\n")
    PAGE.write_text(updated(PAGE.read_text()))


def missing(place: str, named: Sequence[str], *, again: bool) -> list[Case]:
    """The cases of a place to run: those that have not gone well on this code, unless they are asked for again."""
    found, code = stored(place), code_digest()
    good = {name for name, cell in found.items() if cell.is_good and cell.code == code}
    here = [case for case in cases() if case.place == place and (not named or case.name in named)]
    return [case for case in here if again or case.name not in good]


def table() -> str:
    """The runs that complete, by way and by what is sent; then the wrong ones, by way and place."""
    found = {place: stored(place) for place in PLACES}
    design = {(case.way, case.sent): case for case in cases() if not case.is_wrong}
    lines = ["| started by | " + " | ".join(SENT.values()) + " |", "|---" * (len(SENT) + 1) + "|"]
    for way, title in WAYS.items():
        row = [_right(design[way, sent], found) for sent in SENT]
        lines.append(f"| {title} | " + " | ".join(row) + " |")
    lines += ["", "| started by | " + " | ".join(PLACES.values()) + " |", "|---" * (len(PLACES) + 1) + "|"]
    notes: list[str] = []
    wrong = {(case.way, case.place): case for case in cases() if case.is_wrong}
    for way, title in WAYS.items():
        row = [_wrong(wrong[way, place], found, notes) for place in PLACES]
        lines.append(f"| {title} | " + " | ".join(row) + " |")
    codes = {cell.code for cells in found.values() for cell in cells.values()}
    states = [
        f"These runs were made on {len(codes)} states of Serin's sources. `make ways` repeats those that",
        "were not made on the current one.",
    ]
    return "\n".join([*lines, "", *notes, "", *states, "", *_seconds()]).rstrip()


def store_sending(place: str, seconds: Mapping[str, float]) -> None:
    """Keeps what sending takes at a place, and writes the tables again."""
    found = {**_sending(), place: dict(seconds)}
    RESULTS.mkdir(exist_ok=True)
    _SENDING.write_text(json.dumps(found, indent=1) + "\n")
    PAGE.write_text(updated(PAGE.read_text()))


def _sending() -> dict[str, dict[str, float]]:
    return dict(json.loads(_SENDING.read_text())) if _SENDING.exists() else {}


def _seconds() -> list[str]:
    """What sending by content takes, in seconds."""
    rows = ["| seconds that sending takes | where it is sent | on the worker |", "|---|---|---|"]
    for place, found in _sending().items():
        for which, title in (("first", "new content"), ("second", "the same content again")):
            values = [f"{found[f'{which}_{side}']:.2f}" for side in ("sender", "worker")]
            rows.append(f"| {PLACES[place]}, {title} | " + " | ".join(values) + " |")
        if "path_worker" in found:
            rows.append(f"| {PLACES[place]}, a path instead | 0 | {found['path_worker']:.2f} |")
    return rows if _sending() else []


def _right(case: Case, found: dict[str, dict[str, Cell]]) -> str:
    cell = found[case.place].get(case.name)
    where = PLACES[case.place]
    if cell is None:
        return f"{where}: not run"
    result = f"exit {cell.exit}" if cell.is_good else f"**failed**, exit {cell.exit}"
    return f"{where}, {cell.form}: {result}, {cell.seconds:.0f} s"


def _wrong(case: Case, found: dict[str, dict[str, Cell]], notes: list[str]) -> str:
    cell = found[case.place].get(case.name)
    if cell is None:
        return f"{WRONG[case.sent]}: not run"
    said = " ".join(cell.said.replace("|", "/").split())
    notes.append(f"{len(notes) + 1}. {WAYS[case.way]}, {PLACES[case.place]}: {said}")
    return f"{WRONG[case.sent]}: {cell.outcome}, exit {cell.exit} ({len(notes)})"


def updated(page: str) -> str:
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{rest.split(END)[1]}"
