"""Every operator from a file to the graph that serves it, and the one that docs/how-to/add-an-operator.md shows."""

import json
import pkgutil
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from serin.columns.column import Column
from serin.etl.build import build_dataset
from serin.export.convert.fuse import features2onnx
from serin.export.gate.gate import check_features, read_golden_rows
from serin.features import operator, ops
from serin.features.aggregates.aggregate import Aggregate
from serin.features.fitted import Sample
from serin.features.plan import FeaturePlan
from serin.formats.dataset import read_dataset
from serin.formats.schema import Schema, outputs_of
from serin.formats.shards import read_split
from serin.machine.dask_cluster import local_cluster
from serin.spec.etl import EtlSpec
from serin.spec.features import FeatureSpec
from serin.spec.json_schema import spec_schema
from serin.spec.load import load_spec
from serin.spec.pipeline import PipelineSpec
from serin.spec.steps import operators
from serin.store.artifacts import Dataset
from serin.store.store import Store
from tests.fakes.cupy import FakeCupy, install
from tests.unit.etl.trips import table_spec
from tests.unit.features.measured import Columns, columns_of
from tests.unit.features.random_tables import KINDS, features, tables, wire, with_values

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "add-an-operator.md"


@pytest.fixture(params=["max_abs", "max_abs:MaxAbs"])
def step(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The step's name in a spec, with the page's file among Serin's operators or in a folder of the user's."""
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    (tmp_path / "max_abs.py").write_text(code, encoding="utf-8")
    operators.operators()  # loaded before the registers are copied: what a test loads is forgotten with its copy
    for module, register in ((operators, "_registered"), (operator, "_fitted"), (operator, "_names")):
        monkeypatch.setattr(module, register, dict(getattr(module, register)))
    if ":" in request.param:
        monkeypatch.syspath_prepend(str(tmp_path))
    else:
        monkeypatch.setattr(ops, "__path__", [*ops.__path__, str(tmp_path)])
    yield request.param
    for name in ("max_abs", f"{ops.__name__}.max_abs"):
        sys.modules.pop(name, None)


def check_graph(folder: Path) -> FeaturePlan:
    """The dataset's plan, whose graph passes the gate."""
    dataset = read_dataset(folder)
    plan = FeaturePlan.from_json(json.loads((folder / "features.json").read_text()))
    graph = features2onnx(plan, dataset, folder)
    schema = Schema(task=dataset.task, inputs=dataset.inputs, outputs=outputs_of(dataset.task))
    golden = read_golden_rows(folder, schema, dataset.numeric, [each.name for each in dataset.categorical])
    check_features(graph.model, (graph.num, graph.cat), golden, plan.approximate)
    return plan


def test_the_page_s_operator_goes_from_the_spec_to_the_graph(step: str, tmp_path: Path) -> None:
    random = np.random.default_rng(3)
    columns = {
        "x": pa.array(random.normal(0, 9, 400), mask=random.random(400) < 0.1),
        "z": pa.array(random.integers(-50, 5, 400)),
        "y": pa.array(random.integers(0, 2, 400)),
    }
    pq.write_table(pa.table(columns), tmp_path / "table.parquet")
    spec = table_spec(
        tmp_path / "table.parquet",
        "y == 1",
        {"columns": ["x", "z"], "steps": ["fill_median", {step: 2}]},
        {"columns": ["z"], "steps": [step, {"bucketize": {"quantiles": 4}}]},
    )
    assert load_spec(spec.model_dump(mode="json", by_alias=True)) == spec
    assert bool(spec.features[0].operators) == (":" in step)  # a user's code is part of the dataset's key
    made = build_dataset(spec.data, spec.features, spec.etl, store=Store(str(tmp_path / "store")))

    train = read_split(made.path, "train").whole()
    assert np.abs(train.num).max(axis=0) == pytest.approx([2, 2], rel=1e-6)
    assert set(train.cat[:, 0].tolist()) == {1, 2, 3, 4}
    plan = check_graph(Path(made.path))
    assert any("; divided by" in line for line in plan.describe())


def test_the_page_s_operator_has_errors_and_a_schema_as_every_other(step: str) -> None:
    with pytest.raises(ValidationError, match="greater than 0"):
        FeatureSpec(columns=["x"], steps=[{step: -1}])
    with pytest.raises(ValidationError, match="categorify needs the column itself"):
        FeatureSpec(columns=["x"], steps=[step, "categorify"])
    if ":" in step:
        return
    with pytest.raises(ValidationError, match="did you mean 'max_abs'"):
        FeatureSpec(columns=["x"], steps=["maxabs"])
    forms = spec_schema()["$defs"]["FeatureStep"]["anyOf"]
    assert "max_abs" in forms[0]["enum"]
    assert forms[2]["properties"]["max_abs"]["description"].startswith(
        "The training split's largest absolute"
    )


def test_every_file_among_the_operators_registers_its_operators() -> None:
    files = {f"{ops.__name__}.{module.name}" for module in pkgutil.iter_modules(ops.__path__)}
    assert {kind.__module__ for kind in operators.operators().values()} == files


def test_two_operators_cannot_have_one_name() -> None:
    class Clip(operator.NumberOperator):
        name = "clip"

    with pytest.raises(ValueError, match="two operators are named 'clip'"):
        operators.add_operator(Clip)


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
    return table_spec(table, "y == 1", *FEATURES)


def build(table: Path, folder: Path, piece_rows: int, workers: int = 1) -> Dataset:
    spec = spec_of(table)
    etl = spec.etl.model_copy(update={"engine": "process", "workers": workers})
    return build_dataset(spec.data, spec.features, etl, store=Store(str(folder)), piece_rows=piece_rows)


def test_cuts_threads_and_workers_do_not_show_in_any_operator(table: Path, tmp_path: Path) -> None:
    one, many = build(table, tmp_path / "one", 10**9), build(table, tmp_path / "many", 1, workers=3)
    assert one.digest == many.digest
    for split in ("train", "valid", "test"):
        ours, theirs = read_split(one.path, split).whole(), read_split(many.path, split).whole()
        assert ours.num.tobytes() == theirs.num.tobytes()
        assert ours.cat.tobytes() == theirs.cat.tobytes()
    spec = spec_of(table)
    with local_cluster(2, closed=False) as client:
        etl = EtlSpec(engine=client.scheduler.address)
        store = Store(str(tmp_path / "cluster"))
        assert build_dataset(spec.data, spec.features, etl, store=store, piece_rows=500).digest == one.digest


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
    check_graph(Path(build(table, tmp_path, 1000).path))


def on_gpu(columns: Columns, cupy: FakeCupy, host: set[str]) -> Columns:
    """All but those that stay on the host."""
    there = {
        name: Column(kind=column.kind, values=cupy.asarray(column.values), dictionary=column.dictionary)  # type: ignore[arg-type]
        for name, column in columns.items()
        if name not in host
    }
    return {**columns, **there}


@settings(max_examples=25, deadline=None)
@given(tables, features, st.sets(st.sampled_from(list(KINDS)), max_size=6))
def test_features_are_the_same_on_a_gpu(training: Any, specs: Any, left: set[str]) -> None:
    table = with_values(training)
    ids = np.arange(len(table))
    host = Sample(
        columns=columns_of(wire(table), KINDS),
        fold_ids=ids,
        target=(ids % 3).astype(np.float32),
        training=len(ids),
    )
    with pytest.MonkeyPatch.context() as patch, np.errstate(all="ignore"):
        there = replace(host, columns=on_gpu(host.columns, install(patch), left))

        def answer(aggregates: tuple[Aggregate, ...]) -> list[Any]:
            return [each.measure(there if getattr(each, "on_gpu", False) else host) for each in aggregates]

        plan = FeaturePlan.fit(specs, KINDS, answer)
        expected = FeaturePlan.fit(
            specs, KINDS, lambda aggregates: [each.measure(host) for each in aggregates]
        )
        made = [array.get() for array in plan.transform(there.columns, ids)]  # type: ignore[attr-defined]
        wanted = expected.transform(host.columns, ids)
    assert plan.to_json() == expected.to_json()
    for ours, theirs in zip(made, wanted, strict=True):
        assert ours.tobytes() == theirs.tobytes()
