"""Tables of labels, their keys, and live metrics of every task measured as the export measures the test rows."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from serin import metrics
from serin.columns.scored import measured, reliability, row_loss
from serin.errors import LabelsUnfit
from serin.formats.captures import hour_folders
from serin.formats.gate import Measured
from serin.formats.quality import QualityReference
from serin.formats.schema import OutputTensor, Schema
from serin.monitoring.capture.read import records_in
from serin.monitoring.quality.follow import QualityState
from serin.monitoring.quality.keys import Key, KeyIndex, hashes
from serin.monitoring.quality.labels import Added, Columns, TruthOf, add_labels
from serin.monitoring.quality.measure import count_recorded, count_scores, expected, measure_release
from serin.monitoring.quality.scan import Watched, search
from serin.monitoring.quality.store import labels_folder
from serin.monitoring.quality.view import QualityView, read_quality, write_quality
from serin.pipeline.label_tables import read_labels
from tests.fakes.labelled import BEGAN, MODEL, data, record, schema, truth_of, watched

NOW = BEGAN + 2 * 86_400
AT = np.datetime64("2026-03-02T09:00:00", "us")


def add(home: Path, table: pa.Table, of: TruthOf | None = None, *, now: float = NOW, **columns: Any) -> Added:
    return add_labels(home, of or truth_of(), table, Columns(**columns), now)


@pytest.mark.parametrize(
    ("table", "columns", "told"),
    [
        ({"_id": ["a"], "arr_delay": ["late"]}, {}, r"'arr_delay' has type string, needed are numbers for 'arr"),
        ({"_id": ["a"], "_label": ["yes"]}, {}, r"'_label' has type string, needed are true and false, or 0 and 1"),
        ({"_id": ["a"], "_label": [2]}, {}, r"'_label' holds 2.0; a binary label is true or false, 1 or 0"),
        ({"_id": [17], "_label": [1]}, {}, r"'_id' has type int64, needed are ids as text"),
        ({"_id": ["a"], "_row": ["x"], "_label": [1]}, {}, r"'_row' has type string, needed are row numbers from 0"),
        ({"_id": ["a"]}, {}, r"has no arr_delay: give a column _label with 'arr_delay > 15' itself, or the columns"),
        ({"_label": [1]}, {}, r"has nothing that tells which request a label is about: give _id"),
        ({"_id": ["a"], "late": [1]}, {"value": "lat"}, r"'lat' is missing; did you mean 'late'\?"),
        ({"flight": ["F1"], "_label": [1]}, {"on": ("fligth",)}, r"'fligth' is not a column of the request; did"),
        ({"distance": ["far"], "_label": [1]}, {"on": ("distance",)}, r"'distance' has type string, the model asks"),
        ({"_id": ["a"], "_label": [1], "at": ["soon"]}, {"time": "at"}, r"'at' holds 'soon'; needed are times such as"),
        ({"_id": ["a"], "_row": [-1], "_label": [1]}, {}, r"'_row' holds -1, needed are row numbers from 0"),
        ({"r": ["a"], "_label": [1]}, {"id": "r", "on": ("flight",)}, r"by request id \(r\) and by request columns"),
        ({"r": ["a"], "c": ["b"]}, {"id": "r", "client_id": "c"}, r"by request id \(r\) and by the client's id \(c\)"),
        ({"flight": ["F1"], "n": [1]}, {"row": "n", "on": ("flight",)}, r"'n' is a row number, which belongs to"),
        ({"_id": [], "_label": []}, {}, r"the table has no rows"),
    ],
)  # fmt: skip
def test_a_table_that_does_not_fit_is_refused_with_its_column(
    home: Path, table: dict[str, Any], columns: dict[str, Any], told: str
) -> None:
    with pytest.raises(LabelsUnfit, match=told):
        add(home, pa.table(table), **columns)
    assert not labels_folder(home, MODEL).exists()


@pytest.mark.parametrize(
    ("table", "columns", "told"),
    [
        ({"request": [17], "late": [1]}, {"id": "request", "value": "late"}, "'request' has type int64"),
        ({"order": [17], "late": [1]}, {"client_id": "order", "value": "late"}, "'order' has type int64"),
        ({"request": ["a"], "n": [-1], "late": [1]}, {"id": "request", "row": "n"}, "'n' holds -1"),
        ({"request": ["a"], "late": [1]}, {"id": "request", "value": "zzz"}, "'zzz' is missing; known: late, request$"),
        ({"request": ["a"], "late": [1]}, {"id": "request", "time": "zzz"}, "'zzz' is missing; known: late, request$"),
        ({"request": ["a"]}, {"id": "request"}, "found: request$"),
        ({"request": ["a"]}, {"on": ("flight",)}, "'flight' is missing; known: request$"),
    ],
)  # fmt: skip
def test_errors_name_columns_as_their_owner_does(
    home: Path, table: dict[str, Any], columns: dict[str, Any], told: str
) -> None:
    with pytest.raises(LabelsUnfit, match=told) as error:
        add(home, pa.table(table), **({"value": "late"} if "late" in table else {}) | columns)
    assert not {"_id", "_row", "_client_id"} & set(error.value.message.replace(",", " ").split())


@pytest.mark.parametrize(
    "expression",
    ["back == true", "back != false", "true == back", "not back", "back and x > 1", "x > 1 or back"],
)
def test_a_boolean_target_asks_for_true_and_false(home: Path, expression: str) -> None:
    table = pa.table({"_id": ["a"], "back": ["maybe"], "x": [1.0]})
    with pytest.raises(LabelsUnfit, match="'back' has type string, needed are true and false for"):
        add(home, table, truth_of(data=data(expression)))


def test_a_target_that_is_a_column_asks_for_what_its_task_needs(home: Path) -> None:
    table = pa.table({"_id": ["a"], "back": ["maybe"]})
    with pytest.raises(LabelsUnfit, match="gives strings for 'back'; needed are true and false, or 0 and 1"):
        add(home, table, truth_of(data=data("back")))


def test_a_key_of_the_spec_that_requests_lack_is_named_beside_the_columns_they_have(home: Path) -> None:
    of = truth_of(data=data(id="order_id", time="placed_at"))
    table = pa.table({"order_id": [1], "placed_at": [2], "arr_delay": [1.0]})
    told = (
        r"requests have flight, carrier, distance, day\); data\.id \(order_id\) and data\.time \(placed_at\) "
        r"are not in the requests; found: order_id, placed_at, arr_delay"
    )
    with pytest.raises(LabelsUnfit, match=told):
        add(home, table, of)


@pytest.mark.parametrize(("first", "second"), [(None, "at"), ("at", None), ("at", "at"), (None, None)])
def test_labels_by_time_and_by_arrival_are_not_mixed_without_a_word(
    home: Path, first: str | None, second: str | None
) -> None:
    table = pa.table({"_id": ["a"], "_label": [1], "at": [AT]})
    assert not add(home, table, time=first).mixed
    other = table.set_column(1, "_label", pa.array([0]))
    assert add(home, other, time=second, now=NOW + 1).mixed == (first != second)


def test_an_answer_in_a_file_of_scores_is_not_taken_for_the_truth(home: Path) -> None:
    classes = truth_of(data=data("stars", "multiclass"), schema=schema("multiclass", ("good", "bad")))
    scored = {"_id": ["a"], "_row": [0], "label": ["good"]}  # as `serin predict --ids` writes it
    with pytest.raises(LabelsUnfit, match="has no stars: give a column _label"):
        add(home, pa.table(scored), classes)
    added = add(home, pa.table({**scored, "stars": ["bad"]}), classes)
    assert added.file.read().column("label").to_pylist() == ["bad"]
    assert add(home, pa.table(scored), classes, value="label", now=NOW + 1).stored == 1


def test_a_value_that_is_no_class_is_refused_with_the_classes(home: Path) -> None:
    classes = truth_of(data=data("stars", "multiclass"), schema=schema("multiclass", ("good", "bad")))
    with pytest.raises(LabelsUnfit, match="'stars' holds 'ugly'; the classes are good, bad"):
        add(home, pa.table({"_id": ["a", "b"], "stars": ["good", "ugly"]}), classes, value="stars")


@pytest.mark.parametrize("nulls", [["N/A", "?"], {"status": ["N/A", "?"]}], ids=["everywhere", "per_column"])
@pytest.mark.parametrize("column", ["status", "_label"])
def test_a_text_that_means_null_in_training_is_no_label(home: Path, column: str, nulls: Any) -> None:
    table = {"flights": {"path": "flights.csv", "null_values": nulls}}
    of = truth_of(
        data=data("status", "multiclass", tables=table), schema=schema("multiclass", ("late", "soon"))
    )
    labels = {"_id": ["a", "b", "c", "d", "e"], column: ["late", "N/A", "?", "", "soon"]}
    done = add(home, pa.table(labels), of)
    assert (done.stored, done.missing) == (2, 3)
    (home / "labels.csv").write_text("_id,delay,note\na,3,?\nb,?,x\nc,N/A,y\n")
    numbers = {"flights": {"path": "flights.csv", "null_values": ["?"]}}
    read = read_labels(
        str(home / "labels.csv"), truth_of(data=data("delay", "regression", tables=numbers)), Columns()
    )
    assert read.column("delay").to_pylist() == [3, None, None]


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
    rows, state = rows.append_column("_release", pa.array(["delays-v1"] * len(rows))), QualityState()
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
    assert found.metrics["accuracy"].value == np.mean(truth[:-1] == guess)
    assert found.metrics["logloss"].value == pytest.approx(
        metrics.measure("logloss", truth[:-1], chances[:-1])
    )
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
    assert found.metrics["rmse"].value == pytest.approx(metrics.measure("rmse", truth, scores))
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


@pytest.mark.parametrize("most_rows", [0, 40, 1 << 20])
def test_an_index_of_any_size_finds_every_row_also_those_that_came_after_it_was_made(
    home: Path, most_rows: int
) -> None:
    record(home, 300, every_s=300.0)
    index = KeyIndex(most_rows)
    for seed in (1, 2):
        made = record(home, 100, seed=seed, every_s=300.0)  # into hours that the index knows
        added = add_labels(home, truth_of(), made.labels(), Columns(), NOW + seed)
        *_, found = search(records_in(home), MODEL, added.file, added.file.read(), {1: watched(1)}.get, index)
        assert found.labels == set(range(100))
        assert sum(table.num_rows for tables in found.rows.values() for table in tables) == 100


def test_an_hour_without_any_of_the_keys_is_not_read(home: Path) -> None:
    record(home, 200, every_s=600.0)
    index, key = KeyIndex(), Key(by=("_id",))
    wanted = hashes(pa.array(["0-1-0\x1f0"]))
    hours = hour_folders(home, MODEL)
    assert [hour for hour in hours if index.may_have(hour, key, schema(), wanted)] == [hours[0]]
    assert len(hours) > 30
