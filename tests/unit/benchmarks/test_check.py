"""`make bench-check`: how often its statistics raise a false alarm and find a loss, and what follows from it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.check import __main__ as check
from benchmarks.check.kept import KeptRatios, newest, read_kept, write_kept
from benchmarks.check.measure import Check, Ratios
from benchmarks.check.statistics import compare
from benchmarks.race import SLOW_OURS, Lap, race

RUNS, ROUNDS, TRIALS, DRAWS = 5, 25, 60, 500


def rounds(random: np.random.Generator, *, speed: float, run_sd: float, round_sd: float) -> list[float]:
    """A run's ratios: an effect that all its rounds share, noise in each, and an outlier in one of ten."""
    noise = random.normal(0, round_sd, ROUNDS) + random.normal(0, run_sd)
    noise += (random.random(ROUNDS) < 0.1) * random.normal(0, 0.5, ROUNDS)
    return list(0.8 * speed * np.exp(noise))


def share_lost(*, speed: float, run_sd: float, round_sd: float) -> float:
    """The share of simulated checks, of one ratio, in which both measurements say that it is lost."""
    random, lost = np.random.default_rng(11), 0
    for trial in range(TRIALS):
        earlier = [rounds(random, speed=1, run_sd=run_sd, round_sd=round_sd) for _ in range(RUNS)]
        twice = (rounds(random, speed=speed, run_sd=run_sd, round_sd=round_sd) for _ in range(2))
        lost += all(compare(earlier, now, seed=trial, draws=DRAWS).verdict == "lost" for now in twice)
    return lost / TRIALS


@pytest.mark.parametrize("run_sd", [0.0, 0.02, 0.05])
def test_noise_alone_is_hardly_ever_a_loss(run_sd: float) -> None:
    assert share_lost(speed=1.0, run_sd=run_sd, round_sd=0.08) <= 1 / TRIALS


@pytest.mark.parametrize(("run_sd", "least"), [(0.0, 0.99), (0.02, 0.95)])
def test_a_slowdown_of_a_fifth_is_found(run_sd: float, least: float) -> None:
    assert share_lost(speed=1 / 1.2, run_sd=run_sd, round_sd=0.08) >= least


def test_a_gain_is_no_loss_and_too_few_runs_are_refused() -> None:
    random = np.random.default_rng(3)
    earlier = [rounds(random, speed=1, run_sd=0.01, round_sd=0.02) for _ in range(RUNS)]
    assert compare(earlier, rounds(random, speed=1.3, run_sd=0.01, round_sd=0.02)).verdict == "gained"
    with pytest.raises(ValueError, match="3 are needed"):
        compare(earlier[:2], earlier[2])


class Scripted(Check):
    """Gives the same ratios at each measurement, and counts them."""

    def measure(self, say: object) -> Ratios:
        measured.append(self.benchmark)
        return {f"{self.benchmark} case limit": list(next(answers[self.benchmark]))}


measured: list[str] = []
answers: dict[str, object] = {}


def test_only_a_loss_that_the_second_measurement_shows_too_counts() -> None:
    random = np.random.default_rng(5)

    def some(speed: float) -> list[float]:
        return rounds(random, speed=speed, run_sd=0.01, round_sd=0.02)

    names = ("equal", "once", "slower")
    kept = [
        KeptRatios(date="", commit="", ratios={f"{name} case limit": some(1.0) for name in names})
        for _ in range(RUNS)
    ]
    answers.update(
        equal=iter([some(1.0)]), once=iter([some(0.7), some(1.0)]), slower=iter([some(0.8), some(0.8)])
    )
    measured.clear()
    checks: list[Check] = [Scripted(benchmark=name, reference="limit", repetitions=25) for name in names]
    found = check.judge(checks, kept, lambda _: None)
    assert {name.split()[0]: change.verdict for name, change in found.items()} == {
        "equal": "equal",
        "once": "equal",
        "slower": "lost",
    }
    assert measured == ["equal", "once", "slower", "once", "slower"]


def test_runs_are_kept_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "results" / "check-x.json"
    assert read_kept(path) == []
    run = KeptRatios(date="2026-11-16", commit="abc", ratios={"loader resident limit": [0.5, 0.123456]})
    write_kept(path, [run])
    (found,) = read_kept(path)
    assert (found.commit, found.ratios) == ("abc", {"loader resident limit": [0.5, 0.1235]})


def test_the_newest_runs_of_each_ratio_are_kept() -> None:
    def run(commit: str, *names: str) -> KeptRatios:
        return KeptRatios(date="", commit=commit, ratios={name: [1.0] for name in names})

    runs = [run("1", "loader"), run("2", "loader", "etl"), run("3", "loader"), run("4", "loader")]
    found = {run.commit: sorted(run.ratios) for run in newest(runs, 2)}
    assert found == {"2": ["etl"], "3": ["loader"], "4": ["loader"]}


class Quick:
    def run(self, request: object) -> Lap:
        return Lap(seconds=0.01, peak_bytes=0, cpu_s=0.02)


def test_a_deliberate_slowdown_is_ours_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SLOW_OURS, "0.2")
    found = race({"ours": ("ours", Quick()), "eager": ("peer", Quick())}, lambda *_: {}, lambda *_: None)
    assert all(seconds >= 0.012 for seconds in found["ours"].seconds)
    assert all(0.024 <= seconds < 0.03 for seconds in found["ours"].cpu_seconds)
    assert (found["eager"].seconds, found["eager"].cpu_seconds) == ([0.01] * 7, [0.02] * 7)
