"""The gate on a real GPU: fp32 and fp16 by ONNX Runtime's CUDA provider, strings and features in a front on the CPU.
Skipped, with the reason, where there is none."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch

from serin.export.build import export_model
from serin.export.session import FrontAndCore, has_device, open_session
from serin.formats.bundle import read_golden, verify_bundle
from serin.store.store import Store
from tests.unit.export.small_dataset import flights, make_trained

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that torch can use"),
    pytest.mark.skipif(not has_device("cuda"), reason="this ONNX Runtime has no CUDA provider"),
]

ASKED = {"target": "gpu", "variants": ["fp32", "fp16", "int8", "int8_embeddings", "tensorrt"]}


@pytest.mark.parametrize("kind", ["mlp", "ft_transformer"])
def test_fp32_and_fp16_pass_the_gate_with_front_and_core(tmp_path: Path, kind: str) -> None:
    model = {"kind": kind, "hidden": [512, 256]} if kind == "mlp" else {"kind": kind, "blocks": 2, "heads": 4}
    trained = make_trained(tmp_path, "binary", export=ASKED, model=model)
    bundle = export_model(
        trained.spec, trained.checkpoint, trained.dataset, store=Store(str(tmp_path / "store")), lineage={}
    )
    folder = Path(bundle.path)
    assert {"front.onnx", "core.onnx"} <= set(verify_bundle(folder).files)
    gate = json.loads((folder / "gate.json").read_text())
    print(kind, "chosen", gate["chosen"], "front and core apart", gate["front_core_difference"])
    judged = {one["name"]: one for one in gate["variants"]}
    for one in judged.values():
        print(kind, one["name"], one["status"], one["bytes"], one["latency_us"], one["largest_score_difference"],
              one["drop"], one["reason"])  # fmt: skip
    assert judged["fp32"]["status"] in ("passed", "chosen")
    assert judged["fp16"]["status"] in ("passed", "chosen"), judged["fp16"]["reason"]
    assert judged["fp32"]["largest_score_difference"] < 1e-3, "between batch sizes; products go by TF32"
    assert judged["fp16"]["largest_score_difference"] < 0.01
    assert gate["front_core_difference"] < 0.01
    core = open_session(folder / "core.onnx", device="cuda")
    assert core.get_providers()[0] == "CUDAExecutionProvider"
    golden = read_golden(folder)
    served = FrontAndCore(open_session(folder / "front.onnx"), core).run(["score"], golden.inputs)[0]
    np.testing.assert_allclose(served, golden.outputs["score"], atol=1e-3)


def test_front_and_core_on_the_gpu_score_raw_rows_as_the_trained_network_does(tmp_path: Path) -> None:
    trained = make_trained(tmp_path, "binary", export={"target": "gpu"})
    bundle = export_model(
        trained.spec, trained.checkpoint, trained.dataset, store=Store(str(tmp_path / "store")), lineage={}
    )
    from serin.formats.schema import read_schema
    from serin.formats.wire import to_wire

    folder, rows = Path(bundle.path), pa.concat_tables([flights()] * 4)
    session = FrontAndCore(
        open_session(folder / "front.onnx"), open_session(folder / "core.onnx", device="cuda")
    )
    found = session.run(["score"], to_wire(rows, read_schema(folder)))[0]
    wanted = torch.sigmoid(torch.from_numpy(trained.logits(rows))).numpy()
    print("largest difference from torch", np.abs(found - wanted).max())
    np.testing.assert_allclose(found, wanted, atol=1e-4)
