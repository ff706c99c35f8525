"""Each door and several targets from a spec to scores, by the stages that the command calls; no Prefect, no server."""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from sklearn.datasets import load_digits

from serin.columns.column import column_from_arrow
from serin.errors import GateFailed, LeakFound, SpecError, TargetUnusable
from serin.export.convert.network import read_network
from serin.features.plan import FeaturePlan
from serin.formats.dataset import read_dataset
from serin.formats.shards import read_split
from serin.formats.trained import read_record, read_trained
from serin.metrics import auc, measure
from serin.models.trees import margins, read_booster, scores
from serin.pipeline.run_stage import run_etl, run_export, run_train
from serin.scoring.predict import Scorer
from serin.scoring.session import open_session
from serin.spec.load import load_spec
from serin.spec.pipeline import PipelineSpec
from serin.store.store import Store
from serin.training.launch.job import TrainingJob
from serin.training.parallel.ranks import Ranks
from serin.training.programs import trees, worker
from tests.fakes.small_pipeline import small_spec
from tests.unit.training.runs import job_of

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


LATE = {"late": "hours > 30", "very_late": "hours > 38"}
TIMES = {"hours": "hours", "twice": "hours * 2 + weight"}


def several(folder: Path, expressions: dict[str, str], task: str, **sections: object) -> dict[str, object]:
    given = small_spec(folder, **sections)  # type: ignore[arg-type]
    given["data"] = {**given["data"], "target": {"expressions": expressions, "task": task}}
    given["features"] = [
        {"columns": ["distance"], "steps": ["normalize"]},
        {"columns": ["carrier"], "steps": ["categorify"]},
    ]
    return given


def job_for(spec: PipelineSpec) -> TrainingJob:
    return job_of(spec.model, spec.training, run_etl(spec).value)


def test_each_target_has_its_column_in_the_shards_and_its_name_in_the_dataset(home: Path) -> None:
    spec = load_spec(several(home, TIMES, "regression"))

    dataset = run_etl(spec).value

    raw, description = pq.read_table(home / "parcels.parquet"), read_dataset(dataset.path)
    test = read_split(dataset.path, "test").whole()
    hours, weight = (raw.column(name).to_numpy()[test.rows] for name in ("hours", "weight"))
    assert description.targets == ("hours", "twice")
    assert test.target.dtype == np.float32
    assert test.target == pytest.approx(np.stack([hours, hours * 2 + weight], axis=1), rel=1e-6)
    assert description.dropped["null_target"] == raw.column("weight").null_count


def test_a_network_learns_both_and_answers_both(home: Path) -> None:
    spec = load_spec(several(home, LATE, "binary"))
    checkpoint = run_train(spec).value

    bundle = run_export(spec).value
    raw = pq.read_table(home / "parcels.parquet")
    found = Scorer(bundle.path).answers(raw.drop_columns(["hours"]))["score"]

    hours = raw.column("hours").to_numpy()
    assert found.shape == (len(raw), 2)
    assert auc(hours > 30, found[:, 0]) > 0.9
    assert auc(hours > 38, found[:, 1]) > 0.9
    assert (found[:, 0] > found[:, 1]).mean() > 0.95  # later is rarer
    each = [checkpoint.metrics[f"test_auc_{name}"] for name in LATE]
    assert checkpoint.metrics["test_auc"] == pytest.approx(np.mean(each))
    assert json.loads(Path(bundle.path, "schema.json").read_text())["targets"] == ["late", "very_late"]
    assert "`late`, `very_late`" in Path(bundle.path, "card.md").read_text()


@pytest.mark.parametrize(("expressions", "task"), [(LATE, "binary"), (TIMES, "regression")])
def test_trees_answer_for_each_target(home: Path, expressions: dict[str, str], task: str) -> None:
    spec = load_spec(several(home, expressions, task, model={"kind": "xgboost", "rounds": 30}))
    job = job_for(spec)

    trees.train(job, home, lambda: False)

    network = read_network(home / "result", read_dataset(job.dataset), tolerance=1e-4)
    test = read_split(job.dataset, "test").whole()
    num, cat = np.array(test.num), test.cat.astype(np.int64)
    wanted = network.reference(num, cat)
    (found,) = open_session(network.graph).run(["logits"], {"num": num, "cat": cat})
    assert found == pytest.approx(wanted, rel=1e-5, abs=1e-5)
    for at in range(2):
        if task == "binary":
            assert auc(test.target[:, at], found[:, at]) > 0.9
        else:
            assert measure("rmse", test.target[:, at], found[:, at]) < 0.5 * float(test.target[:, at].std())


def test_a_regression_s_targets_each_have_their_unit(home: Path) -> None:
    times = {"hours": "hours", "seconds": "hours * 3600"}
    spec = load_spec(several(home, times, "regression"))

    worker.train(job_for(spec), home, Ranks(rank=0, size=1, device=torch.device("cpu")), lambda: False)

    metrics = json.loads((home / "result" / "metrics.json").read_text())["metrics"]
    assert metrics["test_rmse_seconds"] / metrics["test_rmse_hours"] == pytest.approx(3600, rel=0.2)
    assert metrics["test_rmse_hours"] < 6


def test_a_target_of_one_class_is_named_among_several(home: Path) -> None:
    given = several(home, {**LATE, "never": "hours > 1e9"}, "binary")

    with pytest.raises(TargetUnusable, match="'hours > 1e9' has one class only"):
        run_etl(load_spec(given))


def test_a_column_that_knows_the_second_target_is_a_leak(home: Path) -> None:
    given = several(home, {"late": "hours > 30", "heavy": "weight > 5"}, "binary")
    given["data"] = {**given["data"], "time": "day", "derived": {}}  # type: ignore[dict-item]
    table = pq.read_table(home / "parcels.parquet")
    days = np.arange(len(table)).astype("datetime64[s]").astype("datetime64[us]")
    known = np.asarray(table.column("weight").fill_null(0.0).to_numpy() > 5).astype(float)
    pq.write_table(
        table.append_column("day", [days]).append_column("scales", [known]), home / "parcels.parquet"
    )
    given["features"] = [*given["features"], {"columns": ["scales"], "steps": ["normalize"]}]  # type: ignore[misc]

    with pytest.raises(LeakFound, match="scales"):
        run_etl(load_spec(given))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"target": {"expressions": {"a": "hours > 3"}, "task": "binary"}}, "at least 2"),
        ({"target": {"expressions": LATE, "expression": "hours > 3", "task": "binary"}}, "not both"),
        (
            {"target": {"expressions": {"a b": "hours", "c": "hours"}, "task": "regression"}},
            "is not a valid target name",
        ),
        ({"target": {"expressions": LATE, "task": "multiclass"}}, "all binary or all regression"),
        (
            {"target": {"expressions": {"a": "hours >", "b": "hours"}, "task": "binary"}},
            "expected at character",
        ),
        (
            {"target": {"expressions": LATE, "task": "binary"}, "split": {"kind": "stratified"}},
            "needs one target",
        ),
    ],
)
def test_targets_that_cannot_go_together_are_refused(
    tmp_path: Path, changes: dict[str, object], words: str
) -> None:
    given = small_spec(tmp_path, rows=300)
    given["data"] = {**given["data"], **changes}

    with pytest.raises(SpecError, match=words):
        load_spec(given)


def test_class_weights_and_target_encoding_want_one_target(tmp_path: Path) -> None:
    given = several(tmp_path, LATE, "binary", training={"class_weights": "balanced"})
    given["features"] = [{"columns": ["carrier"], "steps": ["target_encode"]}]

    with pytest.raises(SpecError, match=r"class_weights.*several(.|\n)*target_encode needs one target"):
        load_spec(given)
