"""The claims benchmark: what is often said of training and serving, each with a run and a verdict.

    python -m benchmarks claims

Claims about a GPU are left out where there is none; on a machine with one, those that do not depend on the device are
for `--full`. It is not a race: each claim compares what Serin itself does in two
ways, at equal quality, and is true, false, or depends on the case.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.claims.claim import Claim
from benchmarks.claims.latency import joined, runtime
from benchmarks.claims.learning import devices, precision, schedule
from benchmarks.claims.preparation import preparation
from benchmarks.claims.smaller import int8, pruning
from benchmarks.claims.trainings import Place, Settings, Table, train
from benchmarks.machine import machine
from benchmarks.quality.data_sets import FLIGHTS_TABLES, prepare
from benchmarks.race import EVERYTHING, Choice
from benchmarks.report import Report
from benchmarks.training.benchmark import PEERS
from serin.errors import SerinError
from serin.machine.hardware import core_count

ROWS = {"cuda": 2**20, "cpu": 2**17}


def measure(*, full: bool, say: Callable[[str], None], choice: Choice = EVERYTHING) -> Report:
    place: Place = "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        os.environ["SERIN_HOME"] = str(folder / "home")
        table = Table.generated(folder / "table", ROWS[place] * (4 if full else 1))
        train(
            table, Settings(hidden=(64,), rows=2**14, batch_rows=1024, epochs=1, place=place)
        )  # starts the device
        say(f"{table.rows:,} rows on {place}")
        on_device: dict[str, Callable[[], Claim]] = {
            "precision": lambda: precision(table, place),
            **({"devices": lambda: devices(table)} if place == "cuda" else {}),
            "runtime": lambda: runtime(table, place),
            "joined": lambda: joined(table, place),
        }
        anywhere: dict[str, Callable[[], Claim]] = {
            "schedule": lambda: schedule(_flights(folder, table.rows // 2, say), place),
            "pruning": lambda: pruning(table, place),
            "int8": lambda: int8(table, place),
            "preparation": lambda: preparation(folder, place),
        }
        asked = on_device | anywhere if full or place == "cpu" else on_device
        claims, notes = _measured({name: ask for name, ask in asked.items() if choice.has_case(name)}, say)
    if place == "cpu":
        notes.append("no GPU: without `devices`; mixed precision and joined requests on the CPU")
    return Report(
        benchmark="claims",
        mode="full" if full else "quick",
        environment={"machine": machine(), "threads": core_count(), "torch": torch.__version__},
        cases={},
        line={name: value for claim in claims for name, value in claim.figures.items()},
        notes=notes,
        tables=[claim.show() for claim in claims],
        figures={claim.name: {**asdict(claim), "verdict": claim.verdict} for claim in claims},
    )


def _flights(folder: Path, rows: int, say: Callable[[str], None]) -> dict[str, Table]:
    """The tables of flights that are here, split by time: `make bench-setup` fetches them."""
    sets, notes = prepare(folder, full=True, peers=PEERS, say=say, only=FLIGHTS_TABLES)
    for note in notes:
        say(note)
    return {each.name: Table.of_dataset(each.folder, most_rows=rows) for each in sets}


def _measured(
    asked: dict[str, Callable[[], Claim]], say: Callable[[str], None]
) -> tuple[list[Claim], list[str]]:
    """Returns the claims, and of those that could not be measured here the reasons."""
    claims, notes = [], []
    for name, ask in asked.items():
        try:
            claim = ask()
        except (SerinError, RuntimeError, ValueError, AssertionError) as error:
            notes.append(f"{name} was not measured: {type(error).__name__}: {error}")
            say(notes[-1])
            continue
        claims.append(claim)
        say(claim.show())
    return claims, notes
