"""TensorRT for RTX with its real libraries, in a folder that belongs to this test: engines are built ahead of time,
parsed and inspected without a GPU. None is executed here."""

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

from serin.export.convert.onnx2trt import gpu_refusal, rtx_reason
from serin.export.convert.torch2onnx import torch2onnx
from serin.export.variants.build import Unavailable, Variant, build_variants, to_fp16
from serin.export.variants.choose import judge_variants
from serin.machine.hardware import inventory
from serin.models.build import build_model
from serin.models.shape import TableShape
from serin.scoring.session import has_device
from serin.spec.model import ModelSpec
from tests.kit.commands import run
from tests.unit.export.small_court import copy_of, rows_of, small_court, small_network

VERSION = "1.7.1.116"
PACKAGES = [f"tensorrt-rtx-cu13-{part}=={VERSION}" for part in ("libs", "bindings")]
INSTALL_S = 240.0
PROBE_S = 240.0
NO_GPU = pytest.mark.skipif(bool(inventory()), reason="this machine has a GPU; see tests/gpu")


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
    probe, variables = "tests.unit.export.rtx_probe", {**os.environ, "PYTHONPATH": path}
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
def test_an_engine_is_built_for_two_kinds_of_gpu_and_keeps_the_precision_of_the_graph(
    found: dict[str, Any], name: str
) -> None:
    engine = found[name]
    print(name, engine["bytes"], "bytes,", engine["precisions"])
    assert engine["bytes"] > 100_000
    assert engine["tensors"] == [
        ["num", "FLOAT", [-1, 3]],
        ["cat", "INT64", [-1, 1]],
        ["logits", "FLOAT", [-1, 1]],
    ]
    assert {dtype for kind, dtype in engine["types"] if kind == "MATRIX_MULTIPLY"} == {"HALF"}
    assert "HALF" in engine["precisions"], "layers that the builder made"


def test_a_graph_in_fp32_gives_an_engine_without_a_layer_in_fp16(found: dict[str, Any]) -> None:
    assert {dtype for _, dtype in found["plain"]["types"]} == {"FLOAT", "INT32", "INT64"}
    assert "HALF" not in found["plain"]["precisions"]


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


def test_a_graph_is_refused_on_any_machine_before_it_is_asked_for_a_gpu(found: dict[str, Any]) -> None:
    assert found["refused reason"] == found["foreign"]["refused"]


def test_a_compute_capability_that_it_does_not_know_is_refused(found: dict[str, Any]) -> None:
    assert found["other capability"]["refused"] == "it cannot be built for compute capability 9.0"


@NO_GPU
def test_without_a_gpu_the_engine_is_built_and_reported_as_not_executed(found: dict[str, Any]) -> None:
    reason = found["reason"]
    assert reason.startswith("built for compute capability 8.0 and 8.9 (")
    assert reason.endswith("not executed: there is no GPU here")
    assert "CUDA" in found["hand"]["runtime"], "the runtime refuses by itself"
    assert found["provider"] == (
        "ONNX Runtime has no NvTensorRTRTXExecutionProvider: pip install 'serin[tensorrt]'"
    )


def test_the_engine_for_triton_is_built_by_the_same_api(found: dict[str, Any]) -> None:
    assert found["plan bytes"] > 100_000


@NO_GPU
def test_the_variant_is_listed_with_its_reason_where_nothing_of_it_is_installed() -> None:
    network = small_network()
    built = list(build_variants(("fp32", "tensorrt_rtx"), network, rows_of(512, 5), "cpu"))
    assert isinstance(built[1], Unavailable)
    _, judged = judge_variants(small_court(network), built)
    assert (judged[1].status, judged[1].reason) == ("unavailable", "there is no GPU here")
    assert not has_device("tensorrt_rtx")
    assert rtx_reason(network.graph, max_rows=8) == "there is no GPU here"


@pytest.mark.parametrize(
    ("capabilities", "refusal"),
    [
        ({}, "there is no GPU here"),
        (
            {"NVIDIA H200": "9.0"},
            "NVIDIA H200 has compute capability 9.0, and TensorRT for RTX runs on 8.0, 8.6, 8.9 and 12.x",
        ),
        ({"NVIDIA B200": "10.0", "Tesla T4": "7.5"}, "NVIDIA B200 has compute capability 10.0; Tesla T4 has"),
        ({"NVIDIA H200": "9.0", "NVIDIA L4": "8.9"}, ""),
        ({"NVIDIA A100": "8.0"}, ""),
        ({"NVIDIA GeForce RTX 5090": "12.0"}, ""),
        ({"NVIDIA GB10": "12.1"}, ""),
    ],
)
def test_a_machine_is_refused_by_the_names_of_its_gpus(capabilities: dict[str, str], refusal: str) -> None:
    found = gpu_refusal(capabilities)
    assert found.startswith(refusal)
    assert bool(found) == bool(refusal)


@pytest.mark.parametrize(("experimental", "served"), [(True, "fp32"), (False, "tensorrt_rtx")])
def test_an_experimental_variant_is_measured_and_not_chosen(experimental: bool, served: str) -> None:
    network = small_network()
    base = Variant(name="fp32", graph=with_work(network.graph))
    trial = Variant(name="tensorrt_rtx", graph=network.graph, experimental=experimental)
    chosen, judged = judge_variants(small_court(network), [base, trial])
    assert chosen.variant.name == served
    assert judged[1].mix_us is not None
    assert judged[0].mix_us is not None
    assert judged[1].mix_us < judged[0].mix_us
    if experimental:
        assert (judged[1].status, judged[1].reason) == ("passed", "experimental: measured, not served")


def with_work(graph: onnx.ModelProto) -> onnx.ModelProto:
    """The same answers, and a large product beside them that takes time."""
    slow, make = copy_of(graph), onnx.helper.make_node
    answer = next(node for node in slow.graph.node if node.output[0] == "logits")
    answer.output[0] = "quick"
    square = np.full((160, 160), 1e-3, np.float32)
    zero = np.zeros((), np.float32)
    slow.graph.initializer.extend(
        [onnx.numpy_helper.from_array(square, "square"), onnx.numpy_helper.from_array(zero, "zero")]
    )
    slow.graph.node.extend(
        [
            make("ReduceMean", ["num"], ["mean"], name="mean", keepdims=0),
            make("Mul", ["square", "mean"], ["scaled"], name="scaled"),
            make("MatMul", ["scaled", "square"], ["product"], name="product"),
            make("ReduceMean", ["product"], ["one"], name="one", keepdims=0),
            make("Mul", ["one", "zero"], ["nothing"], name="nothing"),
            make("Add", ["quick", "nothing"], ["logits"], name="sum"),
        ]
    )
    return slow
