"""Tasks other than binary through the whole build, and what the served graph calculates."""

import json
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from serin.export.convert.fuse import features2onnx
from serin.features.plan import FeaturePlan
from serin.formats.dataset import FEATURES, GOLDEN, DatasetDescription, read_dataset
from serin.formats.shards import read_split
from serin.store.store import Store
from tests.unit.etl.trips import build, spec_of, table_spec

TABLE = pa.table(
    {
        "x": [float(row) for row in range(90)],
        "price": [row / 7 if row % 10 else None for row in range(90)],
        "grade": [["good", "bad", None, "so-so"][row % 4] for row in range(90)],
        "stars": [[5, 1, 3][row % 3] for row in range(90)],
    }
)


def built(folder: Path, expression: str, task: str) -> tuple[DatasetDescription, np.ndarray, np.ndarray]:
    pq.write_table(TABLE, folder / "t.parquet", row_group_size=20)
    spec = table_spec(folder / "t.parquet", expression, {"columns": ["x"], "steps": ["normalize"]}, task=task)
    dataset = build(spec, Store(str(folder / "store")), piece_rows=20)
    train = read_split(dataset.path, "train").whole()
    return read_dataset(dataset.path), train.target, train.rows


@pytest.mark.parametrize(
    ("column", "classes"), [("grade", ("bad", "good", "so-so")), ("stars", ("1", "3", "5"))]
)
def test_classes_are_numbered_in_order_of_value(
    tmp_path: Path, column: str, classes: tuple[str, ...]
) -> None:
    description, target, rows = built(tmp_path, column, "multiclass")
    assert description.classes == classes
    values = TABLE.column(column).to_pylist()
    assert [classes[int(code)] for code in target] == [str(values[row]) for row in rows]
    assert description.dropped["null_target"] == (22 if column == "grade" else 0)


def test_a_regression_keeps_its_numbers(tmp_path: Path) -> None:
    description, target, rows = built(tmp_path, "price * 2", "regression")
    assert description.classes is None
    assert np.array_equal(target, (rows / 7 * 2).astype(np.float32))
    assert description.dropped["null_target"] == 9


def test_a_target_is_computed_before_anything_is_rounded_to_float32(tmp_path: Path) -> None:
    _, target, rows = built(tmp_path, "price > 1.57142855", "binary")
    assert np.array_equal(target, rows / 7 > 1.57142855)
    assert 11 in rows  # 11 / 7 is above the bound, and below it as float32


def test_derived_features_have_the_same_bits_in_the_graph(tmp_path: Path) -> None:
    """The lookup's key has another name in its table, a column is renamed, and the target reads a served one."""
    pd.DataFrame({"plate": ["t1", "t2", "ü4"], "seats": [4, 6, None]}).to_parquet(tmp_path / "taxis.parquet")
    spec = spec_of(
        tmp_path,
        tables={"trips": str(tmp_path / "trips.parquet"), "taxis": str(tmp_path / "taxis.parquet")},
        joins=[{"with": "taxis", "on": {"taxi": "plate"}, "columns": ["seats"], "source": "lookup"}],
        rename={"trips": {"people": "heads"}},
        target={"expression": "tip > 2 and fare < 12", "task": "binary", "known_at_serving": ["tip"]},
        windows=[{"by": "zone", "rows": 5, "make": {"usual": "mean(tip)", "last": "lag(tip)"}}],
        derived={
            "per_head": "tip / heads",
            "full": "heads >= seats or taxi in ('t3', 'ü4')",
            "unusual": "(tip - usual) / max(usual, 1)",
            "both": "per_head * unusual",
        },
        features=[
            {"columns": ["per_head", "unusual", "both", "last"], "steps": ["fill_median", "normalize"]},
            {"columns": ["full"], "steps": ["categorify"]},
        ],
    )
    dataset = build(spec, Store(str(tmp_path / "store")))
    described, folder = read_dataset(dataset.path), Path(dataset.path)
    assert [column.name for column in described.inputs] == ["tip", "heads", "usual", "last", "taxi"]
    golden = pq.read_table(folder / GOLDEN)
    plan = FeaturePlan.from_json(json.loads((folder / FEATURES).read_text(encoding="utf-8")))
    graph = features2onnx(plan, described, folder)
    session = ort.InferenceSession(graph.model.SerializeToString(), providers=["CPUExecutionProvider"])
    inputs = {
        column.name: np.asarray(
            golden.column(column.name).to_pylist(), object if column.dtype == "BYTES" else None
        )
        .astype({"BYTES": object, "FP32": np.float32, "INT64": np.int64, "INT8": np.int8}[column.dtype])
        .reshape(-1, 1)
        for column in described.inputs
    }
    num, cat = session.run([graph.num, graph.cat], inputs)
    for index, name in enumerate(described.numeric):
        wanted = golden.column(f"num__{name}").to_numpy()
        assert np.array_equal(num[:, index].view(np.int32), wanted.view(np.int32)), name
    for index, output in enumerate(described.categorical):
        assert np.array_equal(cat[:, index], golden.column(f"cat__{output.name}").to_numpy()), output.name
