"""What tables of labels must be, and what is said about those that do not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from serin.errors import LabelsUnfit
from serin.monitoring.quality.labels import Added, Columns, add_labels
from serin.monitoring.quality.store import labels_folder
from serin.monitoring.quality.truth import TruthOf
from serin.pipeline.label_tables import read_labels
from tests.fakes.labelled import BEGAN, MODEL, data, schema, truth_of

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
    assert added.file is not None
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
