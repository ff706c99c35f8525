"""What is known of trainings and searches: from their folders, from documents, and from other hosts by the store."""

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from serin.machine.locks import holding
from serin.pipeline.experiments import (
    Progress,
    default_settings,
    describe_search,
    describe_training,
    keep_experiment,
    keep_study,
    studies,
    trainings,
)
from serin.store.objects import FolderObjects
from serin.store.receipt import Receipt
from serin.store.runs import run_lock
from serin.training.programs import grow_trees
from tests.fakes.experiments import leave_search, leave_training


def test_a_training_is_described_with_its_settings_metrics_errors_curve_and_receipt(home: Path) -> None:
    run = leave_training(home, auc=0.8, error=0.01, epochs=5, learning_rate=0.003, hidden=(64, 32))
    made = describe_training(home / "runs" / run)
    assert (made.run, made.model, made.state, made.trouble) == (run, "flights", "done", "")
    assert (made.settings["training.learning_rate"], made.settings["model.hidden"]) == (0.003, [64, 32])
    assert (made.metrics["test_auc"], made.errors["test_auc"]) == (0.8, 0.01)
    assert [point.at for point in made.curve] == [1, 2, 3, 4, 5]
    assert set(made.curve[0].metrics) == {"train_loss", "valid_auc", "valid_logloss"}
    assert made.receipt is not None
    assert made.receipt.cost == 0.42
    assert default_settings()["model.hidden"] == [256, 128]


def test_a_training_without_a_result_is_as_far_as_it_came(home: Path) -> None:
    failed = leave_training(home, state="failed", began=1.0)
    left = leave_training(home, state="unfinished", began=2.0, epochs=3)
    made = describe_training(home / "runs" / failed)
    assert (made.state, made.reason) == ("failed", "the worker was killed")
    assert "valid_auc" in made.metrics
    assert describe_training(home / "runs" / left).state == "unfinished"
    with holding(run_lock(home, left)):
        assert describe_training(home / "runs" / left).state == "running"


def test_a_long_curve_is_thinned_and_keeps_its_last_point(home: Path) -> None:
    run = leave_training(home, epochs=1001)
    points = [point.at for point in describe_training(home / "runs" / run).curve]
    assert len(points) <= 202
    assert (points[0], points[-1]) == (1, 1001)


def test_rounds_of_trees_make_a_curve(home: Path) -> None:
    run = leave_training(home, kind="xgboost", state="unfinished")
    folder = home / "runs" / run
    notes: list[dict[str, Any]] = [
        {"t": 1, "event": "note", "text": "round 5", "round": 5, "metrics": {"valid_auc": 0.7}},
        {"t": 2, "event": "note", "text": "round 9", "round": 9, "metrics": {"valid_auc": 0.75}},
        {"t": 2, "event": "note", "text": "round 10", "round": 10, "metrics": {}},
    ]
    (folder / "progress.jsonl").write_text("".join(f"{json.dumps(note)}\n" for note in notes))
    made = describe_training(folder)
    assert made.across == "round"
    assert [(point.at, point.metrics["valid_auc"]) for point in made.curve] == [(5, 0.7), (9, 0.75)]


def test_trees_tell_what_the_curve_is_made_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[dict[str, Any]] = []
    monkeypatch.setattr(grow_trees, "tell", lambda folder, event, **facts: told.append(facts))

    class Run:
        _told, _unit, _folder, settings = -1e9, 3.0, tmp_path, {"eval_metric": "rmse"}
        _team = type("Team", (), {"leads": True})()
        _job = type("Job", (), {"model": type("Model", (), {"rounds": 50})()})()

    grow_trees._Run._tell_round(Run(), 7, 2.0)  # type: ignore[arg-type]
    assert told == [{"text": "round 7/50: valid rmse 6", "round": 7, "metrics": {"valid_rmse": 6.0}}]


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("training.json", "{"),
        ("training.json", "[1]"),
        ("training.json", '{"model": 3}'),
        ("result/metrics.json", '{"metrics": {"test_auc": "high"}}'),
        ("result/metrics.json", '{"metrics": {}, "epochs": [{}]}'),
        ("result/metrics.json", ""),
    ],
)
def test_a_damaged_training_is_named_and_hides_no_other(home: Path, file: str, content: str) -> None:
    good, bad = leave_training(home, began=1.0), leave_training(home, began=2.0)
    (home / "runs" / bad / file).write_text(content)
    found = {each.run: each for each in trainings(home).read().records}
    assert (found[good].state, found[bad].state, found[bad].model) == ("done", "unreadable", "flights")
    assert bad in found[bad].trouble


def test_a_damaged_line_of_progress_is_named(home: Path) -> None:
    run = leave_training(home, state="unfinished")
    (home / "runs" / run / "progress.jsonl").write_text('{"event": "ep')
    assert describe_training(home / "runs" / run).state == "unreadable"


def test_a_training_is_shown_after_its_folder_is_gone(home: Path) -> None:
    run = leave_training(home)
    keep_experiment(home / "runs" / run)
    shutil.rmtree(home / "runs" / run)
    catalogue = trainings(home)
    (made,) = catalogue.read().records
    assert (made.run, made.metrics["test_auc"]) == (run, 0.78)
    whole = catalogue.find(run)
    assert whole is not None
    assert len(whole.curve) == 8


def test_the_receipt_of_all_attempts_is_what_is_kept(home: Path) -> None:
    run = leave_training(home, seconds=10.0)
    receipt = Receipt.load_file(home / "runs" / run / "receipt.json")
    assert receipt is not None
    keep_experiment(home / "runs" / run, type(receipt).from_json({**receipt.to_json(), "seconds": 25.0}))
    (made,) = trainings(home).read().records
    assert made.receipt is not None
    assert made.receipt.seconds == 25.0


def test_a_folder_that_has_changed_since_is_read_instead_of_its_document(home: Path) -> None:
    run = leave_training(home, state="unfinished")
    catalogue = trainings(home)
    keep_experiment(home / "runs" / run)
    assert [each.state for each in catalogue.read().records] == ["unfinished"]
    (home / "runs" / run / "result").mkdir()
    (home / "runs" / run / "result" / "metrics.json").write_text('{"metrics": {"test_auc": 0.9}}')
    (made,) = catalogue.read().records
    assert (made.state, made.metrics) == ("done", {"test_auc": 0.9})


def test_what_has_not_changed_is_not_read_again(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3):
        leave_training(home, began=float(number + 1))
    catalogue = trainings(home)
    first = catalogue.read().records
    monkeypatch.setattr(catalogue, "_own", lambda run: pytest.fail(f"{run} was read again"))
    assert catalogue.read().records == first


def shared_by_another(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str = "done"
) -> tuple[str, Path]:
    """A training and a search of another host with the same store."""
    store, other = tmp_path / "shared", tmp_path / "other"
    monkeypatch.setenv("SERIN_STORE", f"file://{store}")
    monkeypatch.setenv("SERIN_HOST", "gpu-7")
    monkeypatch.setenv("SERIN_HOME", str(other))
    run = leave_training(other, state=state)
    keep_experiment(other / "runs" / run)
    keep_study(other / "runs" / leave_search(other))
    monkeypatch.setenv("SERIN_HOME", str(home))
    return run, store


def test_other_hosts_see_a_training_and_a_search_in_the_store(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = leave_training(home, began=5.0)
    run, _ = shared_by_another(home, tmp_path, monkeypatch)
    found = {each.run: each for each in trainings(home).read().records}
    assert set(found) == {own, run}
    assert (found[run].host, found[run].model, found[run].errors["test_auc"]) == ("gpu-7", "flights", 0.004)
    whole = trainings(home).find(run)
    assert whole is not None
    assert len(whole.curve) == 8
    (study,) = studies(home).read().records
    assert (study.model, len(study.trials)) == ("flights", 24)
    assert trainings(home).find("train-nothing") is None


def test_trainings_of_another_host_are_found_in_a_bucket(
    bucket: str, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERIN_STORE", bucket)
    monkeypatch.setenv("SERIN_HOME", str(tmp_path / "other"))
    runs = [leave_training(tmp_path / "other", began=float(number + 1)) for number in range(20)]
    for run in runs:
        keep_experiment(tmp_path / "other" / "runs" / run)
    monkeypatch.setenv("SERIN_HOME", str(home))
    catalogue = trainings(home)
    for _ in range(2):
        found = catalogue.read()
        assert ([each.run for each in found.records], found.trouble) == (runs[::-1], "")
    whole = catalogue.find(runs[0])
    assert whole is not None
    assert len(whole.curve) == 8


def test_a_document_of_another_host_is_read_again_when_it_has_changed_and_only_then(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, store = shared_by_another(home, tmp_path, monkeypatch)
    reads: list[str] = []
    read = FolderObjects.read
    monkeypatch.setattr(FolderObjects, "read", lambda self, key: reads.append(key) or read(self, key))
    catalogue = trainings(home)
    catalogue.read()
    assert reads == [f"stages/experiments/{run}.json"]
    catalogue.read()
    assert len(reads) == 1
    document = store / "stages" / "experiments" / f"{run}.json"
    document.write_text(json.dumps({**json.loads(document.read_text()), "state": "preempted"}))
    (made,) = catalogue.read().records
    assert (made.state, len(reads)) == ("preempted", 2)


def test_a_damaged_document_of_another_host_is_named(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, store = shared_by_another(home, tmp_path, monkeypatch)
    (store / "stages" / "experiments" / f"{run}.json").write_text("{")
    (made,) = trainings(home).read().records
    assert (made.run, made.state) == (run, "unreadable")
    assert made.trouble


def test_a_store_that_does_not_answer_hides_no_run_of_this_host(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = leave_training(home)
    monkeypatch.setenv("SERIN_STORE", "s3://nothing")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setattr("serin.store.bucket.BucketFiles.entries", _away)
    found = trainings(home).read()
    assert [each.run for each in found.records] == [own]
    assert "runs of other hosts are not shown" in found.trouble


def _away(*_: object, **__: object) -> None:
    raise OSError("away")


def test_progress_is_shared_at_most_every_few_seconds_and_only_with_a_shared_store(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = leave_training(home, state="unfinished")
    clock = [0.0]
    Progress(home / "runs" / run, lambda: clock[0]).hear({"event": "epoch"})
    assert not (home / "stages").exists()
    monkeypatch.setenv("SERIN_STORE", f"file://{tmp_path / 'shared'}")
    document = tmp_path / "shared" / "stages" / "experiments" / f"{run}.json"
    progress = Progress(home / "runs" / run, lambda: clock[0])
    progress.hear({"event": "step"})
    assert not document.exists()
    seen = []
    for clock[0] in (1.0, 5.0, 17.0):
        progress.hear({"event": "epoch"})
        seen.append(json.loads(document.read_text())["seen"])
    assert seen[0] == seen[1] < seen[2]


def test_a_document_that_cannot_be_kept_does_not_end_a_training(
    home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = leave_training(home)
    (home / "stages").write_text("a file where a folder should be")
    keep_experiment(home / "runs" / run)
    assert f"does not show {run}" in caplog.text


def test_a_search_is_described_while_it_runs_and_when_it_has_ended(home: Path) -> None:
    going, ended = leave_search(home, trials=9, done=False), leave_search(home)
    before, after = (describe_search(home / "runs" / run) for run in (going, ended))
    assert (before.state, before.best, len(before.trials)) == ("unfinished", None, 9)
    assert (after.state, len(after.trials), after.importance["model.hidden"]) == ("done", 24, 0.18)
    assert after.best is not None
    (home / "runs" / ended / "result.json").write_text('{"trials": [{}]}')
    assert describe_search(home / "runs" / ended).state == "unreadable"


def test_a_thousand_runs_are_read_within_seconds_and_again_much_faster(home: Path) -> None:
    for number in range(1000):
        leave_training(home, began=float(number + 1), seed=number)
    catalogue = trainings(home)
    began = time.perf_counter()
    assert len(catalogue.read().records) == 1000
    first = time.perf_counter() - began
    began = time.perf_counter()
    catalogue.read()
    again = time.perf_counter() - began
    print(f"1,000 runs: {first:.2f} s, again {again:.2f} s")
    assert first < 30
    assert again < first
