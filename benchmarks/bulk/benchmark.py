"""The bulk benchmark: many files scored into many files, against ONNX Runtime on the same rows in memory."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from benchmarks.child import Child
from benchmarks.machine import machine
from benchmarks.race import EVERYTHING, Choice, Lap, Result, Role, Unequal, race
from benchmarks.report import Report
from serin.export.build import export_model
from serin.scoring.session import has_device
from serin.store.store import Store
from tests.unit.export.small_dataset import flights, make_trained

ROLES: dict[str, Role] = {"ours": "ours", "scheduled": "ours", "pandas": "peer", "limit": "limit"}
FILES = 16
APART = 1e-3  # of the mean score: on a GPU products are rounded to TF32


def measure(*, full: bool, say: Callable[[str], None], choice: Choice = EVERYTHING) -> Report:
    roles = choice.of(ROLES)
    on_gpu = bool(machine()["gpus"]) and has_device("cuda")
    rows = (16_000_000 if full else 800_000) if on_gpu else (2_000_000 if full else 320_000)
    rows = int(rows * choice.times_the_data)
    places = ("cpu", "cuda") if on_gpu else ("cpu",)
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        bundle = _export(Path(scratch))
        folder = Path(scratch) / "rows"
        folder.mkdir()
        table = flights(rows // FILES)
        for number in range(FILES):
            pq.write_table(table, folder / f"{number:02d}.parquet", row_group_size=65_536)
        say(f"{rows:,} rows in {FILES} files (one file, copied)")
        runners: dict[str, tuple[Role, Child]] = {}
        for place in places:
            for name, role in _roles(roles, place, places).items():
                child = Child("benchmarks.bulk.contenders", python=sys.executable, threads=choice.cores)
                runners[f"{place} {name}"] = (role, stack.enter_context(child))
        versions = {name: child.versions for name, (_, child) in runners.items()}
        asked = {"bundle": bundle, "rows": str(folder), "scratch": scratch}
        results = _race(runners, asked, rows, choice, say)
    cases = {
        place: {name: results[f"{place} {name}"] for name in _roles(roles, place, places)} for place in places
    }
    last = cases[places[-1]]
    line = {name: last[name].times_as_long_as(last["ours"]) for name in roles if name != "ours"}
    line["rows_per_s"] = rows / last["ours"].median_s
    if on_gpu:
        line["cpu"] = cases["cpu"]["ours"].times_as_long_as(last["ours"])
    return Report(
        benchmark="bulk",
        mode="full" if full else "quick",
        environment={"machine": machine(), "threads": choice.cores, "versions": versions, "rows": rows},
        cases=cases,
        line=line,
        notes=[] if on_gpu else ["no GPU that ONNX Runtime can use: the CPU alone"],
    )


def _roles(roles: dict[str, Role], place: str, places: tuple[str, ...]) -> dict[str, Role]:
    """All contenders on the last device; on a CPU beside a GPU only Serin, for the ratio of both."""
    return roles if place == places[-1] else {"ours": "ours"}


def _export(scratch: Path) -> str:
    trained = make_trained(
        scratch / "trained", "binary", export={"target": "gpu"}, model={"kind": "mlp", "hidden": [512, 256]}
    )
    store = Store(str(scratch / "store"))
    return export_model(trained.spec, trained.checkpoint, trained.dataset, store=store, lineage={}).path


def _race(
    runners: Mapping[str, tuple[Role, Child]],
    told: Mapping[str, Any],
    rows: int,
    choice: Choice,
    say: Callable[[str], None],
) -> dict[str, Result]:
    sums: dict[str, float] = {}

    def request(name: str, _turn: int) -> Mapping[str, Any]:
        place, _, who = name.partition(" ")
        return {"who": who, "place": place, "threads": choice.cores, **told}

    def accept(name: str, _asked: Mapping[str, Any], lap: Lap) -> None:
        sums[name] = lap.answer["sum"]
        if lap.answer["rows"] != rows or max(sums.values()) - min(sums.values()) > APART * rows:
            raise Unequal(f"{name} scored {lap.answer['rows']:,} of {rows:,} rows; sums of scores: {sums}")

    return race(runners, request, accept, repetitions=choice.repetitions, say=say)
