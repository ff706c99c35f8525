"""Races and scaling curves: slopes and bends, contenders that do all their work, and outputs that agree."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.etl.outputs import SPLITS, check_equal, output_bytes, read_outputs, write_split
from benchmarks.race import Lap, Result, Role, Unequal, race
from benchmarks.scale import log_curve
from benchmarks.scale.curves import Curve, table
from benchmarks.scale.etl_load import run
from benchmarks.suite.curves_picture import draw_curves
from serin.serving.envoy.access_logs import LOG_FIELDS


class FakeRunner:
    """Takes the seconds it was given, one after the other, and notes when its turn was."""

    def __init__(self, name: str, seconds: list[float], turns: list[str]) -> None:
        self._name, self._seconds, self._turns = name, iter(seconds), turns

    def run(self, request: Mapping[str, Any]) -> Lap:
        self._turns.append(self._name)
        return Lap(seconds=next(self._seconds), peak_bytes=10, answer=dict(request))


def runners(turns: list[str], **seconds: list[float]) -> dict[str, tuple[Role, FakeRunner]]:
    roles: dict[str, Role] = {"ours": "ours", "limit": "limit"}
    return {
        name: (roles.get(name, "peer"), FakeRunner(name, times, turns)) for name, times in seconds.items()
    }


def accept_all(name: str, request: Mapping[str, Any], lap: Lap) -> None:
    pass


def test_every_round_holds_each_contender_once_and_another_begins() -> None:
    turns: list[str] = []
    race(runners(turns, ours=[1.0] * 8, polars=[2.0] * 8, limit=[0.5] * 8), lambda *_: {}, accept_all)
    rounds = [turns[start : start + 3] for start in range(0, len(turns), 3)]
    assert len(rounds) == 8
    assert all(sorted(one) == ["limit", "ours", "polars"] for one in rounds)
    assert [one[0] for one in rounds[:4]] == ["ours", "polars", "limit", "ours"]


def test_the_first_round_warms_up_and_is_not_counted() -> None:
    results = race(runners([], ours=[99.0] + [1.0] * 7), lambda *_: {}, accept_all)
    assert results["ours"].seconds == [1.0] * 7


def test_a_rare_contender_is_compared_with_the_rounds_it_took_part_in() -> None:
    turns: list[str] = []
    ours = [9.0, 1.0, 50.0, 50.0, 2.0, 50.0, 50.0, 4.0]  # the warm-up, then rounds 1 to 7
    found = race(
        runners(turns, ours=ours, dask=[99.0, 3.0, 10.0, 16.0]), lambda *_: {}, accept_all, rare=("dask",)
    )
    assert turns.count("dask") == 4
    assert found["dask"].rounds == (1, 4, 7)
    assert found["dask"].seconds == [3.0, 10.0, 16.0]
    assert found["dask"].times_as_long_as(found["ours"]) == 4.0
    assert found["ours"].times_as_long_as(found["dask"]) == 0.25


def test_no_time_is_accepted_of_an_answer_that_is_not_equal() -> None:
    def accept(name: str, request: Mapping[str, Any], lap: Lap) -> None:
        if name == "polars":
            raise Unequal("polars, train: 3 values, ours has 4")

    with pytest.raises(Unequal, match="polars"):
        race(runners([], ours=[1.0] * 8, polars=[0.1] * 8), lambda *_: {}, accept)


def test_fewer_than_seven_repetitions_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 7"):
        race(runners([], ours=[1.0] * 8), lambda *_: {}, accept_all, repetitions=3)


def test_a_ratio_compares_the_same_round_so_that_a_slow_spell_cancels() -> None:
    slow_spell = [1.0, 1.0, 1.0, 4.0, 4.0, 4.0, 4.0]
    ours = Result(role="ours", laps=tuple(Lap(seconds=s, peak_bytes=0) for s in slow_spell))
    peer = Result(role="peer", laps=tuple(Lap(seconds=2 * s, peak_bytes=0) for s in slow_spell))
    assert peer.times_as_long_as(ours) == 2.0


def curve(points: dict[int, float], expected: float = 1.0) -> Curve:
    return Curve(name="rows", what="work by rows", unit="s", expected=expected, points=points)


def test_the_slope_is_that_of_the_two_largest_sizes() -> None:
    assert curve({10: 5.0, 100: 1.0, 1000: 10.0}).slope == pytest.approx(1.0)
    assert curve({10: 1.0, 100: 10.0, 1000: 100.0}).fitted == pytest.approx(1.0)
    assert curve({100: 1.0, 1000: 1.0}).slope == pytest.approx(0.0)


def test_a_curve_that_rises_more_than_it_should_bends_there() -> None:
    steep = curve({10: 1.0, 100: 10.0, 1000: 400.0})
    assert steep.bends == [1000]
    assert steep.verdict == "steeper than linear up to 1,000"
    assert (
        curve({10: 1.0, 100: 2.0, 1000: 20.0}).verdict == "linear, or better"
    )  # a fixed cost at the beginning
    assert curve({10: 1.0, 100: 2.0}, expected=0.0).bends == [100]
    assert "slope 1.60 at the end" in "\n".join(table([steep]))


def test_each_curve_has_a_picture(tmp_path: Path) -> None:
    document = {
        "parts": [
            {"name": "loader"},
            {"name": "scale", "curves": {"rows": curve({10: 1.0, 100: 9.0}).to_json()}},
        ]
    }
    (path,) = draw_curves(document, tmp_path / "cpu-x.json")
    assert path.name == "cpu-x-curve-rows.svg"
    assert "work by rows" in path.read_text()


def test_a_lap_builds_the_whole_table(tmp_path: Path) -> None:
    folder = tmp_path / "lap"
    found = run({"rows": 500, "columns": 3, "cardinality": 7, "folder": str(folder)})
    assert found["rows"] == 500
    assert found["seconds"] > 0
    assert not folder.exists()


def test_every_file_of_a_log_is_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_curve, "FILE_LINES", 20_000)
    found = log_curve.run({"lines": 60_000, "folder": str(tmp_path)})
    assert 8_000 < found["compared"] < 60_000 * 0.25  # of the candidate's requests, those of whole blocks
    with (tmp_path / "requests.jsonl").open() as log:
        assert {frozenset(json.loads(line)) for line in log} == {frozenset(LOG_FIELDS)}


ANSWER = {"numeric": ["distance"], "categorical": ["origin", "dest"]}


def outputs(folder: Path, *, distance: float = 0.5, code: int = 3) -> dict[str, object]:
    for split in SPLITS:
        write_split(
            folder,
            split,
            numeric=np.array([[distance], [1.5]]),
            codes=np.array([[code, 1], [2, 0]]),
            target=np.array([1, 0]),
            rows=np.array([4, 9]),
        )
    return {**ANSWER, "path": str(folder)}


def test_what_a_peer_writes_is_read_back_column_by_column(tmp_path: Path) -> None:
    read = read_outputs(outputs(tmp_path / "a"))
    assert {name: column.tolist() for name, column in read["test"].items()} == {
        "rows": [4, 9],
        "target": [1.0, 0.0],
        "distance": [0.5, 1.5],
        "origin": [3, 2],
        "dest": [1, 0],
    }
    assert output_bytes(tmp_path / "a") == 3 * (2 * 4 + 4 * 4 + 2 * 4 + 2 * 8)


def test_the_last_bits_of_a_z_score_may_differ(tmp_path: Path) -> None:
    ours = read_outputs(outputs(tmp_path / "a"))
    check_equal("polars", read_outputs(outputs(tmp_path / "b", distance=0.500001)), ours, ["distance"])


@pytest.mark.parametrize("other", [{"distance": 0.51}, {"distance": float("nan")}, {"code": 4}])
def test_another_answer_is_refused_with_its_place(tmp_path: Path, other: dict[str, float]) -> None:
    ours = read_outputs(outputs(tmp_path / "a"))
    theirs = read_outputs(outputs(tmp_path / "b", **other))  # type: ignore[arg-type]
    with pytest.raises(Unequal, match=r"polars, train: (distance|origin) at position 0"):
        check_equal("polars", theirs, ours, ["distance"])


def test_rows_in_another_order_are_refused(tmp_path: Path) -> None:
    ours = read_outputs(outputs(tmp_path / "a"))
    theirs = read_outputs(outputs(tmp_path / "b"))
    theirs["valid"]["rows"] = theirs["valid"]["rows"][::-1]
    with pytest.raises(Unequal, match="polars, valid: rows"):
        check_equal("polars", theirs, ours, ["distance"])
