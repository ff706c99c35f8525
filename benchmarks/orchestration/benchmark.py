"""Measures what Prefect costs: the same stages as plain functions, as a flow in one process, through a worker, and
placed.

Every lap has a table with other rows: stage keys depend on the content of a table, so the same rows would be found, not
computed. The benchmark checks that each lap has made one training and one version. Then each lap runs again with
nothing changed. All run beside one stack, whose server is used by the three ways that need it.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

from benchmarks.machine import machine
from benchmarks.orchestration.place import Lap, Say, stack_in, write_pipeline
from benchmarks.report import Report

WAYS = ("bare", "inline", "worker", "placed")
STAGES = 3  # etl, train and export; with their parent four processes, one after the other
SHARE = 0.05

Laps = dict[str, list[Lap]]


def measure(*, full: bool, say: Say) -> Report:
    rows, epochs, laps = (2_000_000, 6, 5) if full else (100_000, 1, 1)
    done: dict[str, list[Lap]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory(prefix="serin-bench-") as scratch, stack_in(Path(scratch), say) as place:
        say("warm-up, so that no contender is the first to read the libraries from disk")
        if full:
            for number, way in enumerate(WAYS):
                spec = write_pipeline(Path(scratch) / f"first-{way}", rows=rows // 10, epochs=1, seed=number)
                place.lap(way, spec)
        else:
            place.run("benchmarks.orchestration.libraries")
        for number in range(laps):
            turn = number % len(WAYS)
            for way in (*WAYS[turn:], *WAYS[:turn]):  # rotate who comes first
                seed = 100 + number * len(WAYS) + WAYS.index(way)
                spec = write_pipeline(
                    Path(scratch) / f"{way}-{number}", rows=rows, epochs=epochs, seed=seed
                )  # fmt: skip
                again = way != "bare"  # a plain export runs again even if nothing changed
                done[way].append(lap := place.lap(way, spec, again=again))
                say(
                    f"{way}: {lap.seconds:.1f} s"
                    + (f", nothing changed {lap.again_s:.1f} s" if again else "")
                )
    return Report(
        benchmark="orchestration",
        mode="full" if full else "quick",
        environment={
            "machine": machine(),
            "versions": {name: version(name) for name in ("prefect", "torch", "sqlalchemy")},
            "rows": rows,
            "epochs": epochs,
            "laps": laps,
        },
        cases={},
        line=key_figures(done),
        notes=[
            "seconds of whole commands, with process start-up; the stack is already up",
            "bare: the same stages as plain functions in one process; ratios are within a lap, the median is shown",
            "a worker's process has its imports done beforehand, the bare process has not",
            "a longer pipeline has the same seconds of overhead and a smaller share",
            "quick: one lap; placed_stage_s is then a third of the difference of two commands, and --full is steadier",
            "*_5_percent_s: how long a pipeline must be (computed, not run) for that share to be 5%",
            "bare has no figure for 'nothing changed': a plain export runs again",
        ],
        tables=table(done),
        figures={way: [asdict(lap) for lap in laps] for way, laps in done.items()},
    )


def key_figures(done: Laps) -> dict[str, float]:
    """Returns shares and differences against the bare stages of the same lap, as medians over laps."""
    ways = [way for way in WAYS if way != "bare"]
    placed_s = _middle(done, "placed", "bare", "seconds", _difference)
    return {
        "flow_overhead": _middle(done, "inline", "bare", "call_s", _share),
        **{f"{way}_overhead": _middle(done, way, "bare", "seconds", _share) for way in ways},
        "inline_cpu_overhead": _middle(done, "inline", "bare", "cpu_s", _share),
        "bare_s": _median(done["bare"], "seconds"),
        "flow_overhead_s": _middle(done, "inline", "bare", "call_s", _difference),
        **{f"{way}_overhead_s": _middle(done, way, "bare", "seconds", _difference) for way in ways},
        "placed_stage_s": _middle(done, "placed", "worker", "seconds", _difference) / STAGES,
        "placed_5_percent_s": max(0.0, placed_s / SHARE),
        "unchanged_flow_s": _median(done["inline"], "again_call_s"),
        "unchanged_worker_s": _median(done["worker"], "again_s"),
        "unchanged_placed_s": _median(done["placed"], "again_s"),
    }


def _share(one: float, other: float) -> float:
    return one / other - 1


def _difference(one: float, other: float) -> float:
    return one - other


def _median(laps: list[Lap], figure: str) -> float:
    return statistics.median(getattr(lap, figure) for lap in laps)


def _middle(done: Laps, way: str, other: str, figure: str, compare: Callable[[float, float], float]) -> float:
    pairs = zip(done[way], done[other], strict=True)
    return statistics.median(compare(getattr(one, figure), getattr(two, figure)) for one, two in pairs)


def table(done: Laps) -> list[str]:
    lines = [f"  {'':<14}{'seconds':>10}{'overhead':>22}{'nothing changed':>18}"]
    for way in WAYS:
        lines += _row(way, done, way, "seconds", "again_s")
        if way in ("bare", "inline"):
            lines += _row(f"{way}, call", done, way, "call_s", "again_call_s")
    return [*lines, ""]


def _row(label: str, done: Laps, way: str, figure: str, again: str) -> list[str]:
    head = f"  {label:<14}{_median(done[way], figure):>8.1f} s"
    if way == "bare":
        return [head]
    difference, share = (_middle(done, way, "bare", figure, compare) for compare in (_difference, _share))
    return [f"{head}{difference:>10.1f} s{share:>10.1%}{_median(done[way], again):>16.1f} s"]
