"""Graphs of a registry, whose weights may be in other files. Whole imports are in tests/e2e/test_mlflow.py."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from onnx.external_data_helper import set_external_data

from serin.errors import ExportFailed
from serin.pipeline.import_registered import copy_graph
from tests.fakes.onnx_graphs import linear

WEIGHTS = np.arange(512, dtype=np.float32).reshape(256, 2)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The folder of a registered model."""
    folder = tmp_path / "model"
    folder.mkdir()
    return folder


def fetch_from(model: Path, scratch: Path) -> Callable[[str], Path]:
    """A function that copies one file of the model, as MLflow fetches it."""

    def fetch(relative: str) -> Path:
        scratch.mkdir(exist_ok=True)
        target = scratch / Path(relative).name
        shutil.copyfile(model / relative, target, follow_symlinks=False)
        return target

    return fetch


def write(model: Path, location: str, *, length: int = 2048, place: str = "model.onnx") -> None:
    """A graph whose weights are said to be at a location."""
    graph = linear(WEIGHTS)
    (weights,) = graph.graph.initializer
    set_external_data(weights, location, 0, length)
    weights.ClearField("raw_data")
    (model / place).parent.mkdir(exist_ok=True)
    (model / place).write_bytes(graph.SerializeToString())


@pytest.mark.parametrize("place", ["model.onnx", "data/model.onnx"])
@pytest.mark.parametrize("location", ["w.data", "parts/w.data"])
def test_weights_in_another_file_become_part_of_the_graph(
    model: Path, tmp_path: Path, place: str, location: str
) -> None:
    write(model, location, place=place)
    file = (model / place).parent / location
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(WEIGHTS.tobytes())
    copy_graph(fetch_from(model, tmp_path / "fetched"), place, tmp_path / "one.onnx", "models:/m/1")
    (found,) = onnx.load_model(tmp_path / "one.onnx", load_external_data=False).graph.initializer
    np.testing.assert_array_equal(numpy_helper.to_array(found), WEIGHTS)


def test_a_graph_with_its_weights_is_copied_as_it_is(model: Path, tmp_path: Path) -> None:
    (model / "model.onnx").write_bytes(linear(WEIGHTS).SerializeToString())
    copy_graph(fetch_from(model, tmp_path / "fetched"), "model.onnx", tmp_path / "one.onnx", "models:/m/1")
    assert (tmp_path / "one.onnx").read_bytes() == (model / "model.onnx").read_bytes()


@pytest.mark.parametrize(
    ("location", "reason"),
    [
        ("/etc/hostname", "outside of the model"),
        ("../w.data", "outside of the model"),
        ("parts/../../w.data", "outside of the model"),
        ("", "outside of the model"),
        ("link.data", "outside of the model"),
        ("short.data", "its graph cannot be read"),
    ],
)
def test_weights_are_read_from_the_model_alone(
    model: Path, tmp_path: Path, location: str, reason: str
) -> None:
    write(model, location)
    (tmp_path / "w.data").write_bytes(WEIGHTS.tobytes())
    (model / "short.data").write_bytes(WEIGHTS.tobytes()[:9])
    (model / "link.data").symlink_to(tmp_path / "w.data")
    with pytest.raises(ExportFailed, match=reason):
        copy_graph(
            fetch_from(model, tmp_path / "fetched"), "model.onnx", tmp_path / "one.onnx", "models:/m/1"
        )
    assert not (tmp_path / "one.onnx").exists()


def test_what_is_not_a_graph_is_refused(model: Path, tmp_path: Path) -> None:
    (model / "model.onnx").write_bytes(b"not a graph")
    with pytest.raises(ExportFailed, match="its graph cannot be read"):
        copy_graph(
            fetch_from(model, tmp_path / "fetched"), "model.onnx", tmp_path / "one.onnx", "models:/m/1"
        )
