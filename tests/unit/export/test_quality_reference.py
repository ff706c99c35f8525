"""quality.json: what the export measures for the watcher."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from serin.export.quality import DAY_S, HOUR_S, MINUTE_S, WEEK_S, measure_quality
from serin.formats.bundle import write_document
from serin.formats.quality import read_quality_reference
from serin.formats.schema import Schema, outputs_of
from serin.formats.wire import RawRows
from serin.spec.pipeline import PipelineSpec
from tests.unit.export.small_dataset import spec_for

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
    write_document(tmp_path / "quality.json", found.to_json())
    assert read_quality_reference(tmp_path) == found
    assert read_quality_reference(tmp_path / "other") is None
