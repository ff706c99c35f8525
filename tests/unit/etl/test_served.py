"""What the dataset was made with is what the graph calculates: derived columns, over requests, lookups and windows."""

import json
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pandas as pd
import pyarrow.parquet as pq

from serin.export.convert.features2onnx import features2onnx
from serin.features.plan import FeaturePlan
from serin.formats.dataset import FEATURES, GOLDEN, read_dataset
from serin.store.store import Store
from tests.unit.etl.trips import build, spec_of


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
