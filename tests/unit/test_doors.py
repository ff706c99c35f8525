"""Each door from its spec to scores, by the stages that the command calls; no Prefect, no server."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sklearn.datasets import load_digits

from serin.columns.column import column_from_arrow
from serin.errors import GateFailed
from serin.export.score.predict import Scorer
from serin.features.plan import FeaturePlan
from serin.formats.trained import read_record, read_trained
from serin.models.trees import margins, read_booster, scores
from serin.pipeline.run_stage import run_export, run_train
from serin.spec.load import load_spec
from serin.store.store import Store
from tests.fakes.small_pipeline import small_spec

ROOT = Path(__file__).parents[2]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SERIN_HOME", str(tmp_path / "home"))
    return tmp_path


def test_xgboost_is_served_by_the_same_graph_as_a_network(home: Path) -> None:
    """The published graph scores raw rows as XGBoost itself scores the features that the ETL makes of them."""
    spec = load_spec(small_spec(home, model={"kind": "xgboost", "rounds": 20}))
    checkpoint = run_train(spec).value

    bundle = run_export(spec).value
    table = pq.read_table(home / "parcels.parquet").slice(0, 300).drop_columns(["hours"])
    found = Scorer(bundle.path).answers(table)["score"]

    plan = _plan(bundle.path)
    kinds = {"weight": "float", "distance": "int", "carrier": "string"}
    num, cat = plan.transform(
        {name: column_from_arrow(table.column(name), kind) for name, kind in kinds.items()}
    )
    booster = read_booster(read_trained(checkpoint.path)[1])
    wanted = scores(margins(booster, num, cat, [column.size for column in plan.categorical]), "binary")
    assert found == pytest.approx(wanted, abs=1e-5)
    assert checkpoint.metrics["test_auc"] > 0.8
    assert "XGBoost trees" in Path(bundle.path, "card.md").read_text()


def test_groups_are_on_the_card_and_a_version_that_treats_them_too_differently_is_refused(home: Path) -> None:
    """The swift carrier's parcels are rarely late, so their selection rate is far from that of the others."""
    sections: dict[str, Any] = {"model": {"kind": "xgboost", "rounds": 5}}
    export: dict[str, Any] = {"segments": ["carrier"], "groups": {"max_gap": 0.4, "min_rows": 50}}
    spec = load_spec(small_spec(home, **sections, export=export))
    run_train(spec)

    bundle = run_export(spec).value

    groups = json.loads(Path(bundle.path, "gate.json").read_text())["groups"]
    card = Path(bundle.path, "card.md").read_text()
    assert [one["group"] for one in groups["groups"]] == ["carrier=swift", "carrier=steady"]
    assert list(groups["small"]) == ["carrier=slow"]
    assert "Not judged, with fewer than 50 rows: carrier=slow (" in card
    assert "| carrier=swift | " in card
    strict = {"segments": ["carrier"], "groups": {"max_rate_gap": 0.05, "threshold": 0.3, "min_rows": 20}}
    with pytest.raises(GateFailed, match=r"2 of 3 groups beyond a limit, .* carrier=swift: selection rate"):
        run_export(load_spec(small_spec(home, **sections, export=strict)))
    assert Store.open().versions(spec.name) == [1]


def test_the_digits_go_from_a_script_to_a_version_that_reads_images(
    home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="serin")
    spec = load_spec(ROOT / "examples" / "digits" / "spec.yaml")

    checkpoint = run_train(spec).value
    bundle = run_export(spec).value

    digits = load_digits()
    chosen = np.arange(len(digits.target)) % 5 == 0
    table = pa.table({"image": digits.images[chosen].reshape(-1, 64).tolist()})
    found = Scorer(bundle.path).answers(table)
    right = float(np.mean(found["label"][:, 0] == digits.target[chosen]))
    assert right == pytest.approx(checkpoint.metrics["test_accuracy"])
    assert right > 0.9
    assert any("epoch 6/6 done: accuracy" in line for line in caplog.messages)
    assert Store.open().bundle("digits", 1).digest == bundle.digest


def _plan(bundle: str) -> FeaturePlan:
    return FeaturePlan.from_json(json.loads(Path(bundle, "features.json").read_text()))


def test_a_pruned_network_is_offered_as_a_variant_with_its_price(
    home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="serin")
    training = {"epochs": 2, "batch_rows": 64, "learning_rate": 0.02, "seed": 3, "prune": {"share": 0.5}}
    sections = {
        "model": {"hidden": [64, 32]},
        "training": training,
        "export": {"variants": ["fp32", "pruned"], "budget": {"max_drop": 0.05}},
    }
    spec = load_spec(small_spec(home, **sections))

    checkpoint = run_train(spec).value
    bundle = run_export(spec).value

    gate = json.loads(Path(bundle.path, "gate.json").read_text())
    variants = {one["name"]: one for one in gate["variants"]}
    print(variants["fp32"], variants["pruned"])
    assert read_record(Path(checkpoint.path, "pruned")).model.hidden == (32, 16)
    assert variants["pruned"]["bytes"] < variants["fp32"]["bytes"]
    assert variants["pruned"]["status"] in ("chosen", "passed")
    pruned = caplog.messages[caplog.messages.index("training the pruned network") :]
    assert any(line.startswith("epoch 1/1 done") for line in pruned)
