"""`make bench` and `make bench-check`: goals, false alarms, the page of results, and the processes that measure."""

import json
import sys
from collections import namedtuple
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import numpy as np
import psutil
import pytest

from benchmarks.__main__ import BENCHMARKS
from benchmarks.check import __main__ as check
from benchmarks.check.kept import KeptRatios, newest, read_kept, write_kept
from benchmarks.check.measure import Check, Ratios
from benchmarks.check.statistics import compare
from benchmarks.child import Child, ContenderFailed
from benchmarks.machine import StolenTime, kind_of_machine, machine, name_part
from benchmarks.race import SLOW_OURS, Lap, Result, Role, Unequal, race
from benchmarks.report import Report, last_line, show, write
from benchmarks.runtime.benchmark import TOLERANCE, _against_best, _race, _too_far_off
from benchmarks.scale.curves import Curve
from benchmarks.suite.__main__ import NAMES, parts_of, read_earlier
from benchmarks.suite.goals import GOALS
from benchmarks.suite.parts import ROOT, Goal, Outcome, Part, Verdict, read_figures
from benchmarks.suite.picture import draw, judged_figures, times_the_goal
from benchmarks.suite.runner import Kept
from benchmarks.suite.table import show_goals, show_line


@pytest.fixture
def goals_page(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "generate"))
    import benchmark_goals

    monkeypatch.setitem(sys.modules, "benchmark_goals", benchmark_goals)
    return benchmark_goals


def test_every_benchmark_is_run_and_every_goal_has_one() -> None:
    assert set(GOALS) <= set(BENCHMARKS) == set(NAMES)
    assert [part.command[-1] for part in parts_of(["etl", "loader"])] == ["etl", "loader"]


def test_goals_are_counted_and_those_missed_or_without_a_figure_are_named() -> None:
    part = Part(
        name="etl", command=(), goals={"a": Goal(least=1), "b": Goal(most=2), "c": Goal(least=3)}
    )  # fmt: skip
    outcome = Outcome(name="etl", result="goal missed", seconds=1.0, figures={"a": 1.5, "b": 2.5})
    assert show_goals([outcome], {"etl": part}).splitlines() == [
        "1 of 3 goals met",
        "missed: etl b 2.5 (goal <= 2)",
        "no figure: etl c (goal >= 3)",
    ]


def test_a_figure_says_when_the_host_took_much_of_the_machine() -> None:
    part = Part(name="etl", command=())
    quiet, disturbed = (
        show_line(Outcome(name="etl", result="passed", seconds=1.0, figures={"a": 2.0}, stolen=stolen), part)
        for stolen in (0.01, 0.47)
    )
    assert quiet.endswith("a 2")
    assert disturbed.endswith("a 2; the host took 47% of the CPU time")


def test_of_two_runs_the_one_that_the_host_disturbed_less_is_kept(tmp_path: Path) -> None:
    (part,) = parts_of(["training"])

    def outcome(eager: float | None, stolen: float) -> Outcome:
        figures = {} if eager is None else {"eager": eager}
        return Outcome(name="training", result="passed", seconds=1.0, figures=figures, stolen=stolen)

    kept = Kept([part], path=tmp_path / "cpu-x.json", head={})
    shown = []
    for each in (
        outcome(None, 0.2),
        outcome(0.5, 0.4),
        outcome(1.1, 0.1),
        outcome(0.7, 0.3),
        outcome(None, 0.0),
    ):
        kept.add(each, part)
        (found,) = json.loads(kept.path.read_text())["parts"]
        shown.append(found["figures"].get("eager"))
    assert shown == [None, 0.5, 1.1, 1.1, 1.1]


@pytest.mark.parametrize("result", ["failed", "timed out"])
@pytest.mark.parametrize("first", [True, False])
def test_a_failure_is_never_replaced_by_another_run_of_its_part(
    tmp_path: Path, result: Verdict, first: bool
) -> None:
    (part,) = parts_of(["training"])
    kept = Kept([part], path=tmp_path / "cpu-x.json", head={})
    failed = Outcome(name="training", result=result, seconds=1.0, stolen=0.5)
    passed = Outcome(name="training", result="passed", seconds=1.0, figures={"eager": 1.0})
    for outcome in (failed, passed) if first else (passed, failed, passed):
        kept.add(outcome, part)
    assert [found["result"] for found in json.loads(kept.path.read_text())["parts"]] == [result]


def test_time_that_the_host_took_is_a_share_of_all_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    Times = namedtuple("Times", "user nice system idle iowait irq softirq steal guest guest_nice")
    readings = iter([Times(10, 0, 5, 80, 0, 0, 0, 5, 7, 0), Times(20, 0, 10, 85, 0, 0, 0, 10, 17, 0)])
    monkeypatch.setattr(psutil, "cpu_times", lambda: next(readings))
    assert StolenTime().share() == pytest.approx(5 / 25)


def test_a_run_of_some_keeps_the_figures_of_the_others(tmp_path: Path) -> None:
    path = tmp_path / "cpu-x.json"
    parts = {part.name: part for part in parts_of(["loader", "training"])}
    for commit, names in (("one", ["loader", "training"]), ("two", ["training"])):
        earlier = read_earlier(path, without=set(names))
        chosen = [parts[name] for name in names]
        kept = Kept(chosen, path=path, head={"date": "2026-11-16", "commit": commit}, earlier=earlier)
        for name in names:
            kept.add(
                Outcome(name=name, result="passed", seconds=1.0, figures={"limit": 0.9, "eager": 1.1}),
                parts[name],
            )
    found = json.loads(path.read_text())["parts"]
    assert [(part["name"], part["commit"]) for part in found] == [("loader", "one"), ("training", "two")]
    picture = tmp_path / "cpu-x.svg"
    draw(json.loads(path.read_text()), picture)
    assert "training eager" in picture.read_text()


def test_a_dot_right_of_the_line_has_met_its_goal() -> None:
    document = {"parts": [{"name": "training", "figures": {"eager": 1.1, "limit": 0.45}}]}
    found = {name: times_the_goal(value, goal) for name, value, goal in judged_figures(document)}
    assert found == pytest.approx({"training eager": 1.1, "training limit": 0.5})
    assert times_the_goal(0.01, Goal(most=0.05)) == pytest.approx(5)


def test_a_kind_of_machine_is_a_file_name() -> None:
    assert name_part("Intel(R) Xeon(R) CPU @ 2.0 GHz") == "intel-r-xeon-r-cpu-2-0-ghz"
    assert kind_of_machine() == name_part(kind_of_machine())


def test_the_table_of_goals_is_made_from_the_results(goals_page: ModuleType, tmp_path: Path) -> None:
    assert goals_page.render(tmp_path) == "No results are committed yet."
    document = {
        "machine": {"cores": 2, "cpu": "X", "architecture": "x86_64"},
        "parts": [
            {
                "name": "training",
                "figures": {"eager": 1.1, "limit": 0.45},
                "date": "2026-11-16",
                "commit": "a",
                "stolen": 0.0123,
            }
        ],
    }
    (tmp_path / "cpu-x.json").write_text(json.dumps(document))
    lines = goals_page.render(tmp_path).splitlines()
    assert lines[0].startswith("2 cores, X, x86_64. Goals: 1 met, 1 **missed**, ")
    assert "| training | `eager` | >= 1 | 1.1 | met | 2026-11-16, a | 1.2% |" in lines
    assert "| training | `limit` | >= 0.9 | 0.45 | **missed** | 2026-11-16, a | 1.2% |" in lines
    assert "| loader | `limit` | >= 0.8 |  | not measured |  |  |" in lines
    assert goals_page.render_curves(tmp_path) == "No curves are committed yet."
    curve = Curve(name="rows", what="work by rows", unit="s", expected=1.0, points={10: 1.0, 1000: 100.0})
    document["parts"].append({"name": "scale", "figures": {}, "curves": {"rows": curve.to_json()}})
    (tmp_path / "cpu-x.json").write_text(json.dumps(document))
    row = "| `rows` | work by rows, s | 10: 1, 1,000: 100 | 1.00 | 1.00 | linear, or better |"
    assert row in goals_page.render_curves(tmp_path).splitlines()


def test_the_pages_show_the_committed_results(goals_page: ModuleType) -> None:
    for path, page in goals_page.pages().items():
        assert path.read_text(encoding="utf-8") == page, "run `python docs/generate/benchmark_goals.py`"


def result(role: str, *seconds: float) -> Result:
    laps = tuple(Lap(seconds=s, peak_bytes=2_000_000, answer={"path": "x"}) for s in seconds)
    return Result(role=role, laps=laps)  # type: ignore[arg-type]


REPORT = Report(
    benchmark="etl",
    mode="quick",
    environment={"machine": machine()},
    cases={"3m": {"ours": result("ours", 1.0, 1.0, 1.2), "polars": result("peer", 2.5, 2.5, 2.5)}},
    line={"polars_3m": 2.5, "limit": 0.61234},
    notes=["case lineitem was left out: no generator"],
)


def test_the_last_line_holds_key_value_pairs_and_nothing_else() -> None:
    assert show(REPORT).splitlines()[-1] == "polars_3m=2.5 limit=0.6123"


def test_a_suite_reads_back_what_the_last_line_says() -> None:
    line = {"limit": 0.6123, "pruned_0.5": -0.033, "pruned_0.5_auc": 1e-09, "rows-per-s": 2.5e05}
    assert read_figures(last_line(line)) == line


def test_the_table_names_every_contender_with_its_ratio_to_ours() -> None:
    (row,) = (line for line in show(REPORT).splitlines() if "polars " in line)
    assert row.split() == ["polars", "peer", "2.500", "s", "2.500", "s", "2.500", "s", "2.50", "2", "MB"]


def test_what_was_left_out_is_said() -> None:
    assert "note: case lineitem was left out" in show(REPORT)


def test_the_file_keeps_every_lap_and_the_machine(tmp_path: Path) -> None:
    write(REPORT, tmp_path / "r.json")
    stored = json.loads((tmp_path / "r.json").read_text())
    assert (stored["format"], stored["version"]) == ("serin.benchmark", 1)
    assert stored["cases"]["3m"]["ours"]["seconds"] == [1.0, 1.0, 1.2]
    assert stored["environment"]["machine"]["cores"] >= 1
    assert stored["environment"]["machine"]["cpu_flags"]


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


BUNDLE = dict.fromkeys(("core", "ort_threads", "fp32_core", "fp32_threads", "plain", "weights", "rows"), "")


class Scores:
    """A contender that is off by so much unless it is asked to be exact."""

    def __init__(self, off: float, seconds: float = 1.0, exact_off: float = 0.0) -> None:
        self.off, self.seconds, self.exact_off = off, seconds, exact_off

    def run(self, request: Mapping[str, Any]) -> Lap:
        off = self.exact_off if request["exact"] else self.off
        return Lap(seconds=self.seconds, peak_bytes=0, answer={"scores": [0.5, 0.5 + off]})


def runners(**contenders: tuple[Role, Scores]) -> dict[str, tuple[Role, Child]]:
    return cast("dict[str, tuple[Role, Child]]", contenders)


def test_who_is_too_far_off_in_a_lower_precision_is_raced_in_fp32_ours_like_the_peers() -> None:
    for ours, openvino, expected in ((0.02, 0.0, ["ours"]), (0.001, 0.02, ["openvino"]), (0.001, 0.001, [])):
        found = runners(
            torch_eager=("peer", Scores(0)), ours=("ours", Scores(ours)), openvino=("peer", Scores(openvino))
        )
        exact = _too_far_off(found, 1, BUNDLE)
        assert list(exact) == expected
        _race(found, 1, BUNDLE, exact, full=False)


@pytest.mark.parametrize("name", ["ours", "ours_fp32", "onnxruntime"])
def test_one_tolerance_holds_for_everybody(name: str) -> None:
    role: Role = "ours" if name.startswith("ours") else "peer"
    found = runners(torch_eager=("peer", Scores(0)), **{name: (role, Scores(2 * TOLERANCE))})
    with pytest.raises(Unequal, match=name):
        _race(found, 1, BUNDLE, {}, full=False)


def test_ours_as_fp32_is_judged_against_the_fastest_peer_too() -> None:
    found = runners(
        torch_eager=("peer", Scores(0, 4.0)),
        ours=("ours", Scores(0, 1.0)),
        ours_fp32=("ours", Scores(0, 2.0)),
        openvino=("peer", Scores(0, 3.0)),
    )
    case = _race(found, 1, BUNDLE, {}, full=False)
    assert (_against_best(case, "ours"), _against_best(case, "ours_fp32")) == (3.0, 1.5)


def contender(folder: Path, source: str) -> dict[str, str]:
    (folder / "contender_in_a_test.py").write_text(source, encoding="utf-8")
    return {"PYTHONPATH": str(folder)}


def test_a_contender_answers_its_requests_and_its_time_leaves_the_preparation_out(tmp_path: Path) -> None:
    environment = contender(
        tmp_path,
        "import time\n"
        "calls, clock = [], time.perf_counter\n"
        "def prepare(request): time.perf_counter = lambda: clock() + 3600; calls.append('prepare')\n"
        "def run(request): print('noise'); calls.append('run'); return {'calls': list(calls), 'n': request['n']}\n",
    )
    with Child("contender_in_a_test", python=sys.executable, threads=1, environment=environment) as child:
        first, second = child.run({"n": 1}), child.run({"n": 2})
    assert first.answer == {"calls": ["prepare", "run"], "n": 1}
    assert second.answer == {"calls": ["prepare", "run", "run"], "n": 2}
    assert first.seconds < 3600
    assert 0 < first.cpu_s < 60
    assert first.peak_bytes > 1_000_000
    assert child.versions["numpy"]


def test_a_contender_that_dies_says_why(tmp_path: Path) -> None:
    environment = contender(tmp_path, "def run(request): raise RuntimeError('out of luck')\n")
    with (
        Child("contender_in_a_test", python=sys.executable, threads=1, environment=environment) as child,
        pytest.raises(ContenderFailed, match="out of luck"),
    ):
        child.run({})
