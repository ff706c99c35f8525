"""Live metrics of every task, measured as the export measures the test rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from serin import metrics
from serin.columns.scored import measured, reliability, row_loss
from serin.formats.groups import Measured
from serin.formats.quality import QualityReference
from serin.formats.schema import OutputTensor, Schema
from serin.monitoring.quality.estimate import count_scores, expected
from serin.monitoring.quality.measure import count_recorded, measure_release
from serin.monitoring.quality.scan import Watched
from serin.monitoring.quality.state import QualityState
from serin.monitoring.quality.view import QualityView, read_quality, write_quality
from tests.fakes.labelled import BEGAN, data, schema

ROWS = 600
RANDOM = np.random.default_rng(8)


def table(answers: pa.Array, name: str, labels: pa.Array) -> pa.Table:
    """Labelled rows as they are stored: a request each, labelled an hour later."""
    t = (np.arange(ROWS) * 1_000_000 + int(BEGAN * 1e6)).astype(np.int64)
    return pa.table(
        {
            "_id": [f"id-{number}" for number in range(ROWS)],
            "_row": pa.array(np.zeros(ROWS, np.int32)),
            "_t": pa.array(t).cast(pa.timestamp("us", "UTC")),
            f"_answer_{name}": answers,
            "label": labels,
            "when": pa.array(t),
            "arrived": pa.array(t + 3_600_000_000),
        }
    )


def lists(values: np.ndarray) -> pa.Array:
    return pa.array(values.tolist(), pa.list_(pa.float32()))


def measure(watched: Watched, rows: pa.Table, reference: QualityReference | None = None) -> Any:
    state = QualityState()
    count_recorded(watched, rows, state)
    return measure_release("delays", watched, reference, rows, state, None)


def test_several_classes_are_measured_by_name_and_one_that_the_version_does_not_know_is_left_out() -> None:
    classes = ("bad", "fine", "good")
    chances = RANDOM.dirichlet([1, 1, 1], ROWS).astype(np.float32)
    truth = np.array([RANDOM.choice(3, p=row / row.sum()) for row in chances.astype(np.float64)])
    names = [classes[at] for at in truth[:-1]] + ["new"]
    watched = Watched(version=3, schema=schema("multiclass", classes), data=data("stars", "multiclass"))
    found = measure(watched, table(lists(chances), "probabilities", pa.array(names)))
    assert (found.recorded, found.labelled) == (ROWS, ROWS - 1)
    guess = chances[:-1].argmax(axis=1)
    assert found.metrics["accuracy"].value == metrics.accuracy(truth[:-1], guess)
    assert found.metrics["logloss"].value == pytest.approx(metrics.log_loss(truth[:-1], chances[:-1]))
    assert found.estimate["accuracy"].value == pytest.approx(chances.max(axis=1).mean(), abs=0.01)
    assert abs(found.estimate["accuracy"].error) < 0.05
    assert (found.loss_name, found.days[0].loss) == ("error", pytest.approx((guess != truth[:-1]).mean()))


def test_a_regression_has_no_estimate_and_its_loss_is_in_units_of_the_test_rows() -> None:
    truth = RANDOM.normal(0, 3, ROWS)
    scores = (truth + RANDOM.normal(0.5, 1, ROWS)).astype(np.float32)
    reference = QualityReference(
        rows=10, loss_name="squared_error", loss=0.9, scale=2.0, clip=4.0, block_s=60.0, metrics={}
    )
    watched = Watched(version=1, schema=schema("regression"), data=data("cost", "regression"))
    found = measure(watched, table(pa.array(scores), "score", pa.array(truth)), reference)
    assert found.metrics["rmse"].value == pytest.approx(metrics.rmse(truth, scores))
    assert found.metrics["calibration"].value == pytest.approx(float((scores - truth).mean()))
    assert found.estimate == {}
    assert found.days[0].loss == pytest.approx(np.minimum((scores - truth) ** 2 / 2.0, 4.0).mean(), rel=1e-6)


def test_several_targets_have_metrics_each() -> None:
    logits = RANDOM.normal(0, 2, (ROWS, 2))
    scores = (1 / (1 + np.exp(-logits))).astype(np.float32)
    truth = (RANDOM.random((ROWS, 2)) < scores).astype(np.float64)
    base = schema()
    two = Schema(
        task="binary",
        inputs=base.inputs,
        outputs=(OutputTensor(name="score", dtype="FP32", dims=(2,)),),
        targets=("late", "lost"),
    )
    flat = pa.FixedSizeListArray.from_arrays(pa.array(truth.reshape(-1)), 2)
    found = measure(Watched(version=1, schema=two, data=data()), table(lists(scores), "score", flat))
    assert found.metrics["auc_lost"].value == metrics.auc(truth[:, 1], scores[:, 1])
    assert found.metrics["auc_late"].value == metrics.auc(truth[:, 0], scores[:, 0])
    assert found.estimate == {}
    assert found.days[0].loss == pytest.approx(row_loss("binary", truth, scores).mean())


def test_bands_hold_the_truth_about_as_often_as_they_say() -> None:
    held = dict.fromkeys(("brier", "accuracy", "logloss", "calibration"), 0)
    random, trials = np.random.default_rng(9), 200
    chance = 1 / (1 + np.exp(-random.normal(-1, 1.5, 200_000)))
    everything = measured("binary", (random.random(len(chance)) < chance).astype(float), chance)
    for _ in range(trials):
        rows = random.integers(0, len(chance), 400)
        found = measured("binary", (random.random(400) < chance[rows]).astype(float), chance[rows])
        for name in held:
            held[name] += found[name].low <= everything[name].value <= found[name].high
    assert all(0.9 <= count / trials <= 0.99 for count in held.values()), held


def test_the_estimate_of_calibrated_scores_is_right_for_rare_positives_too() -> None:
    random = np.random.default_rng(10)
    chance = 1 / (1 + np.exp(-random.normal(-6, 1.5, 300_000)))
    truth = (random.random(len(chance)) < chance).astype(float)
    raw = 1 / (1 + np.exp(-(np.log(chance / (1 - chance)) + 2)))  # far too high, in the right order
    bins = [(b.score, b.rate, b.rows) for b in reliability("binary", truth, raw, 40)]
    found = expected("binary", count_scores(raw), bins)
    assert found["auc"] == pytest.approx(metrics.auc(truth, raw), abs=0.02)
    assert found["brier"] == pytest.approx(np.mean((raw - truth) ** 2), rel=0.1)


def test_an_auc_without_a_band_is_written_and_read(tmp_path: Any) -> None:
    scores = np.array([0.1, 0.9, 0.4], np.float32)
    found = measured("binary", np.array([0.0, 1.0, 0.0]), scores)
    assert found["auc"] == Measured(value=1.0, low=0.0, high=1.0)
    state = {"received": 3, "unknown": 0, "ambiguous": 0, "unclear": 0}
    view = QualityView(model="delays", updated=1.0, behind=False, **state)
    write_quality(tmp_path, view)
    assert read_quality(tmp_path, "delays") == view
    assert read_quality(tmp_path, "other") is None
