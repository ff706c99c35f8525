"""A network with 50 million weights in its tables, from raw rows to Triton: killed, resumed, exported with its weights
in a file beside the graph, and served as it was trained."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from serin.errors import WorkerFailed
from serin.etl.build import build_dataset
from serin.export.build import export_model
from serin.formats import external_data
from serin.formats.bundle import read_manifest
from serin.formats.schema import read_schema
from serin.formats.shards import read_split
from serin.formats.trained import WEIGHTS
from serin.formats.wire import to_wire
from serin.models.build import load_model, open_margins
from serin.models.trees import scores
from serin.scoring.predict import Scorer
from serin.serving.client.client import predict
from serin.spec.load import load_spec
from serin.store.artifacts import Release
from serin.store.store import Store
from serin.training.launch import launcher
from tests.e2e.test_export_served import served
from tests.signals import hit
from tests.unit.training.runs import at_the_next_checkpoint, choices, records
from tests.unit.training.warm import warm  # noqa: F401 (a fixture)

ROWS = 40_000
BUCKETS = {"user": 2_000_000, "item": 1_200_000}
WIDTH = 16


def visits(rows: int) -> pa.Table:
    """Ids of many millions, some of them far more frequent than others, as strings and as integers."""
    chance = np.random.default_rng(3)
    user = (5e7 * chance.random(rows) ** 6).astype(np.int64)
    item = (2e7 * chance.random(rows) ** 6).astype(np.int64)
    price = chance.gamma(2.0, 10.0, rows).astype(np.float32)
    bought = price / 20 + np.sin(user) + np.sin(item) + chance.normal(0, 0.3, rows) > 1
    return pa.table(
        {"user": [f"u{one}" for one in user], "item": item, "price": price, "bought": bought.astype(np.int64)}
    )


def test_fifty_million_weights_are_trained_exported_and_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue("warm")  # a worker that loads torch by itself is shown elsewhere
    monkeypatch.setattr(external_data, "LIMIT_BYTES", 100_000_000)
    table = visits(ROWS)
    pq.write_table(table, tmp_path / "visits.parquet")
    features = [{"columns": [name], "steps": [{"hash_bucket": size}]} for name, size in BUCKETS.items()]
    spec = load_spec(
        {
            "name": "visits",
            "data": {
                "tables": {"visits": str(tmp_path / "visits.parquet")},
                "target": {"expression": "bought == 1", "task": "binary"},
            },
            "features": [*features, {"columns": ["price"], "steps": ["normalize"]}],
            "model": {"kind": "dcn", "embedding": WIDTH, "hidden": [64]},
            "training": {
                "epochs": 1, "batch_rows": 2048, "checkpoint_every_steps": 6, "seed": 3, "precision": "fp32",
            },
            "export": {"variants": ["fp32", "int8_embeddings"]},
        }
    )  # fmt: skip
    store, run = Store(str(tmp_path / "store")), tmp_path / "run"
    dataset = build_dataset(spec.data, spec.features, spec.etl, store=store)
    with pytest.raises(WorkerFailed, match="SIGKILL"), at_the_next_checkpoint(run, hit):
        launcher.train(spec.model, spec.training, dataset, folder=run)
    checkpoint = launcher.train(spec.model, spec.training, dataset, folder=run)
    assert [record["step"] for record in records(run, "started")] == [0, 6]
    assert choices(run)["by_row"]
    weights = sum(weight.numel() for weight in load_model(Path(checkpoint.path)).parameters())
    assert weights > 50_000_000

    bundle = export_model(spec, checkpoint, dataset, store=store, lineage={})
    files = read_manifest(Path(bundle.path)).files
    large = {name: file.size for name, file in files.items() if file.size > 1_000_000}
    assert set(large) == {WEIGHTS}
    assert large[WEIGHTS] > 4 * 50_000_000
    test = read_split(dataset.path, "test").whole()
    trained = scores(
        open_margins(Path(checkpoint.path))(np.asarray(test.num), np.asarray(test.cat)), "binary"
    )
    rows = table.take(np.asarray(test.rows)).drop_columns(["bought"])
    np.testing.assert_allclose(Scorer(bundle.path).answers(rows)["score"], trained, rtol=0, atol=1e-5)
    release, schema = Release(model=bundle.model, version=bundle.version), read_schema(Path(bundle.path))
    with served(store, release) as (releases, url):
        releases.verify(release)
        answer = predict(url, release.model, to_wire(rows, schema), schema, "http", release.version)
    np.testing.assert_allclose(answer["score"], trained, rtol=0, atol=1e-5)
