"""Serin's drift detector and Evidently on the same weeks of flights: false alarms without drift, and the requests until
each injected drift is found."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd

from benchmarks.child import ROOT, Child, ContenderFailed
from benchmarks.watch.flights_weeks import (
    CATEGORIES,
    DRIFTS,
    NUMBERS,
    Flights,
    as_table,
    drifted,
    learn,
    load,
    resampled_counts,
)
from serin.columns.bins import count_rows
from serin.formats.drift import DriftStatistics
from serin.monitoring.drift.detector import DriftDetector

PEERS = ROOT / ".venv-bench" / "bin" / "python"
WEEKS, BEFORE, AFTER = 200, 2, 4
FACTORS = (1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0)  # of the largest score of calm windows
_DAY_S, _WEEK_S = 86_400.0, 604_800.0
Span = Literal["week", "day"]
Window = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """How Evidently is asked: windows of a week or a day, with its thresholds or with calibrated ones."""

    span: Span
    calibrated: bool

    @property
    def name(self) -> str:
        return f"{self.span}s, {'calibrated' if self.calibrated else 'defaults'}"


RULES = tuple(
    Rule(span=span, calibrated=calibrated) for calibrated in (False, True) for span in ("week", "day")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Raced:
    """`false_alarms`: of Serin in 200 weeks. `held_out`: its alarms in weeks that it did not learn from. `factors`: by
    which the calibrated thresholds exceed the largest score of calm windows, so that Evidently has no more alarms in
    windows that it was not calibrated on. `quiet`: for each rule, windows without drift that were looked at, and those
    with an alarm. `found`: for each drift the median requests until Serin named the column, and by each rule;
    None when it was not found in four weeks."""

    false_alarms: int
    held_out: int
    factors: Mapping[str, float]
    quiet: Mapping[str, tuple[int, int]]
    found: Mapping[str, Mapping[str, float | None]]
    notes: Sequence[str]


def measure_drift(*, full: bool, say: Callable[[str], None]) -> Raced:
    if not PEERS.exists():
        raise ContenderFailed("the peers' environment is missing; run: make bench-setup")
    flights = load()
    known = learn(flights)
    counts = resampled_counts(flights, known, WEEKS, seed=0)
    alarms = DriftDetector(known).observe(counts.starts, counts.counts).alarms
    say(f"drift: {len(alarms)} false alarms of Serin in {WEEKS} weeks without drift")
    held_out = _held_out(flights)
    say(f"drift: {held_out} alarms of Serin in weeks that it did not learn from")
    seeds = range(5) if full else range(1)
    with (
        tempfile.TemporaryDirectory() as folder,
        Child("benchmarks.watch.evidently_peer", python=str(PEERS), threads=2) as child,
    ):
        peer = _Peer(child, Path(folder), flights, rows=50_000 if full else 20_000)
        quiet = peer.quiet(range(0, flights.weeks, 1 if full else 2), days_of=1 if full else 3)
        say(f"drift: Evidently has looked at {len(quiet['week'])} weeks without drift")
        factors = {span: _factor(windows, span, held_out) for span, windows in quiet.items()}
        say(f"drift: calibrated to as many alarms, in windows not calibrated on: {factors}")
        limits = {span: _calibrate(windows, factors[span]) for span, windows in quiet.items()}
        found: dict[str, dict[str, float | None]] = {}
        for name in DRIFTS:
            ours = [_ours(flights, known, name, seed) for seed in seeds]
            found[name] = {"Serin": _median(ours), **peer.found(name, limits, seeds)}
            say(f"drift: {name}: {found[name]}")
    judged = {rule.name: _quiet_alarms(quiet[rule.span], _limit(rule, limits)) for rule in RULES}
    return Raced(
        false_alarms=len(alarms), held_out=held_out, factors=factors, quiet=judged, found=found, notes=_NOTES
    )


def _held_out(flights: Flights) -> int:
    """Alarms of Serin in every other week, learned from the weeks between, and the other way round."""
    alarms = 0
    for half in (0, 1):
        own = flights.week % 2 == half
        known = learn(Flights(rows=flights.rows[own], times=flights.times[own], week=flights.week[own]))
        counts = count_rows(known, as_table(flights.rows[~own]), flights.times[~own])
        alarms += len(DriftDetector(known).observe(counts.starts, counts.counts).alarms)
    return alarms


def _factor(windows: Sequence[Window], span: Span, allowed: int) -> float:
    """The smallest factor with at most so many alarms in every other week, calibrated on the weeks between, and the
    other way round."""
    week = np.asarray([each["window"] for each in windows]) // (7 if span == "day" else 1)
    halves = [[each for each, own in zip(windows, week, strict=True) if own % 2 == half] for half in (0, 1)]
    for factor in FACTORS:
        alarms = sum(
            _quiet_alarms(there, _calibrate(here, factor))[1]
            for here, there in (halves, halves[::-1])
            if here and there
        )
        if alarms <= allowed:
            return factor
    return FACTORS[-1]


def _ours(flights: Flights, known: DriftStatistics, name: str, seed: int) -> float | None:
    """Requests from the change to the alarm that names the column; None without one."""
    rows, times, change = drifted(flights, DRIFTS[name], before=BEFORE, after=AFTER, seed=seed)
    counts = count_rows(known, as_table(rows), times)
    for alarm in DriftDetector(known).observe(counts.starts, counts.counts).alarms:
        if alarm.column == DRIFTS[name].column and alarm.at >= change:
            return float(((times >= change) & (times < alarm.at)).sum())
    return None


class _Peer:
    """Evidently's process, asked window by window."""

    def __init__(self, child: Child, folder: Path, flights: Flights, *, rows: int) -> None:
        self._child, self._folder, self._flights = child, folder, flights
        step = max(len(flights.rows) // rows, 1)
        self._reference = folder / "reference.parquet"
        flights.rows.iloc[::step][[*NUMBERS, *CATEGORIES]].to_parquet(self._reference)

    def look(self, rows: pd.DataFrame, window: np.ndarray[Any, np.dtype[Any]]) -> list[Window]:
        path = self._folder / "rows.parquet"
        rows[[*NUMBERS, *CATEGORIES]].assign(window=window).to_parquet(path)
        asked = {
            "reference": str(self._reference),
            "rows": str(path),
            "numbers": list(NUMBERS),
            "categories": list(CATEGORIES),
        }
        found: list[Window] = self._child.run(asked).answer["windows"]
        return found

    def quiet(self, weeks: Sequence[int], *, days_of: int) -> dict[Span, list[Window]]:
        """Windows without drift: these weeks, and the days of every so many of them."""
        flights = self._flights
        own, some = np.isin(flights.week, weeks), np.isin(flights.week, weeks[::days_of])
        day = np.floor((flights.times[some] - flights.times[0]) / _DAY_S).astype(int)
        return {
            "week": self.look(flights.rows[own], flights.week[own]),
            "day": self.look(flights.rows[some], day),
        }

    def found(
        self, name: str, limits: Mapping[Span, Mapping[str, float]], seeds: Sequence[int]
    ) -> dict[str, float | None]:
        by_rule: dict[str, list[float | None]] = {rule.name: [] for rule in RULES}
        for seed in seeds:
            rows, times, change = drifted(self._flights, DRIFTS[name], before=BEFORE, after=AFTER, seed=seed)
            rows, times = rows[times >= change], times[times >= change]
            for span, length, most in (("week", _WEEK_S, AFTER), ("day", _DAY_S, 7)):
                place = np.floor((times - change) / length).astype(int)
                rules = [rule for rule in RULES if rule.span == span]
                windows: list[Window] = []
                first: dict[str, float | None] = {}
                while len(windows) < most and (not first or None in first.values()):
                    own = place == len(windows)
                    windows += self.look(rows[own], place[own])
                    first = {
                        rule.name: _first(windows, DRIFTS[name].column, _limit(rule, limits))
                        for rule in rules
                    }
                for rule in rules:
                    by_rule[rule.name].append(first[rule.name])
        return {rule: _median(found) for rule, found in by_rule.items()}


def _limit(rule: Rule, limits: Mapping[Span, Mapping[str, float]]) -> Mapping[str, float] | None:
    return limits[rule.span] if rule.calibrated else None


def _calibrate(windows: Sequence[Window], factor: float) -> dict[str, float]:
    """Thresholds of scores and of missing values: so many times the largest of these windows."""
    columns = windows[0]["drift"]
    return {
        **{name: factor * max(each["drift"][name][0] for each in windows) for name in columns},
        **{f"missing {name}": factor * max(each["missing"][name][0] for each in windows) for name in columns},
    }


def _is_flagged(window: Window, column: str, limits: Mapping[str, float] | None) -> bool:
    """By the drift score, or by missing values: at the defaults, more than 10% from the reference's share."""
    (score, threshold), (missing, usual) = window["drift"][column], window["missing"][column]
    if limits is None:
        return bool(score >= threshold or abs(missing - usual) > 0.1 * usual)
    return bool(score > limits[column] or missing > limits[f"missing {column}"])


def _first(windows: Sequence[Window], column: str, limits: Mapping[str, float] | None) -> float | None:
    """Requests up to the end of the first window in which the column is flagged."""
    requests = 0
    for window in windows:
        requests += window["rows"]
        if _is_flagged(window, column, limits):
            return float(requests)
    return None


def _quiet_alarms(windows: Sequence[Window], limits: Mapping[str, float] | None) -> tuple[int, int]:
    columns = windows[0]["drift"]
    flagged = sum(any(_is_flagged(each, name, limits) for name in columns) for each in windows)
    return len(windows), flagged


def _median(found: Sequence[float | None]) -> float | None:
    """None when it was not found in half of the tries."""
    value = statistics.median(np.inf if each is None else each for each in found)
    return None if np.isinf(value) else float(value)


_NOTES = (
    "drift: Evidently 0.7.23, the scores of its drift preset; missing values may differ by 10% at its defaults",
    "drift: calibrated thresholds: the largest score without drift, times the smallest factor with which Evidently has",
    "drift: as many alarms as Serin in every other week, when both have seen the weeks between",
    "drift: NannyML 0.13.1 does not install beside the other peers (it needs an older LightGBM)",
)


def table(raced: Raced) -> list[str]:
    names = ["Serin", *(rule.name for rule in RULES)]
    lines = [
        "watch, drift: requests until the column is named (Evidently: windows, thresholds)",
        f"  {'':<34}" + "".join(f"{name:>19}" for name in names),
    ]
    for drift, found in raced.found.items():
        cells = ["not found" if found[name] is None else f"{found[name]:,.0f}" for name in names]
        lines.append(f"  {drift:<34}" + "".join(f"{cell:>19}" for cell in cells))
    quiet = [f"{raced.false_alarms} in {WEEKS} weeks"]
    quiet += [f"{flagged} of {seen}" for seen, flagged in (raced.quiet[name] for name in names[1:])]
    lines.append(f"  {'alarms without drift':<34}" + "".join(f"{cell:>19}" for cell in quiet))
    return [*lines, ""]


def figures(raced: Raced) -> dict[str, Any]:
    return asdict(raced)


def last_line(raced: Raced) -> dict[str, float]:
    """`sooner_than_evidently`: the share of drifts that Serin names at least as soon as Evidently calibrated to as many
    false alarms, with windows of a day and with windows of a week. `sooner_than_defaults`: as Evidently with windows of
    a week at its defaults, which has an alarm in nearly every week without drift."""
    calibrated = [rule.name for rule in RULES if rule.calibrated]
    return {
        "false_alarms": float(raced.false_alarms),
        "held_out_alarms": float(raced.held_out),
        "sooner_than_evidently": _sooner(raced, calibrated),
        "sooner_than_defaults": _sooner(raced, [RULES[0].name]),
    }


def _sooner(raced: Raced, rules: Sequence[str]) -> float:
    sooner = [
        all(_is_sooner(found["Serin"], found[rule]) for rule in rules) for found in raced.found.values()
    ]
    return sum(sooner) / len(sooner)


def _is_sooner(ours: float | None, theirs: float | None) -> bool:
    return ours is not None and (theirs is None or ours <= theirs)
