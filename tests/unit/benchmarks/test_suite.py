"""`make bench` and the page that shows its results: goals met and missed, the file of results, the chart."""

from __future__ import annotations

import json
import sys
from collections import namedtuple
from pathlib import Path
from types import ModuleType

import psutil
import pytest

from benchmarks.__main__ import BENCHMARKS
from benchmarks.machine import StolenTime, kind_of_machine, name_part
from benchmarks.scale.curves import Curve
from benchmarks.suite.__main__ import NAMES, parts_of, read_earlier
from benchmarks.suite.goals import GOALS
from benchmarks.suite.parts import ROOT, Goal, Outcome, Part, Verdict
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


def test_the_page_shows_the_committed_results(goals_page: ModuleType) -> None:
    page = goals_page.PAGE.read_text(encoding="utf-8")
    assert page == goals_page.page_from(page), "run `python docs/generate/benchmark_goals.py`"
