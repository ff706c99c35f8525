"""Every operator at once, from a file to a published dataset and to the graph that serves it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from serin.etl.build import build_dataset
from serin.etl.engines.dask_engine import local_cluster
from serin.export.convert.features2onnx import features2onnx
from serin.export.gate.gate import check_features
from serin.export.gate.golden import read_golden_rows
from serin.features.plan import FeaturePlan
from serin.formats.dataset import read_dataset
from serin.formats.schema import Schema, outputs_of
from serin.formats.shards import read_split
from serin.spec.etl import EtlSpec
from serin.spec.load import load_spec
from serin.spec.pipeline import PipelineSpec
from serin.store.artifacts import Dataset
from serin.store.store import Store

OWN = "tests.fakes.own_operators"
FEATURES: list[dict[str, Any]] = [
    {"columns": ["f"], "steps": [{"fill_median": {"indicator": True}}, "log1p", "normalize"]},
    {"columns": ["g"], "steps": ["fill_mode", {"clip": {"q": [0.05, 0.95]}}, "min_max"]},
    {"columns": ["g"], "steps": [{"bucketize": {"quantiles": 5}}]},
    {"columns": ["h"], "steps": [{"fill_missing": 3}, "robust_scale"]},
    {"columns": ["h"], "steps": [{"cyclical": {"period": 7}}]},
    {
        "columns": ["h"],
        "steps": [{"group_stats": {"by": "s", "stats": ["mean", "std", "count"]}}, "normalize"],
    },
    {"columns": ["i", "x"], "steps": [{"group_stats": {"by": "u", "stats": ["mean", "std"]}}]},
    {"columns": ["x"], "steps": ["normalize"]},
    {"columns": ["s", "u"], "steps": [{"categorify": {"joint": True, "min_count": 3, "buckets": 2}}]},
    {"columns": ["s"], "steps": [{"target_encode": {"smoothing": 5}}, "normalize"]},
    {"columns": ["s"], "steps": ["count_encode", "log1p"]},
    {"columns": ["u"], "steps": [{"one_hot": {"max_size": 4}}]},
    {"columns": ["u"], "steps": [{"ordinal": ["b", "a", "ü"]}]},
    {"columns": ["i"], "steps": [{"hash_bucket": 16}]},
    {"columns": ["i"], "steps": [{f"{OWN}:AboveMost": {"few": 9}}]},
    {"columns": ["t"], "steps": [{"date_parts": ["hour", "month"]}]},
    {"columns": ["t"], "steps": [{"cyclical": ["hour"]}]},
]


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    random = np.random.default_rng(5)
    rows = 3000

    def holed(values: Any) -> pa.Array:
        return pa.array(values, mask=random.random(rows) < 0.1)

    words = np.asarray(["a", "b", "ü", "日本", "rare", "d"], object)
    columns = {
        "f": holed(random.lognormal(3, 2, rows)),
        "g": holed(random.integers(0, 50, rows)),
        "h": holed(random.normal(0, 9, rows)),
        "s": holed(random.choice(words, rows, p=[0.4, 0.3, 0.2, 0.07, 0.001, 0.029])),
        "u": holed(random.choice(words, rows)),
        "i": holed(random.integers(-(2**62), 2**62, rows)),
        "x": holed(random.normal(size=rows) * 10.0 ** random.integers(-44, 36, rows)),
        "t": pa.array(random.integers(0, 10**15, rows), pa.timestamp("us", tz="Europe/Vienna")),
        "y": pa.array(random.integers(0, 2, rows)),
    }
    file = tmp_path_factory.mktemp("table") / "table.parquet"
    pq.write_table(pa.table(columns), file, row_group_size=250)
    return file


def spec_of(table: Path) -> PipelineSpec:
    data = {"tables": {"main": str(table)}, "target": {"expression": "y == 1", "task": "binary"}}
    return load_spec({"name": "every-operator", "data": data, "features": FEATURES})


def build(table: Path, folder: Path, piece_rows: int, workers: int = 1) -> Dataset:
    spec = spec_of(table)
    etl = spec.etl.model_copy(update={"engine": "process", "workers": workers})
    return build_dataset(spec.data, spec.features, etl, store=Store(str(folder)), piece_rows=piece_rows)


def test_cuts_and_threads_do_not_show_in_any_operator(table: Path, tmp_path: Path) -> None:
    one, many = build(table, tmp_path / "one", 10**9), build(table, tmp_path / "many", 1, workers=3)
    assert one.digest == many.digest
    for split in ("train", "valid", "test"):
        ours, theirs = read_split(one.path, split).whole(), read_split(many.path, split).whole()
        assert ours.num.tobytes() == theirs.num.tobytes()
        assert ours.cat.tobytes() == theirs.cat.tobytes()


def test_workers_of_a_cluster_do_not_show_in_any_operator(table: Path, tmp_path: Path) -> None:
    expected = build(table, tmp_path / "one", 10**9).digest
    spec = spec_of(table)
    with local_cluster(2, closed=False) as client:
        etl = EtlSpec(engine=client.scheduler.address)
        store = Store(str(tmp_path / "cluster"))
        assert build_dataset(spec.data, spec.features, etl, store=store, piece_rows=500).digest == expected


def test_clients_send_what_features_need_and_no_more(table: Path, tmp_path: Path) -> None:
    features = [
        {"columns": ["h"], "steps": [{"group_stats": {"by": "s"}}]},
        {"columns": ["u"], "steps": ["count_encode"]},
    ]
    spec = spec_of(table)
    spec = load_spec(spec.model_dump(mode="json", by_alias=True) | {"features": features})
    made = build_dataset(spec.data, spec.features, spec.etl, store=Store(str(tmp_path)))
    assert [column.name for column in read_dataset(made.path).inputs] == ["s", "u"]


def test_the_digest_covers_what_is_equal_everywhere(table: Path, tmp_path: Path) -> None:
    made = build(table, tmp_path, 1000)
    header = json.loads((Path(made.path) / "train/part-00000/header.json").read_text())
    assert header["approximate"] == ["f", "h_sin", "h_cos", "s_count", "t_hour_sin", "t_hour_cos"]


def test_the_graph_passes_the_gate_with_every_operator(table: Path, tmp_path: Path) -> None:
    made = build(table, tmp_path, 1000)
    folder = Path(made.path)
    dataset = read_dataset(folder)
    plan = FeaturePlan.from_json(json.loads((folder / "features.json").read_text()))
    graph = features2onnx(plan, dataset, folder)
    schema = Schema(task=dataset.task, inputs=dataset.inputs, outputs=outputs_of(dataset.task))
    golden = read_golden_rows(folder, schema, dataset.numeric, [each.name for each in dataset.categorical])
    check_features(graph.model, (graph.num, graph.cat), golden, plan.approximate)
