"""Ten placed pipelines at the same time in one stack: what they cost compared with one alone, and what each leaves in
Prefect's database.

    python -m benchmarks.orchestration.crowd

The models are small trees, so that most of the time is orchestration; the CPU is shared by all, so the time for ten is
compared with ten times that of one.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.child import ContenderFailed
from benchmarks.orchestration.place import Place, Say, stack_in, write_pipeline
from benchmarks.report import last_line
from serin.host.state import running_stack
from serin.prefect.follow import begin_run
from serin.prefect.login import stack_api

TOGETHER = 10
ROWS = 2_000
_LOOK_S, _LONGEST_S, _SETTLED_S = 0.25, 600.0, 3.0
_LOCKED = "database is locked"
# What a pipeline leaves. Heartbeats of workers and tokens of clients depend on time, not on pipelines.
_TABLES = (
    "flow_run", "flow_run_state", "task_run", "task_run_state", "log", "artifact", "events", "event_resources",
)  # fmt: skip
_ENDED = """
    SELECT state_type, (julianday(end_time) - julianday(created)) * 86400 FROM flow_run
    WHERE id IN ({}) AND state_type IN ('COMPLETED', 'FAILED', 'CRASHED', 'CANCELLED')
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Crowd:
    """Pipelines that were requested at the same time."""

    seconds: list[float]  # from the request to the end of each, in the order of their ends
    wall_s: float
    rows: dict[str, float]  # per pipeline, by table
    locked: int  # entries of the server's log about refused writes; those that clients repeat are not logged


def measure_crowd(place: Place, say: Say) -> tuple[dict[str, float], dict[str, Any], list[str]]:
    """Returns key figures, all figures and a table."""
    run_together(place, "first", 1)  # imports, and Prefect's caches
    alone = [run_together(place, f"alone-{number}", 1) for number in range(2)]
    say(f"alone: {', '.join(f'{crowd.wall_s:.1f} s' for crowd in alone)}")
    many = run_together(place, "many", TOGETHER)
    say(f"{TOGETHER} together: {many.wall_s:.1f} s")
    line = {
        "alone_s": statistics.mean(crowd.wall_s for crowd in alone),
        "together_per_pipeline_s": many.wall_s / TOGETHER,
        "together_last_s": max(many.seconds),
        "rows_alone": statistics.mean(sum(crowd.rows.values()) for crowd in alone),
        "rows_together": sum(many.rows.values()),
        "locked": float(sum(crowd.locked for crowd in (*alone, many))),
    }
    named = [*((f"alone, {number}", crowd) for number, crowd in enumerate(alone, 1)), ("together", many)]
    head = f"  {'':<14}{'wall':>10}{'per pipeline':>14}{'first':>10}{'last':>10}{'rows':>8}{'locked':>8}"
    return line, {name: _plain(crowd) for name, crowd in named}, [head, *(_row(*each) for each in named), ""]


def _plain(crowd: Crowd) -> dict[str, Any]:
    return {
        "seconds": crowd.seconds, "wall_s": crowd.wall_s, "rows": crowd.rows, "locked": crowd.locked,
    }  # fmt: skip


def _row(name: str, crowd: Crowd) -> str:
    return (
        f"  {name:<14}{crowd.wall_s:>8.1f} s{crowd.wall_s / len(crowd.seconds):>12.1f} s"
        f"{crowd.seconds[0]:>8.1f} s{crowd.seconds[-1]:>8.1f} s{sum(crowd.rows.values()):>8.0f}{crowd.locked:>8}"
    )


def run_together(place: Place, name: str, count: int) -> Crowd:
    """Requests pipelines with different rows at once, and waits for the end of all."""
    home = place.folder / "home"
    specs = [
        write_pipeline(
            place.folder / f"{name}-{number}",
            rows=ROWS,
            epochs=1,
            seed=_seed(name, number),
            model={"kind": "xgboost"},
        )
        for number in range(count)
    ]
    before, locked = _rows(home), _locked(home)
    api, began = stack_api(running_stack(home)), time.perf_counter()
    runs = [
        begin_run(api, "pipeline/placed", {"spec": str(spec), "serve": False}, tags=[])["id"]
        for spec in specs
    ]
    seconds = _wait(home, runs)
    wall_s = time.perf_counter() - began
    time.sleep(_SETTLED_S)  # events and logs are written in batches
    rows = {table: (now - before[table]) / count for table, now in _rows(home).items()}
    return Crowd(seconds=seconds, wall_s=wall_s, rows=rows, locked=_locked(home) - locked)


def _seed(name: str, number: int) -> int:
    return sum(name.encode()) * 1000 + number


def _wait(home: Path, runs: Sequence[str]) -> list[float]:
    deadline = time.monotonic() + _LONGEST_S
    wanted = _ENDED.format(", ".join("?" for _ in runs))
    while time.monotonic() < deadline:
        ended = _select(home, wanted, runs)
        if bad := [state for state, _ in ended if state != "COMPLETED"]:
            raise ContenderFailed(
                f"of {len(runs)} pipelines at the same time, some ended as {', '.join(bad)}"
            )
        if len(ended) == len(runs):
            return sorted(seconds for _, seconds in ended)
        time.sleep(_LOOK_S)
    raise ContenderFailed(f"{len(runs)} pipelines at the same time took more than {_LONGEST_S:.0f} s")


def _rows(home: Path) -> dict[str, int]:
    return {table: _select(home, f"SELECT count(*) FROM {table}", ())[0][0] for table in _TABLES}


def _select(home: Path, query: str, values: Sequence[str]) -> list[Any]:
    """Reads the server's database beside it, which stops nobody: it has a write-ahead log."""
    file = home / "prefect" / "prefect.db"
    with contextlib.closing(sqlite3.connect(f"{file.as_uri()}?mode=ro", uri=True, timeout=60)) as opened:
        return opened.execute(query, values).fetchall()


def _locked(home: Path) -> int:
    """Counts errors, not lines: a traceback shows SQLite's error and SQLAlchemy's."""
    log = (home / "logs" / "prefect.log").read_text(encoding="utf-8", errors="replace")
    return sum(line.startswith("sqlalchemy.exc.") and _LOCKED in line for line in log.splitlines())


def main() -> None:
    argparse.ArgumentParser(prog="python -m benchmarks.orchestration.crowd", description=__doc__).parse_args()
    began = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # runs the clean-up

    def say(text: str) -> None:
        print(f"[{time.monotonic() - began:5.0f} s] {text}", file=sys.stderr, flush=True)

    with (
        tempfile.TemporaryDirectory(prefix="serin-bench-") as scratch,
        stack_in(Path(scratch), say) as place,
    ):
        line, figures, table = measure_crowd(place, say)
    print("\n".join(table))
    for name, crowd in figures.items():
        print(f"note: rows, {name}: {crowd['rows']}")
    print(f"note: {os.cpu_count()} cores")
    print(last_line(line))


if __name__ == "__main__":
    main()
