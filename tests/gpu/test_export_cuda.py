"""The gate and bulk scoring on a real GPU: strings and features on the host, equal answers, also after kill -9."""

import json
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from serin.commands.predictions import predict_in_bulk
from serin.formats.bundle import read_golden, verify_bundle
from serin.formats.schema import read_schema
from serin.formats.wire import to_wire
from serin.machine.leases import waiters
from serin.scoring.predict import Scorer
from serin.scoring.session import FrontAndCore, has_device, open_session, run_in_batches
from serin.store.artifacts import Bundle
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
    bundle = trained.export(tmp_path)
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
    bundle = trained.export(tmp_path)
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


ROWS, FILES = 400_000, 8


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    folder, model = tmp_path_factory.mktemp("trained"), {"kind": "mlp", "hidden": [512, 256]}
    return make_trained(folder, "binary", export={"target": "gpu"}, model=model).export(folder)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rows")
    table = flights(ROWS // FILES)
    for number in range(FILES):
        ids = pa.array(range(number * len(table), (number + 1) * len(table)))
        pq.write_table(table.append_column("id", ids), folder / f"{number}.parquet")
    return folder


def test_scores_are_those_of_a_gpu_release_and_near_those_of_the_cpu(
    bundle: Bundle, files: Path, tmp_path: Path, home: Path
) -> None:
    seconds = {}
    for device in ("gpu", "cpu"):
        began = time.perf_counter()
        done = predict_in_bulk(bundle, str(files), tmp_path / device, scheduler=None, device=device)
        seconds[device] = time.perf_counter() - began
        assert done == ROWS
    found, plain = (pq.read_table(tmp_path / device) for device in ("gpu", "cpu"))
    assert found.column("id").to_pylist() == list(range(ROWS))
    folder = Path(bundle.path)
    served = FrontAndCore(
        open_session(folder / "front.onnx"), open_session(folder / "core.onnx", device="cuda")
    )
    inputs = to_wire(flights(ROWS // FILES), read_schema(folder))
    wanted = np.tile(run_in_batches(served, inputs, ["score"], 1024)["score"][:, 0], FILES)
    scores = found.column("score").to_numpy()
    apart = float(np.abs(scores - wanted).max())
    print(f"bulk, {ROWS:,} rows in {FILES} files: {seconds}; {apart:.2g} from a GPU release")
    np.testing.assert_allclose(scores, wanted, atol=1e-3)
    np.testing.assert_allclose(scores, plain.column("score").to_numpy(), atol=5e-3)
    assert not waiters(home)


def test_one_scorer_may_be_used_by_many_threads(bundle: Bundle) -> None:
    from concurrent.futures import ThreadPoolExecutor

    scorer, table = Scorer(bundle.path, threads=1, place="cuda"), flights(70_000)
    wanted = scorer.answers(table)["score"]
    with ThreadPoolExecutor(8) as threads:
        for found in threads.map(lambda _: scorer.answers(table)["score"], range(24)):
            np.testing.assert_array_equal(found, wanted)
