"""The operator that docs/how-to/add-an-operator.md shows is one file, and nothing else has to change for it."""

from __future__ import annotations

import json
import pkgutil
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from serin.etl.build import build_dataset
from serin.export.convert.features2onnx import features2onnx
from serin.export.gate.gate import check_features
from serin.export.gate.golden import read_golden_rows
from serin.features import operator, ops
from serin.features.plan import FeaturePlan
from serin.formats.dataset import read_dataset
from serin.formats.schema import Schema, outputs_of
from serin.formats.shards import read_split
from serin.spec.features import FeatureSpec
from serin.spec.load import load_spec
from serin.spec.reference.json_schema import spec_schema
from serin.spec.steps import operators
from serin.store.store import Store

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "add-an-operator.md"


@pytest.fixture(params=["max_abs", "max_abs:MaxAbs"])
def step(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The step's name in a spec, with the page's file among Serin's operators or in a folder of the user's."""
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    (tmp_path / "max_abs.py").write_text(code, encoding="utf-8")
    for module, register in ((operators, "_registered"), (operator, "_fitted"), (operator, "_names")):
        monkeypatch.setattr(module, register, dict(getattr(module, register)))
    if ":" in request.param:
        monkeypatch.syspath_prepend(str(tmp_path))
    else:
        monkeypatch.setattr(ops, "__path__", [*ops.__path__, str(tmp_path)])
    yield request.param
    for name in ("max_abs", f"{ops.__name__}.max_abs"):
        sys.modules.pop(name, None)


def test_the_page_s_operator_goes_from_the_spec_to_the_graph(step: str, tmp_path: Path) -> None:
    random = np.random.default_rng(3)
    columns = {
        "x": pa.array(random.normal(0, 9, 400), mask=random.random(400) < 0.1),
        "z": pa.array(random.integers(-50, 5, 400)),
        "y": pa.array(random.integers(0, 2, 400)),
    }
    pq.write_table(pa.table(columns), tmp_path / "table.parquet")
    spec = load_spec(
        {
            "name": "shown",
            "data": {
                "tables": {"main": str(tmp_path / "table.parquet")},
                "target": {"expression": "y == 1", "task": "binary"},
            },
            "features": [
                {"columns": ["x", "z"], "steps": ["fill_median", {step: 2}]},
                {"columns": ["z"], "steps": [step, {"bucketize": {"quantiles": 4}}]},
            ],
        }
    )
    assert load_spec(spec.model_dump(mode="json", by_alias=True)) == spec
    assert bool(spec.features[0].operators) == (":" in step)  # a user's code is part of the dataset's key
    made = build_dataset(spec.data, spec.features, spec.etl, store=Store(str(tmp_path / "store")))

    train = read_split(made.path, "train").whole()
    assert np.abs(train.num).max(axis=0) == pytest.approx([2, 2], rel=1e-6)
    assert set(train.cat[:, 0].tolist()) == {1, 2, 3, 4}
    folder = Path(made.path)
    dataset = read_dataset(folder)
    plan = FeaturePlan.from_json(json.loads((folder / "features.json").read_text()))
    assert any("; divided by" in line for line in plan.describe())
    graph = features2onnx(plan, dataset, folder)
    schema = Schema(task=dataset.task, inputs=dataset.inputs, outputs=outputs_of(dataset.task))
    golden = read_golden_rows(folder, schema, dataset.numeric, [each.name for each in dataset.categorical])
    check_features(graph.model, (graph.num, graph.cat), golden, plan.approximate)


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


def test_a_file_among_the_operators_registers_the_operator_of_its_name() -> None:
    files = {module.name for module in pkgutil.iter_modules(ops.__path__)}
    found = {name: kind.__module__ for name, kind in operators.operators().items()}
    assert found == {name: f"{ops.__name__}.{name}" for name in files}


def test_two_operators_cannot_have_one_name() -> None:
    class Clip(operator.NumberOperator):
        name = "clip"

    with pytest.raises(ValueError, match="two operators are named 'clip'"):
        operators.add_operator(Clip)
