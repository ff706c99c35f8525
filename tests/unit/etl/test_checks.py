"""Each check holds or is named with the rows that break it; comparisons look at the dataset before."""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from serin.errors import CheckFailed, SpecError
from serin.etl.build import find_dataset
from serin.etl.dataset.compare import distance
from serin.etl.relational.checks import FRESHNESS
from serin.formats.statistics import CategoryStatistics, NumberStatistics
from serin.store.store import Store
from tests.logs import heard
from tests.unit.etl.trips import START, build, spec_of, trips


def built(folder: Path, *checks: dict[str, Any], frame: pd.DataFrame | None = None, **data: Any) -> list[str]:
    chosen = [
        {"columns": ["fare"], "steps": ["fill_median", "normalize"]},
        {"columns": ["taxi"], "steps": ["categorify"]},
    ]
    spec = spec_of(folder, checks=list(checks), frame=frame, features=chosen, **data)
    lines: list[str] = []
    with heard(lines.append):
        build(spec, Store(str(folder / "store")))
    return lines


def test_checks_that_hold_say_nothing(tmp_path: Path) -> None:
    lines = built(
        tmp_path,
        {"column": "taxi", "type": "string", "values": ["t1", "t2", "t3", "ü4"], "max_nulls": 0.2},
        {"column": "zone", "min": 0, "max": 3, "values": [0, 1, 2, 3]},
        {"column": "start", "type": "timestamp", "newest_within": "100000d"},
        {"min_rows": 900, "max_rows": 900},
    )
    assert not [line for line in lines if "warning" in line or "also" in line]


@pytest.mark.parametrize(
    ("check", "says"),
    [
        ({"column": "fare", "type": "int"}, "'fare' breaks type: int: it is a float"),
        (
            {"column": "zone", "min": 1, "max": 2},
            r"'zone' breaks min: 1, max: 2: \d+ of 900 rows; for example \d in row \d",
        ),
        (
            {"column": "taxi", "values": ["t1", "t2"]},
            r"breaks values: \['t1', 't2'\]: .*for example '(t3|ü4)' in row \d",
        ),
        ({"column": "zone", "values": [0, 1, 2]}, r"breaks values: \[0, 1, 2\].*for example 3 in row"),
        (
            {"column": "taxi", "max_nulls": 0.01},
            r"'taxi' breaks max_nulls: 0.01: \d+ of 900 rows are null .*for example row \d",
        ),
        (
            {"column": "trip", "unique": True},
            r"450 rows repeat an earlier one; for example 0 again in row 1, 2 again in row 3",
        ),
        (
            {"column": "start", "newest_within": "7d"},
            r"newest_within: 7d: the newest is 2024-01-30T\d\d:\d\d:00\+00:00",
        ),
        ({"min_rows": 1000}, "the table breaks min_rows: 1,000: there are 900 rows"),
        ({"max_rows": 10}, "the table breaks max_rows: 10: there are 900 rows"),
    ],
)
def test_a_check_that_does_not_hold_is_named_with_its_rows(
    tmp_path: Path, check: dict[str, Any], says: str
) -> None:
    with pytest.raises(CheckFailed, match=says):
        built(tmp_path, check)
    lines = built(tmp_path, check | {"otherwise": "warn"})
    assert [line for line in lines if line.startswith("warning: data.checks")]


def test_all_failures_are_said_and_the_first_is_raised(tmp_path: Path) -> None:
    lines: list[str] = []
    spec = spec_of(tmp_path, checks=[{"column": "zone", "max": 1}, {"min_rows": 1000}])
    with pytest.raises(CheckFailed, match="'zone' breaks max: 1"), heard(lines.append):
        build(spec, Store(str(tmp_path / "store")))
    assert any(line.startswith("also: data.checks: the table breaks min_rows") for line in lines)


def test_freshness_is_asked_again_of_a_dataset_that_is_there(tmp_path: Path) -> None:
    days = (pd.Timestamp.now() - START).days
    spec = spec_of(tmp_path, checks=[{"column": "start", "newest_within": f"{days}d"}])
    store = Store(str(tmp_path / "store"))
    dataset = build(spec, store)
    assert build(spec, store) == dataset
    (Path(dataset.path) / FRESHNESS).write_text('{"start": 0}')
    with pytest.raises(CheckFailed, match="the newest is 1970-01-01"):
        build(spec, store)
    with pytest.raises(CheckFailed, match="the newest is 1970-01-01"):
        find_dataset(spec.data, spec.features, store)


def test_a_dataset_is_compared_with_the_one_before(tmp_path: Path) -> None:
    checks = [
        {"max_row_change": 0.2},
        {"column": "fare", "max_null_change": 0.05, "max_shift": 0.1},
        {"column": "taxi", "max_shift": 0.1},
    ]
    assert any("no earlier dataset" in line for line in built(tmp_path, *checks))
    assert not any("warning" in line for line in built(tmp_path, *checks, frame=trips().iloc[:-50]))
    with pytest.raises(CheckFailed, match=r"max_row_change: 0.2: 400 rows now, 850 in the dataset before"):
        built(tmp_path, *checks, frame=trips().iloc[:400])
    with pytest.raises(CheckFailed, match=r"\(-52\.9%\)"):
        built(tmp_path, *checks, frame=trips().iloc[:400])
    with pytest.raises(
        CheckFailed, match=r"'fare' breaks max_shift: 0.1: \d+\.\d% of the rows are distributed differently"
    ):
        built(tmp_path, *checks, frame=trips().assign(fare=trips()["fare"] * 2))
    with pytest.raises(CheckFailed, match=r"'fare' breaks max_null_change: 0.05: .*% null now"):
        built(tmp_path, *checks, frame=trips().assign(fare=trips()["fare"].where(trips()["zone"] > 0)))
    with pytest.raises(CheckFailed, match=r"'taxi' breaks max_shift"):
        built(tmp_path, *checks, frame=trips().assign(taxi=trips()["taxi"].replace({"t1": "t2"})))


def test_another_pipeline_s_dataset_is_not_the_one_before(tmp_path: Path) -> None:
    checks, store, said = [{"max_row_change": 0.2}], Store(str(tmp_path / "store")), list[str]()
    build(spec_of(tmp_path, checks=checks), store, name="trips")
    few = spec_of(tmp_path, checks=checks, frame=trips().iloc[:400])
    with heard(said.append):
        build(few, store, name="other-trips")
    assert any("no earlier dataset" in line for line in said)
    fewer = spec_of(tmp_path, checks=checks, frame=trips().iloc[:300])
    with pytest.raises(CheckFailed, match="900 in the dataset before"):
        build(fewer, store, name="trips")


def test_only_features_can_be_compared(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="'zone' is not a feature"):
        built(tmp_path, {"column": "zone", "max_shift": 0.1})


def test_distances_are_shares_of_rows() -> None:
    left = NumberStatistics(kind="float", rows=10, nulls=0, edges=(0.0, 1.0, 2.0), counts=(5, 5))
    right = NumberStatistics(kind="float", rows=10, nulls=0, edges=(1.0, 2.0), counts=(10,))
    assert distance(left, left) == 0
    assert distance(left, right) == pytest.approx(0.5)
    one = CategoryStatistics(
        kind="string", rows=4, nulls=0, distinct=2, values=("a", "b"), counts=(2, 2), others=0
    )
    two = CategoryStatistics(
        kind="string", rows=4, nulls=0, distinct=2, values=("a", "c"), counts=(2, 2), others=0
    )
    assert distance(one, two) == pytest.approx(0.5)
    assert distance(one, left) is None
