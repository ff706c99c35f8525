"""`python -m tests.ways.projects KIND FOLDER MODEL`: writes a small project as a user has it, on the machine that sends
it. The spec is FOLDER/model/spec.yaml; FOLDER is where the own operator is imported from."""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow.parquet as pq
import yaml

from tests.fakes import own_operators
from tests.fakes.own_project import LAYERS, NET
from tests.fakes.small_pipeline import parcels, small_spec
from tests.kit.index import write_wheel

REQUIREMENT = "shelf-tools==1.2"
TREES = {"kind": "xgboost", "rounds": 5}
TRAIN = """
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from least_squares import solved
from serin.training.foreign.own_script import this_run

run = this_run()
train = run.split("train")
weights = solved(train.num, train.target)
node = helper.make_node("MatMul", ["num", "w"], ["logits"])
graph = helper.make_graph(
    [node], "least_squares",
    [helper.make_tensor_value_info("num", TensorProto.FLOAT, ["batch", train.num.shape[1]])],
    [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 1])],
    [numpy_helper.from_array(np.float32(weights).reshape(-1, 1), "w")],
)
onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), run.output / "model.onnx")
"""
LEAST_SQUARES = """
import numpy as np


def solved(rows, target):
    return np.linalg.lstsq(rows, target - target.mean(), rcond=None)[0]
"""


def write_index(folder: Path) -> None:
    """The package index of a place: one package, which no machine has installed."""
    files = {"__init__.py": LAYERS, "net.py": NET.replace("from layers", "from shelf_tools")}
    write_wheel(folder, "shelf-tools", "1.2", {f"shelf_tools/{name}": text for name, text in files.items()})


def write_project(kind: str, root: Path, model: str) -> None:
    folder = root / "model"
    folder.mkdir(parents=True)
    pq.write_table(parcels(3000), folder / "parcels.parquet")
    spec = project_spec(kind, model)
    for name, text in _files(kind).items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(text)
    (folder / "spec.yaml").write_text(yaml.safe_dump(spec, sort_keys=False))


def project_spec(kind: str, model: str) -> dict[str, Any]:
    """The spec; its table is parcels.parquet beside it."""
    sections: dict[str, dict[str, Any]] = {
        "spec": {"model": TREES, "training": {}},
        "operator": {"model": TREES, "training": {}},
        "module": {"model": {"module": "net.py:Net"}},
        "script": {"model": {"script": "train.py"}, "training": {}},
        "requirements": {"model": {"module": "net.py:Net"}, "environment": {"requirements": [REQUIREMENT]}},
    }
    with TemporaryDirectory() as unused:
        spec = small_spec(Path(unused), rows=1, **sections[kind])
    spec["name"], spec["data"]["tables"] = model, {"parcels": "parcels.parquet"}
    if kind == "operator":
        spec["features"][0]["steps"].append("ours.steps:Squash")
    return {key: value for key, value in spec.items() if value}


def _files(kind: str) -> dict[str, str]:
    match kind:
        case "module":
            return {"model/net.py": NET, "model/layers.py": LAYERS}
        case "script":
            return {"model/train.py": TRAIN, "model/least_squares.py": LEAST_SQUARES}
        case "operator":
            return {"ours/__init__.py": "", "ours/steps.py": Path(own_operators.__file__).read_text()}
        case "requirements":
            return {"model/net.py": NET.replace("from layers", "from shelf_tools")}
    return {}


if __name__ == "__main__":
    write_project(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
