"""Engines for Triton, built with the real libraries of TensorRT for RTX in the place of TensorRT's, which are not on
PyPI and have the same Python API. None is executed here."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from serin.export.convert.torch2onnx import torch2onnx
from serin.export.variants.build import to_fp16
from serin.models.build import build_model
from serin.models.shape import TableShape
from serin.spec.model import ModelSpec
from tests.kit.commands import run
from tests.unit.export.small_court import copy_of, rows_of, small_network

VERSION = "1.7.1.116"
PACKAGES = [f"tensorrt-rtx-cu13-{part}=={VERSION}" for part in ("libs", "bindings")]
INSTALL_S = 240.0
PROBE_S = 240.0


@pytest.fixture(scope="module")
def installed() -> Path:
    """A folder with the libraries, kept between runs: 92 MB to download."""
    python = f"{sys.implementation.cache_tag}-{platform.machine()}"
    cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "serin-tests"
    folder = cache / f"tensorrt-rtx-{VERSION}-{python}"
    if folder.is_dir():
        return folder
    scratch = cache / f".{folder.name}.{os.getpid()}"
    options = ["--quiet", "--no-deps", "--target", str(scratch)]
    command = [sys.executable, "-m", "pip", "install", *options, *PACKAGES]
    try:
        made = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S, check=False)
    except subprocess.TimeoutExpired:
        pytest.skip(f"TensorRT for RTX could not be downloaded within {INSTALL_S:.0f} s")
    if made.returncode:
        pytest.skip(f"TensorRT for RTX cannot be installed here: {made.stderr.strip().splitlines()[-1]}")
    try:
        scratch.rename(folder)
    except OSError:
        assert folder.is_dir(), "another run was faster"
    return folder


@pytest.fixture(scope="module")
def found(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the libraries make of good and of wrong graphs, in a process that has them."""
    folder = tmp_path_factory.mktemp("graphs")
    for name, graph in graphs().items():
        onnx.save(graph, folder / f"{name}.onnx")
    path = os.pathsep.join([str(Path.cwd()), str(installed)])
    probe, variables = "tests.unit.export.tensorrt_probe", {**os.environ, "PYTHONPATH": path}
    run(sys.executable, "-m", probe, folder, env=variables, timeout_s=PROBE_S)
    answer: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return answer


def graphs() -> dict[str, onnx.ModelProto]:
    hand = to_fp16(small_network().graph, rows_of(64, 1))
    assert isinstance(hand, onnx.ModelProto)
    torch.manual_seed(1)
    shape = TableShape(numeric=3, sizes=(100,), outputs=1)
    trained = to_fp16(torch2onnx(build_model(ModelSpec(kind="dcn"), shape), shape), rows_of(64, 1))
    assert isinstance(trained, onnx.ModelProto)
    return {
        "hand": hand,
        "dcn": trained,
        "plain": small_network().graph,
        "foreign": with_node(hand, "hash_codes", "MurmurHash3", ["cat"], domain="com.microsoft"),
        "unsupported": with_node(hand, "determinant", "Det", ["num"]),
        "mixed": with_node(hand, "mixed_types", "Add", ["num", "cat"]),
        "narrow": with_wrong_width(hand, "first"),
    }


def with_node(
    graph: onnx.ModelProto, name: str, kind: str, inputs: list[str], domain: str = ""
) -> onnx.ModelProto:
    wrong = copy_of(graph)
    node = onnx.helper.make_node(kind, inputs, [f"{name}_out"], name=name, domain=domain)
    wrong.graph.node.insert(0, node)
    if domain:
        wrong.opset_import.append(onnx.helper.make_opsetid(domain, 1))
    return wrong


def with_wrong_width(graph: onnx.ModelProto, name: str) -> onnx.ModelProto:
    wrong = copy_of(graph)
    weight = next(node for node in wrong.graph.node if node.name == name).input[1]
    tensor = next(each for each in wrong.graph.initializer if each.name == weight)
    values = onnx.numpy_helper.to_array(tensor)
    tensor.CopyFrom(onnx.numpy_helper.from_array(np.concatenate([values, values]), weight))
    return wrong


@pytest.mark.parametrize("name", ["hand", "dcn"])
def test_an_engine_is_built_and_keeps_the_precision_of_the_graph(found: dict[str, Any], name: str) -> None:
    engine = found[name]
    assert engine["bytes"] > 100_000
    assert engine["tensors"] == [
        ["num", "FLOAT", [-1, 3]],
        ["cat", "INT64", [-1, 1]],
        ["logits", "FLOAT", [-1, 1]],
    ]
    assert {dtype for kind, dtype in engine["types"] if kind == "MATRIX_MULTIPLY"} == {"HALF"}


def test_a_graph_in_fp32_gives_an_engine_without_a_layer_in_fp16(found: dict[str, Any]) -> None:
    assert {dtype for _, dtype in found["plain"]["types"]} == {"FLOAT", "INT32", "INT64"}


@pytest.mark.parametrize(
    ("name", "node", "why"),
    [
        ("foreign", "'hash_codes' (MurmurHash3)", "Plugin not found"),
        ("unsupported", "'determinant' (Det)", "the operator is not supported"),
        ("mixed", "'mixed_types' (Add)", "must have same input types"),
        ("narrow", "'first' (Gemm)", "must match"),
    ],
)
def test_a_graph_that_cannot_be_built_is_refused_with_its_node(
    found: dict[str, Any], name: str, node: str, why: str
) -> None:
    refused = found[name]["refused"]
    assert refused.startswith(f"node {node}: ")
    assert why in refused
    assert "/_src/" not in refused
