"""What an export measures for the watch: bins, blocks, tolerances and weights of drift.json, and quality.json."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from serin.columns.bins import count_rows, table_times
from serin.errors import SpecError
from serin.export.drift.build import cover_test_scores, make_statistics, version_statistics
from serin.export.drift.choose_bins import Source
from serin.export.gate.quality import DAY_S, HOUR_S, MINUTE_S, WEEK_S, measure_quality
from serin.formats.bundle import read_manifest, verify_bundle
from serin.formats.drift import FILE, DriftSeries, DriftStatistics, read_drift
from serin.formats.quality import read_quality_reference
from serin.formats.schema import Schema, outputs_of
from serin.formats.wire import RawRows, TrainingRows
from serin.machine.documents import write_facts
from serin.monitoring.drift.detector import DriftDetector
from serin.pipeline.check import check_spec
from serin.pipeline.run_stage import run_export, run_train
from serin.spec.load import load_spec
from serin.spec.monitoring import DriftSpec
from serin.spec.pipeline import PipelineSpec
from tests.fakes.small_pipeline import small_spec
from tests.unit.export.small_dataset import spec_for

WEEK = 604_800.0
SCHEMA = Schema(task="binary", inputs=(), outputs=outputs_of("binary"))
FIRST = 1_699_833_600.0  # a Monday


def rows_of(columns: dict[str, Any], times: Any) -> TrainingRows:
    return TrainingRows(table=pa.table(columns), times=times, total=len(times))


def statistics_of(rows: TrainingRows, **facts: Any) -> DriftStatistics:
    known = {"segments": (), "spec": DriftSpec(), "importance": {}, **facts}
    sources = [Source(name=name, field=name, source="request") for name in rows.table.column_names]
    return make_statistics(rows, sources, **known)


def series_named(statistics: DriftStatistics, name: str) -> DriftSeries:
    names = [statistics.columns[each.column].name for each in statistics.series]
    return statistics.series[names.index(name)]


@pytest.fixture(scope="module")
def dense() -> DriftStatistics:
    """Nine weeks with 250 rows an hour: a plain column, one with a daily wave, one that follows a slow state."""
    random = np.random.default_rng(0)
    times = np.sort(FIRST + random.random(250 * 24 * 63) * 9 * WEEK)
    hour = times / 3600 % 24
    state = np.cumsum(random.normal(0, 0.4, 9 * 168 + 1)) * 0
    for place in range(1, len(state)):  # correlated over about 30 hours
        state[place] = state[place - 1] * np.exp(-1 / 30) + random.normal(0, 0.26)
    slow = state[((times - FIRST) // 3600).astype(int)] + random.normal(0, 0.5, len(times))
    plain = random.choice(["a", "b", "c"], len(times), p=[0.6, 0.3, 0.1])
    wave = np.where(random.random(len(times)) < 0.5 + 0.4 * np.sin(hour / 24 * 2 * np.pi), "day", "night")
    return statistics_of(rows_of({"plain": plain, "wave": wave, "slow": slow}, times))


def test_a_column_without_a_pattern_is_judged_by_the_hour_and_one_with_a_wave_by_the_day(
    dense: DriftStatistics,
) -> None:
    assert series_named(dense, "plain").block == ("hour",) * 4 + ("10 seconds",) * 2, (
        "unseen and null: the shortest"
    )
    assert series_named(dense, "wave").block == ("day",) * 3 + ("10 seconds",) * 2
    slow = series_named(dense, "slow").block
    assert set(slow[:-1]) == {"day"}, "also out of range: a slow column stays there for hours"
    assert slow[-1] == "10 seconds"


def numbers_with_repeats(seed: int, weeks: int, value: float) -> tuple[pa.Table, np.ndarray[Any, Any]]:
    """Weeks of uniform numbers with 250 an hour. Once a week a client repeats one of them for five hours."""
    random = np.random.default_rng(seed)
    times = np.sort(FIRST + random.random(250 * 168 * weeks) * weeks * WEEK)
    hour = ((times - FIRST) // 3600).astype(int) % 168
    repeated = (hour >= 100) & (hour < 105) & (random.random(len(times)) < 0.3)
    return pa.table({"x": np.where(repeated, value, random.random(len(times)))}), times


def test_a_client_that_repeats_another_value_than_in_training_is_no_drift() -> None:
    table, times = numbers_with_repeats(1, 12, 0.02)
    known = statistics_of(TrainingRows(table=table, times=times, total=len(table)))
    assert any(each.quick for each in known.series)
    live = count_rows(known, *numbers_with_repeats(2, 3, 0.98))
    assert not DriftDetector(known).observe(live.starts, live.counts).alarms


def test_a_tolerance_covers_what_weeks_differ_by_and_is_at_least_one_percent(dense: DriftStatistics) -> None:
    assert (dense.origin, dense.weeks) == ("weeks", 8)
    assert dense.kappa is not None
    assert dense.kappa >= 1.25
    assert series_named(dense, "plain").tolerance[:3] == pytest.approx([0.01] * 3, abs=0.003)
    assert max(series_named(dense, "slow").tolerance) > 0.02


def test_a_named_tolerance_and_block_are_used_as_they_are() -> None:
    times = FIRST + np.arange(3000.0) * 60
    rows = rows_of({"x": np.arange(3000) % 7}, times)
    found = statistics_of(rows, spec=DriftSpec(tolerance=0.05, block="minute"))
    assert (found.origin, found.kappa, set(found.series[0].tolerance)) == ("spec", None, {0.05})
    assert set(found.series[0].block) == {"minute", "10 seconds"}, "whatever the rows show"


def test_without_a_time_a_day_is_the_block_of_what_training_had() -> None:
    rows = TrainingRows(table=pa.table({"x": np.arange(3000) % 7}), times=None, total=3000)
    found = statistics_of(rows, spec=DriftSpec(tolerance=0.05))
    assert found.series[0].block == ("day",) * 8 + ("10 seconds",) * 2
    assert (found.first, found.last, found.weeks) == (None, None, 0)


def test_weights_add_up_to_one_and_follow_importance() -> None:
    random = np.random.default_rng(0)
    times = FIRST + np.arange(9000.0) * 600
    columns = {name: random.choice(["p", "q"], 9000) for name in ("good", "bad", "seg")}
    found = statistics_of(
        rows_of(columns, times),
        segments=("seg",),
        importance={"good": 0.3, "bad": -0.1},
        spec=DriftSpec(tolerance=0.05),
    )
    weights = {
        (found.columns[each.column].name, each.segment and found.segment_name(each.segment)): each.weight
        for each in found.series
    }
    assert sum(weights.values()) == pytest.approx(1)
    assert weights["good", None] == pytest.approx((1 / 6 + 1 / 2) / 2)
    assert weights["bad", "seg=p"] == pytest.approx(1 / 6 / 4)
    assert weights["seg", None] == pytest.approx(1 / 6), "a segment column has no segments of itself"


def test_values_that_keep_being_new_are_expected_to_be_unseen() -> None:
    times = FIRST + np.arange(20_000.0) * (9 * WEEK / 20_000)
    known = np.arange(20_000) % 90
    names = np.where(np.arange(20_000) % 10 == 0, 1000 + np.arange(20_000), known).astype(str)
    share = series_named(statistics_of(rows_of({"id": names}, times)), "id").share
    assert share[-2] == pytest.approx(0.1, abs=0.01)
    assert sum(share) == pytest.approx(1, abs=0.02)


def test_edges_are_the_values_themselves_and_nothing_of_training_is_outside() -> None:
    values = np.random.default_rng(0).gamma(2.0, 1.0, 5000).astype(np.float32)
    values[:50] = np.nan
    values[50:60] = 0.0
    times = FIRST + np.arange(5000.0) * (10 * WEEK / 5000)
    found = statistics_of(rows_of({"x": values}, times))
    assert found.series[0].share[-3:-1] == (0.0, 0.0)
    assert found.columns[0].edges[0] == 0.0


def test_odd_columns_have_statistics_too() -> None:
    times = FIRST + np.arange(4000.0) * (10 * WEEK / 4000)
    table = {
        "constant": np.full(4000, 3.5),
        "all null": pa.nulls(4000, pa.float32()),
        "no text": pa.nulls(4000, pa.string()),
        "flag": np.arange(4000) % 2 == 0,
        "infinite": np.where(np.arange(4000) % 2, np.inf, 1.0),
        "when": pa.array((times * 1e6).astype(np.int64)).cast(pa.timestamp("us")),
    }
    rows = rows_of(table, times)
    found = statistics_of(rows)
    counts = count_rows(found, rows.table, times)
    assert DriftDetector(found).observe(counts.starts, counts.counts).alarms == ()
    assert counts.counts.sum() == 4000 * len(table)


@pytest.mark.parametrize("timed", [True, False])
@pytest.mark.parametrize("count", [1, 2, 150, 200, 201, 399, 1500])
def test_a_table_of_any_size_has_statistics_that_it_does_not_drift_from(count: int, timed: bool) -> None:
    times = FIRST + np.linspace(0, 10 * WEEK, count)
    table = pa.table({"x": np.arange(count) * 1.5, "c": [str(place % 3) for place in range(count)]})
    rows = TrainingRows(table=table, times=times if timed else None, total=count)
    found = statistics_of(rows, segments=("c",), spec=DriftSpec(tolerance=0.1))
    assert DriftStatistics.from_json(json.loads(json.dumps(found.to_json()))) == found
    detector = DriftDetector(found)
    for part, own in ((table, times), (table.slice(0, 0), times[:0])):
        counts = count_rows(found, part, own)
        assert detector.observe(counts.starts, counts.counts).alarms == ()


def _never(*_: Any) -> Any:
    pytest.fail("asked although the spec is refused")


def test_the_tolerance_of_a_score_covers_what_test_rows_differ_by() -> None:
    times = FIRST + np.arange(9000.0) * 600
    values = pa.array(np.arange(9000) % 2 == 0)
    rows = TrainingRows(table=pa.table({"x": values, "_answer_y": values}), times=times, total=9000)
    sources = [
        Source(name="x", field="x", source="request"),
        Source(name="y", field="_answer_y", source="score"),
    ]
    found = make_statistics(rows, sources, segments=(), spec=DriftSpec(tolerance=0.02), importance={})
    unlike = pa.array(np.arange(1000) % 10 < 6)
    covered = cover_test_scores(found, pa.table({"x": unlike, "_answer_y": unlike}))
    assert set(series_named(covered, "x").tolerance) == {0.02}, "drift of an input is drift"
    assert series_named(covered, "y").tolerance[:2] == pytest.approx((0.125, 0.125))
    few = cover_test_scores(found, pa.table({"_answer_y": unlike[:100]}))
    assert few == found, "100 rows say too little"


def timed_spec(folder: Path, *, weeks: float, **drift: Any) -> dict[str, Any]:
    spec = small_spec(folder, rows=4000)
    path = Path(spec["data"]["tables"]["parcels"])
    table = pq.read_table(path)
    moments = (FIRST + np.arange(4000) * (weeks * WEEK / 4000)) * 1e6
    times = pa.array(moments.astype(np.int64)).cast(pa.timestamp("us"))
    pq.write_table(table.append_column("sent", times), path)
    spec["data"]["time"] = "sent"
    spec["export"] = {"segments": ["carrier"]}
    spec["monitoring"] = {"capture": {"share": 1, "mask": ["distance"]}, "drift": drift}
    return spec


def test_an_exported_version_has_the_statistics_of_its_inputs_and_scores(home: Path) -> None:
    given = timed_spec(home / "data", weeks=13, block="hour")
    spec = load_spec(given)
    run_train(spec)
    folder = Path(run_export(spec).value.path)
    found = read_drift(folder)
    assert found is not None
    assert FILE in read_manifest(folder).files
    verify_bundle(folder)
    assert [column.name for column in found.columns] == ["weight", "carrier", "score"], "distance is masked"
    assert (found.rows, found.total_rows, found.weeks) == (3200, 3200, 10)
    assert series_named(found, "carrier").share[:3] == pytest.approx((0.5, 0.4, 0.1), abs=0.03)
    assert series_named(found, "weight").share[-1] == pytest.approx(0.02, abs=0.01)
    assert sum(each.segment is not None for each in found.series) == 4, "swift and steady; slow has few rows"
    rows = pq.read_table(given["data"]["tables"]["parcels"])
    counts = count_rows(found, rows, table_times(rows, "sent"))
    assert DriftDetector(found).observe(counts.starts, counts.counts).alarms == ()


def test_too_few_weeks_without_a_named_tolerance_are_refused_by_check_and_export(home: Path) -> None:
    short = timed_spec(home / "data", weeks=9)  # 7.2 weeks of training
    with pytest.raises(SpecError, match=r"monitoring\.drift\.tolerance: is missing: with 7 weeks") as refused:
        check_spec(short)
    assert "for example 0.05" in str(refused.value)
    rows = rows_of({"weight": np.zeros(100)}, FIRST + np.linspace(0, 7.2 * WEEK, 100))
    with pytest.raises(SpecError, match="with 7 weeks of training rows"):
        version_statistics(load_spec(short), SCHEMA, _never, None, lambda _: rows, _never)
    short["monitoring"]["drift"] = {"tolerance": 0.1}
    assert check_spec(short).spec.monitoring.drift is not None


@pytest.mark.parametrize(
    ("monitoring", "refusal"),
    [
        ({"capture": {"share": 1}, "drift": {}}, r"drift\.tolerance: is missing: without data\.time"),
        ({"drift": {"tolerance": 0.1}}, r"needs recorded requests: set monitoring\.capture\.share"),
        ({"capture": {"share": 1}, "drift": {"tolerance": 0}}, "greater than 0"),
        (
            {"capture": {"share": 1}, "drift": {"tolerance": 0.1, "columns": ["wight"]}},
            "'wight' is not a column of a request; did you mean 'weight'",
        ),
        (
            {"capture": {"share": 1, "drop": ["weight"]}, "drift": {"tolerance": 0.1, "columns": ["weight"]}},
            "'weight' is not recorded",
        ),
    ],
)
def test_a_spec_whose_drift_cannot_be_watched_is_refused(
    tmp_path: Path, monitoring: dict[str, Any], refusal: str
) -> None:
    with pytest.raises(SpecError, match=refusal):
        load_spec(small_spec(tmp_path, monitoring=monitoring))


HOURS = 24 * 7 * 20
EACH = 20


def measured(level: np.ndarray, time: str | None = "dep", **sections: dict):  # type: ignore[no-untyped-def, type-arg]
    """Rows of 20 weeks, 20 in each hour, that go wrong with a chance that depends on the hour."""
    random = np.random.default_rng(1)
    spec: PipelineSpec = spec_for("binary", **sections)
    if time is None:
        spec = spec.model_copy(update={"data": spec.data.model_copy(update={"time": None})})
    hour = np.repeat(np.arange(HOURS), EACH)
    t = hour * 3_600_000_000 + np.tile(np.arange(EACH), HOURS) * 180_000_000
    truth = (random.random(len(t)) < np.repeat(level, EACH)).astype(np.float32)
    carrier = np.array(["AA", "UA"], dtype=object)[random.integers(0, 2, len(t))]
    rows = RawRows(
        table=pa.table({"dep": pa.array(t), "carrier": pa.array(carrier, pa.string())}),
        target=truth,
        row=np.arange(len(t)),
    )
    given = {"score": np.full((len(t), 1), 0.3, np.float32)}
    base = Schema(task="binary", inputs=(), outputs=outputs_of("binary"))
    return measure_quality(spec, base, Path("/nowhere"), lambda num, cat: num, rows, given)


def levels(every: int, seed: int = 2) -> np.ndarray:
    """A chance for each hour that changes every so many hours, with a memory of one change."""
    random = np.random.default_rng(seed)
    steps = random.normal(0, 1, HOURS // every + 2)
    return np.repeat(1 / (1 + np.exp(-(steps[1:] - 0.5))), every)[:HOURS]


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        (np.full(HOURS, 0.3), MINUTE_S),
        (levels(1), HOUR_S),
        (levels(24), DAY_S),
        (levels(24 * 7), WEEK_S),
    ],
    ids=["independent", "by the hour", "by the day", "by the week"],
)
def test_a_block_is_as_long_as_the_losses_of_rows_depend_on_each_other(
    level: np.ndarray, expected: float
) -> None:
    assert measured(level).block_s == expected


def test_rows_without_a_time_column_are_taken_as_independent() -> None:
    assert measured(levels(24), time=None).block_s == MINUTE_S


def test_the_reference_has_segments_and_is_read_as_it_was_written(tmp_path: Path) -> None:
    found = measured(np.full(HOURS, 0.3), export={"segments": ["carrier"]})
    assert set(found.segments) == {"carrier=AA", "carrier=UA"}
    assert found.loss == pytest.approx(0.3 * 0.49 + 0.7 * 0.09, abs=0.01)
    write_facts(tmp_path / "quality.json", found.to_json())
    assert read_quality_reference(tmp_path) == found
    assert read_quality_reference(tmp_path / "other") is None
