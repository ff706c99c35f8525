"""A table to a scored file with the command alone: no Prefect, no server. One story, for training costs seconds."""

import doctest
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest

from serin import Pipeline
from serin.api import model as api_model
from serin.api import pipeline as api_pipeline
from serin.machine import environment
from serin.pipeline.experiments import trainings
from tests.fakes.small_pipeline import NAME, small_spec, write_spec
from tests.kit.commands import serin_main

Serin = Callable[..., str]


@pytest.fixture
def serin(
    monkeypatch: pytest.MonkeyPatch, home: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> Serin:
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str, code: int = 0) -> str:
        """What it printed: the result when it went well, else the message."""
        ended, told = serin_main(*arguments), capfd.readouterr()
        assert ended == code, told.err
        return told.err if code else told.out

    return run


def asked(serin: Serin, *arguments: str) -> Any:
    return json.loads(serin(*arguments, "--json"))


def test_a_guessed_spec_is_good_and_names_its_schema_for_editors(serin: Serin, tmp_path: Path) -> None:
    small_spec(tmp_path / "project" / "data", rows=300)
    serin("init", "project", "--target", "hours")
    project = tmp_path / "project"
    assert (
        (project / "pipeline.yaml")
        .read_text()
        .startswith("# yaml-language-server: $schema=spec.schema.json\n")
    )
    assert json.loads((project / "spec.schema.json").read_text()) == json.loads(serin("schema"))
    found = asked(serin, "check", "project/pipeline.yaml")
    assert found["name"] == "project", "a model is called like its folder"
    assert {column["name"] for column in found["inputs"]} == {"weight", "distance", "carrier"}
    assert "name another folder, or remove it" in serin("init", "project", code=2)


def test_init_asks_which_of_several_tables(serin: Serin, tmp_path: Path) -> None:
    assert "holds no table; name one with --table" in serin("init", code=2)
    for name in ("a.csv", "b.parquet", "c.jsonl.gz", "spec.schema.json"):
        (tmp_path / name).touch()
    assert "holds 3 tables (a.csv, b.parquet, c.jsonl.gz)" in serin("init", code=2)


def test_a_column_that_is_not_there_is_a_wrong_spec_for_every_command(serin: Serin, tmp_path: Path) -> None:
    features = [{"columns": ["wieght"], "steps": ["fill_median"]}]
    write_spec(tmp_path, {**small_spec(tmp_path, rows=300), "features": features})
    for command in ("check", "etl", "train"):
        assert "did you mean 'weight'?" in serin(command, "spec.yaml", code=2)


def test_a_spec_is_checked_without_its_tables(
    serin: Serin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = small_spec(tmp_path / "elsewhere", rows=10)
    spec["data"]["tables"] = {"parcels": "s3://nowhere/parcels.parquet"}
    monkeypatch.setenv("SERIN_STORE", "s3://nowhere/serin")
    write_spec(tmp_path, spec)
    assert "is good by itself; its tables were not read" in serin("check", "spec.yaml", "--no-data")
    assert json.loads(serin("check", "spec.yaml", "--no-data", "--json"))["name"] == spec["name"]
    write_spec(tmp_path, {**spec, "training": {"epochs": "many"}, "rollout": {"stepps": [1]}})
    said = serin("check", "spec.yaml", "--no-data", code=2)
    assert "training.epochs" in said
    assert "rollout.stepps" in said
    write_spec(tmp_path, {**spec, "model": {"module": "net.py:Net"}, "training": {}})
    said = serin("check", "spec.yaml", "--no-data", code=2)
    assert f"model.module: no file at {tmp_path / 'net.py'}" in said


def test_a_table_becomes_a_version_that_scores(serin: Serin, tmp_path: Path) -> None:
    write_spec(tmp_path, small_spec(tmp_path, rows=400, training={"epochs": 1, "batch_rows": 128, "seed": 1}))
    assert "run `serin train` or Pipeline.train() first" in serin("export", "spec.yaml", code=1)

    dataset = asked(serin, "etl", "spec.yaml")
    assert sum(dataset["rows"].values()) == 400
    assert asked(serin, "etl", "spec.yaml") == dataset

    checkpoint = asked(serin, "train", "spec.yaml")
    assert asked(serin, "train", "spec.yaml") == checkpoint, "found, not trained again"
    (run,) = asked(serin, "runs", "list")
    assert (run["kind"], run["state"]) == ("training", "done")
    assert "test_auc" in serin("runs", "show", run["name"])
    _kept_as_an_experiment(run["name"], checkpoint["metrics"])

    bundle = asked(serin, "export", "spec.yaml")
    assert (bundle["model"], bundle["version"]) == (NAME, 1)
    assert asked(serin, "export", "spec.yaml") == bundle, "found, not published again"
    (listed,) = asked(serin, "models", "list")
    assert listed["path"] == bundle["path"]
    shown = serin("models", "show", NAME)
    assert "probability that hours > 30 is true" in shown
    assert serin("models", "show", f"{NAME}:1") == shown
    assert "carrier" in shown
    assert "loses so much auc when a column is shuffled (range of 5 repeats)" in shown
    assert len(asked(serin, "models", "show", NAME)["importance"]["columns"]) == 3
    assert "files match its manifest" in serin("models", "verify", f"{NAME}:1")

    rows = tmp_path / "parcels.parquet"
    _found_from_python(dataset, checkpoint, bundle, rows)
    serin("predict", NAME, str(rows), "--batch", "--out", "scores.parquet")
    scores = pq.read_table(tmp_path / "scores.parquet")
    assert scores.num_rows == 400
    predicted = Pipeline.from_yaml("spec.yaml").export().predict(pq.read_table(rows).to_pandas())
    assert predicted["score"].tolist() == scores["score"].to_pylist()
    printed = tmp_path / "printed.csv"
    printed.write_text(serin("predict", f"{NAME}:1", str(rows), "--batch"))
    assert pacsv.read_csv(printed).column_names == scores.column_names
    _explained(serin, rows, predicted["score"].tolist())
    assert "no stack is up" in serin("predict", NAME, str(rows), code=1)
    assert "rename or drop it" in serin("predict", NAME, "scores.parquet", "--batch", code=2)

    Path(bundle["path"], "model.onnx").write_bytes(b"broken")
    assert "model.onnx" in serin("models", "verify", NAME, code=1)


def _explained(serin: Serin, rows: Path, scores: list[float]) -> None:
    """As text with the largest contributions first, as JSON, and as a file; what is explained is what is predicted."""
    few = rows.with_name("few.parquet")
    pq.write_table(pq.read_table(rows).slice(0, 30), few)
    text = serin("explain", f"{NAME}:1", str(few))
    assert text.startswith(
        "integrated gradients; contributions, base and margin in units of: log-odds\n\nrow 0: score "
    )
    assert "20 of 30 rows are shown; --out FILE writes all of them" in text
    entries = asked(serin, "explain", NAME, str(few))
    assert [entry["score"] for entry in entries] == pytest.approx(scores[:30], abs=1e-6)
    sums = [entry["base"] + sum(entry["contributions"].values()) for entry in entries]
    assert sums == pytest.approx([entry["margin"] for entry in entries], abs=1e-5)
    assert serin("explain", NAME, str(few), "-n", "25").count("\nrow ") == 25
    assert [entry["row"] for entry in asked(serin, "explain", NAME, str(few), "-n", "3")] == [0, 1, 2]
    assert "30 rows explained" in serin("explain", NAME, str(few), "--out", "why.csv")
    written = pacsv.read_csv(rows.with_name("why.csv"))
    assert written.column_names == ["row", "weight", "distance", "carrier", "base", "margin", "score"]
    assert written["margin"].to_pylist() == pytest.approx(sums, abs=1e-5)


def _kept_as_an_experiment(run: str, metrics: dict[str, float]) -> None:
    """What the console shows of the training is kept, and does not depend on its folder."""
    shutil.move(environment.home() / "runs", environment.home() / "moved")
    made = trainings(environment.home()).find(run)
    shutil.move(environment.home() / "moved", environment.home() / "runs")
    assert made is not None
    assert (made.model, made.state, made.metrics) == (NAME, "done", metrics)
    assert 0 < made.errors["test_auc"] < 0.2
    assert made.settings["training.batch_rows"] == 128
    assert made.receipt is not None
    assert len(made.curve) == 1


def _found_from_python(dataset: Any, checkpoint: Any, bundle: Any, rows: Path) -> None:
    """What the command has made, and the examples in the docstrings."""
    pipeline = Pipeline.from_yaml("spec.yaml")
    built, trained, model = pipeline.build_dataset(), pipeline.train(), pipeline.export()
    assert [result.ran for result in (built, trained, model)] == [False, False, False]
    assert (built.digest, str(built.path)) == (dataset["digest"], dataset["path"])
    assert (str(trained.path), trained.metrics) == (checkpoint["path"], checkpoint["metrics"])
    assert (model.name, model.version, str(model.path)) == (bundle["model"], 1, bundle["path"])
    assert model.card().text.startswith(f"# {NAME}, version 1")
    names = {"pipeline": pipeline, "frame": pq.read_table(rows).to_pandas(), "Pipeline": Pipeline}
    for module in (api_model, api_pipeline):
        done = doctest.testmod(module, extraglobs=names)
        assert done.attempted
        assert done.failed == 0
