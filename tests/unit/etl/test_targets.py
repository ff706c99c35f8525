"""Tasks other than binary, through the whole build."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from serin.errors import TargetUnusable
from serin.etl.build import build_dataset
from serin.formats.dataset import DatasetDescription, read_dataset
from serin.formats.shards import read_split
from serin.spec.etl import EtlSpec
from serin.spec.load import load_spec
from serin.store.store import Store

TABLE = pa.table(
    {
        "x": [float(row) for row in range(90)],
        "price": [row / 7 if row % 10 else None for row in range(90)],
        "grade": [["good", "bad", None, "so-so"][row % 4] for row in range(90)],
        "stars": [[5, 1, 3][row % 3] for row in range(90)],
    }
)


def build(folder: Path, expression: str, task: str) -> tuple[DatasetDescription, np.ndarray, np.ndarray]:
    pq.write_table(TABLE, folder / "t.parquet", row_group_size=20)
    document: dict[str, Any] = {
        "name": "t",
        "data": {
            "tables": {"t": str(folder / "t.parquet")},
            "target": {"expression": expression, "task": task},
        },
        "features": [{"columns": ["x"], "steps": ["normalize"]}],
    }
    spec = load_spec(document)
    store = Store(str(folder / "store"))
    dataset = build_dataset(spec.data, spec.features, EtlSpec(), store=store, piece_rows=20)
    train = read_split(dataset.path, "train").whole()
    return read_dataset(dataset.path), train.target, train.rows


@pytest.mark.parametrize(
    ("column", "classes"), [("grade", ("bad", "good", "so-so")), ("stars", ("1", "3", "5"))]
)
def test_classes_are_numbered_in_order_of_value(
    tmp_path: Path, column: str, classes: tuple[str, ...]
) -> None:
    description, target, rows = build(tmp_path, column, "multiclass")
    assert description.classes == classes
    values = TABLE.column(column).to_pylist()
    assert [classes[int(code)] for code in target] == [str(values[row]) for row in rows]
    assert description.dropped["null_target"] == (22 if column == "grade" else 0)


def test_a_regression_with_one_number_only_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TargetUnusable, match="is 0 in every training row: there is nothing to learn"):
        build(tmp_path, "stars - stars", "regression")


def test_a_regression_keeps_its_numbers(tmp_path: Path) -> None:
    description, target, rows = build(tmp_path, "price * 2", "regression")
    assert description.classes is None
    assert np.array_equal(target, (rows / 7 * 2).astype(np.float32))
    assert description.dropped["null_target"] == 9


def test_a_target_is_computed_before_anything_is_rounded_to_float32(tmp_path: Path) -> None:
    _, target, rows = build(tmp_path, "price > 1.57142855", "binary")
    assert np.array_equal(target, rows / 7 > 1.57142855)
    assert 11 in rows  # 11 / 7 is above the bound, and below it as float32
