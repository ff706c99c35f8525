"""Bulk scoring on a real GPU: equal to what a GPU release computes, in order, also after kill -9.
Skipped, with the reason, where there is none."""

import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from serin.commands.predictions import predict_in_bulk
from serin.export.build import export_model
from serin.export.score.predict import Scorer
from serin.export.session import FrontAndCore, has_device, open_session, run_in_batches
from serin.formats.schema import read_schema
from serin.formats.wire import to_wire
from serin.machine.leases import waiters
from serin.store.artifacts import Bundle
from serin.store.store import Store
from tests.unit.export.small_dataset import flights, make_trained

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that torch can use"),
    pytest.mark.skipif(not has_device("cuda"), reason="this ONNX Runtime has no CUDA provider"),
]
ROWS, FILES = 400_000, 8


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    trained = make_trained(
        tmp_path_factory.mktemp("trained"), "binary", export={"target": "gpu"},
        model={"kind": "mlp", "hidden": [512, 256]},
    )  # fmt: skip
    store = Store(str(tmp_path_factory.mktemp("store")))
    return export_model(trained.spec, trained.checkpoint, trained.dataset, store=store, lineage={})


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rows")
    table = flights(ROWS // FILES)
    for number in range(FILES):
        ids = pa.array(range(number * len(table), (number + 1) * len(table)))
        pq.write_table(table.append_column("id", ids), folder / f"{number}.parquet")
    return folder


def test_scores_are_those_of_a_gpu_release_and_near_those_of_the_cpu(
    bundle: Bundle, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERIN_HOME", str(tmp_path / "home"))
    seconds = {}
    for device in ("gpu", "cpu"):
        began = time.perf_counter()
        done = predict_in_bulk(
            bundle, str(files), tmp_path / device, workers=None, scheduler=None, device=device
        )
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
    assert not waiters(tmp_path / "home")


def test_one_scorer_may_be_used_by_many_threads(bundle: Bundle) -> None:
    from concurrent.futures import ThreadPoolExecutor

    scorer, table = Scorer(bundle.path, threads=1, place="cuda"), flights(70_000)
    wanted = scorer.answers(table)["score"]
    with ThreadPoolExecutor(8) as threads:
        for found in threads.map(lambda _: scorer.answers(table)["score"], range(24)):
            np.testing.assert_array_equal(found, wanted)
