"""The loader benchmark: one shuffled epoch of a resident table, against torch's DataLoader and index_select alone."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.child import Child
from benchmarks.machine import machine
from benchmarks.race import EVERYTHING, Choice, Lap, Role, Unequal, race
from benchmarks.report import Report
from benchmarks.training.table import make_table

ROLES: dict[str, Role] = {"ours": "ours", "dataloader": "peer", "batchsampler": "peer", "limit": "limit"}
BATCH_ROWS = 8192
EPOCHS = {
    "ours": 32,
    "limit": 32,
}  # in a lap of those that take milliseconds for one; else a lap is its beginning


def measure(*, full: bool, say: Callable[[str], None], choice: Choice = EVERYTHING) -> Report:
    roles = choice.of(ROLES)
    rows = BATCH_ROWS * (64 if full else 16 if machine()["gpus"] else 8)
    versions: dict[str, dict[str, str]] = {}
    expected: list[float] = []
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        table = Path(scratch) / "table"
        make_table(table, rows)
        runners = {}
        for name, role in roles.items():
            child = stack.enter_context(
                Child("benchmarks.loader.contenders", python=sys.executable, threads=choice.cores)
            )
            versions[name] = child.versions
            runners[name] = (role, child)

        def request(name: str, turn: int) -> Mapping[str, Any]:
            epochs = int(EPOCHS.get(name, 1) * choice.times_the_data)
            return {
                "who": name, "table": str(table), "batch_rows": BATCH_ROWS, "epoch": turn * epochs, "epochs": epochs,
            }  # fmt: skip

        def accept(name: str, _asked: Mapping[str, Any], lap: Lap) -> None:
            expected.append(lap.answer["ones"])
            if lap.answer != {"rows": rows, "ones": expected[0]}:
                raise Unequal(f"{name} gave {lap.answer}, not {rows} rows with {expected[0]:.0f} ones")

        results = race(runners, request, accept, repetitions=choice.repetitions, say=say)
    return Report(
        benchmark="loader",
        mode="full" if full else "quick",
        environment={"machine": machine(), "threads": choice.cores, "versions": versions, "rows": rows},
        cases={"resident": results},
        line={name: results[name].times_as_long_as(results["ours"]) for name in roles if name != "ours"},
    )
