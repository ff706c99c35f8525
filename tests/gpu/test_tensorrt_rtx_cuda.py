"""TensorRT for RTX on a real GPU: measured where it supports the card, refused by name and reason where not.
Skipped, with the reason, where there is no GPU."""

import json
from pathlib import Path

import onnx
import pytest
import torch

from serin.export.convert.onnx2trt import (
    RUNS_ON,
    build_rtx_engine,
    gpu_refusal,
    is_installed,
    supports,
)
from serin.export.variants.build import to_fp16
from serin.machine.hardware import Nvml, inventory
from serin.scoring.session import provider_refusal
from tests.unit.export.rtx_probe import runtime_refusal
from tests.unit.export.small_court import rows_of, small_network
from tests.unit.export.small_dataset import make_trained

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that torch can use")
INSTALLED = pytest.mark.skipif(not is_installed(), reason="TensorRT for RTX is not installed")


def capability() -> str:
    return "{}.{}".format(*torch.cuda.get_device_capability())


def test_the_driver_tells_the_compute_capability_that_torch_finds() -> None:
    nvml = Nvml.open()
    assert nvml.compute_capability(inventory()[0].id) == capability()


def test_a_card_that_is_not_supported_is_refused_by_name_and_reason() -> None:
    if supports(capability()):
        pytest.skip(f"TensorRT for RTX supports compute capability {capability()}")
    refusal = gpu_refusal()
    print("refusal:", refusal)
    name = torch.cuda.get_device_name()
    assert refusal == f"{name} has compute capability {capability()}, and TensorRT for RTX runs on {RUNS_ON}"


def test_the_export_lists_the_variant_as_measured_or_with_its_refusal(tmp_path: Path) -> None:
    asked = {"target": "gpu", "variants": ["fp32", "tensorrt_rtx"]}
    trained = make_trained(tmp_path, "binary", export=asked)
    bundle = trained.export(tmp_path)
    gate = json.loads((Path(bundle.path) / "gate.json").read_text())
    found = {one["name"]: one for one in gate["variants"]}["tensorrt_rtx"]
    print("tensorrt_rtx", found["status"], found["latency_us"], found["reason"])
    assert gate["chosen"] == "fp32", "it is never served"
    if supports(capability()) and is_installed() and not provider_refusal():
        assert found["status"] == "passed", found["reason"]
        assert found["latency_us"]
    else:
        assert found["status"] == "unavailable"
        assert gpu_refusal() in found["reason"]


@INSTALLED
def test_the_runtime_itself_accepts_the_engine_exactly_on_a_card_that_is_listed() -> None:
    graph = to_fp16(small_network().graph, rows_of(64, 1))
    assert isinstance(graph, onnx.ModelProto)
    plan = build_rtx_engine(graph, max_rows=64).plan
    refusal = runtime_refusal(plan)
    print("runtime:", refusal or "loads the engine", "| provider:", provider_refusal() or "finds a device")
    if capability() in ("8.0", "8.9"):
        assert refusal == ""
    else:
        assert refusal
    if not supports(capability()):
        assert "compute capability" in refusal
