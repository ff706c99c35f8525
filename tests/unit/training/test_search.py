"""Searches with real trainings: resumed after kill -9, pruned, failing trials; the choice never sees the test rows."""

import json
import os
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from serin.errors import CodeChanged, LossNotFinite, SearchFailed, SearchStopped
from serin.spec.load import load_spec
from serin.spec.model import ModelSpec
from serin.spec.search import RangeSpec, SearchSpec, fold_splits
from serin.spec.split import SplitSpec
from serin.spec.training import TrainingSpec
from serin.spec.yaml_file import read_yaml
from serin.training.search.search import SearchResult, search, share_devices, write_chosen
from serin.training.search.study import Study, Trial
from tests.fakes.datasets import make_dataset
from tests.fakes.postgres import running_postgres
from tests.kit.waiting import running, until
from tests.logs import heard
from tests.unit.training.warm import WarmProcess, warm  # noqa: F401 (a fixture)

MODEL = ModelSpec(hidden=(8,))
TRAINING = TrainingSpec(epochs=2, batch_rows=500)
SPACE = {"training.learning_rate": RangeSpec(choice=(1e-6, 0.02))}
SMALL = {"train": 2000, "valid": 500, "test": 500}


def search_in(
    folder: Path,
    spec: SearchSpec,
    training: TrainingSpec = TRAINING,
    model: ModelSpec = MODEL,
    folds: int = 1,
) -> SearchResult:
    dataset = make_dataset(folder / "data", rows=SMALL)
    return search(model, training, spec, [dataset] * folds, folder=folder / "search", home=folder)


@pytest.mark.usefixtures("warm")
def test_the_better_setting_is_chosen_by_the_valid_rows_and_no_test_row_is_looked_at(tmp_path: Path) -> None:
    said: list[str] = []
    with heard(said.append):
        found = search_in(tmp_path, SearchSpec(space=SPACE, sampler="grid", parallel=2, pruner="none"))
    assert found.settings == {"training.learning_rate": 0.02}
    assert (found.complete, found.pruned, found.failed) == (2, 0, 0)
    assert all(name.startswith("valid_") for name in found.metrics)
    results = list((tmp_path / "search" / "trials").glob("*/fold-0/result/metrics.json"))
    assert len(results) == 2
    assert not any("test" in path.read_text() for path in results)
    rows = json.loads((tmp_path / "search" / "trials.json").read_text())["trials"]
    assert [row["state"] for row in rows] == ["complete", "complete"]
    table = (tmp_path / "search" / "trials.csv").read_text().splitlines()
    assert table[0] == "trial,state,valid_auc,seconds,training.learning_rate,reason"
    assert len(table) == 3
    assert (tmp_path / "search" / "importance.svg").read_text().startswith("<svg")
    assert [line.partition("; ")[2][:11] for line in said if " of 2 done" in line] == [
        "1 of 2 done",
        "2 of 2 done",
    ]


@pytest.mark.usefixtures("warm")
def test_each_trial_that_ends_counts_one_more_when_all_end_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both, end = threading.Barrier(2), Trial.end

    def end_together(trial: Trial, state: str, **found: Any) -> None:
        end(trial, state, **found)
        with suppress(threading.BrokenBarrierError):
            both.wait(1)

    monkeypatch.setattr(Trial, "end", end_together)
    said: list[str] = []
    with heard(said.append):
        search_in(tmp_path, SearchSpec(space=SPACE, sampler="grid", parallel=2, pruner="none"))
    assert [line.partition("; ")[2][:11] for line in said if " of 2 done" in line] == [
        "1 of 2 done",
        "2 of 2 done",
    ]


SEARCHES = """
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any
from serin.store.artifacts import Dataset
from serin.spec.search import RangeSpec, SearchSpec
from serin.spec.model import ModelSpec
from serin.spec.training import TrainingSpec
from serin.training.search.search import search
folder = Path(sys.argv[1])
search(ModelSpec(hidden=(8,)), TrainingSpec(epochs=4000, batch_rows=500, checkpoint_every_steps=20),
       SearchSpec(space={"training.learning_rate": RangeSpec(log=(1e-3, 1e-2))}, trials=1, pruner="none"),
       [Dataset(path=str(folder / "data"), digest=sys.argv[2], rows={})], folder=folder / "search", home=folder)
"""


@pytest.mark.usefixtures("warm")  # the second search; the one that is killed starts everything anew
def test_a_trial_of_a_killed_search_is_resumed_with_its_settings_and_checkpoints(
    tmp_path: Path,
) -> None:
    dataset = make_dataset(tmp_path / "data", rows=SMALL)
    child = subprocess.Popen([sys.executable, "-c", SEARCHES, str(tmp_path), dataset.digest])
    try:
        done = "trials/*/fold-0/checkpoints/step-*/COMPLETE"
        trained, *_ = until(
            lambda: list((tmp_path / "search").glob(done)),
            "a checkpoint",
            within_s=500.0,
            alive=running(child),
        )
    finally:
        child.kill()
        child.wait()
    place = trained.parents[2]
    training = TrainingSpec(epochs=4000, batch_rows=500, checkpoint_every_steps=20)
    spec = SearchSpec(space={"training.learning_rate": RangeSpec(log=(1e-3, 1e-2))}, trials=1, pruner="none")
    stop, said = threading.Event(), []

    def stop_when_taken_up() -> None:
        until(lambda: (place / "progress.jsonl").read_text().count('"started"') > 1)
        stop.set()

    watcher = threading.Thread(target=stop_when_taken_up)
    watcher.start()
    with pytest.raises(SearchStopped) as stopped, heard(said.append):
        search(MODEL, training, spec, [dataset], folder=tmp_path / "search", home=tmp_path, stop=stop)
    watcher.join()
    assert stopped.value.exit_code == 75
    assert said[0] == "resuming 1 interrupted trial(s)"
    assert [path.name for path in (tmp_path / "search" / "trials").iterdir()] == [place.parent.name]
    starts = [json.loads(line) for line in (place / "progress.jsonl").read_text().splitlines()]
    assert [record["step"] > 0 for record in starts if record["event"] == "started"] == [False, True]


@pytest.mark.usefixtures("warm")
def test_trials_that_fall_behind_are_given_up_and_failing_ones_do_not_end_the_search(tmp_path: Path) -> None:
    spec = SearchSpec(space={"training.learning_rate": RangeSpec(choice=(0.03, 1e-9, 1e30))}, sampler="grid")
    # A small training may end before it can be given up: then its second fold is not begun.
    found = search_in(tmp_path, spec, TrainingSpec(epochs=3, batch_rows=500), folds=2)
    assert found.settings == {"training.learning_rate": 0.03}
    assert (found.complete, found.pruned, found.failed) == (1, 1, 1)
    trials = json.loads((tmp_path / "search" / "result.json").read_text())["trials"]
    assert [trial["state"] for trial in trials] == ["complete", "pruned", "failed"]
    assert "loss" in trials[2]["reason"]


def test_a_forked_process_that_has_ended_can_be_asked_to_stop_like_any_other(tmp_path: Path) -> None:
    """A launcher may tell it between its last look and its end."""
    log = tmp_path / "log"
    log.touch()
    ended = WarmProcess([sys.executable, "-m", "no_such_module"], dict(os.environ), str(log))
    ended._process.join(300)  # it is reaped where it was forked, not here
    ended.terminate()
    ended.kill()
    assert ended.wait(0) == 1


def test_a_search_in_which_everything_fails_says_why(tmp_path: Path) -> None:
    training = TrainingSpec(batch_rows=500, processes=1)
    spec = SearchSpec(space={"training.gradient_accumulation": RangeSpec(choice=(3, 7))}, trials=30)
    with pytest.raises(SearchFailed, match="batch_rows=500 does not divide") as failed:
        search_in(tmp_path, spec, training)
    assert str(tmp_path / "search") in str(failed.value)


def test_a_search_ends_when_its_code_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "train.py"
    script.write_text("import sys\n")

    def edit_and_diverge(*_: object, folder: Path, **__: object) -> None:
        script.write_text("import sys, os\n")
        raise LossNotFinite(step=1, value=0.0, folder=folder)

    monkeypatch.setattr("serin.training.search.search.train", edit_and_diverge)
    with pytest.raises(CodeChanged, match="run it again"):
        search_in(tmp_path, SearchSpec(space=SPACE, trials=4), model=ModelSpec(script=str(script)))


def test_a_study_in_postgres_is_shared_and_outlives_its_process() -> None:
    spec = SearchSpec(space={"model.hidden": RangeSpec(choice=([8], [16, 8]))}, trials=2)
    with running_postgres() as uri:
        first = Study(url=uri, name="one", spec=spec, epochs=1)
        trial = first.ask()
        trial.end("complete", value=0.7, metrics={"valid_auc": 0.7}, seconds=1.0)
        first.close()
        second = Study(url=uri, name="one", spec=spec, epochs=1)
        (tried,) = second.tried()
        assert (tried.state, tried.value, tried.settings) == ("complete", 0.7, trial.settings)
        assert second.ask() is not None
        assert second.ask() is None
        second.close()


def test_a_killed_search_asks_for_the_same_settings_as_one_left_alone(tmp_path: Path) -> None:
    spec = SearchSpec(space={"model.dropout": RangeSpec(uniform=(0, 0.5))}, trials=14)

    def asked(name: str, opened_anew_after: int) -> list[object]:
        settings = []
        study = Study(url=f"sqlite:///{tmp_path / name}", name="s", spec=spec, epochs=1)
        while (trial := study.ask()) is not None:
            settings.append(trial.settings["model.dropout"])
            trial.end("complete", value=-abs(float(str(settings[-1])) - 0.2))
            if len(settings) == opened_anew_after:
                study.close()
                study = Study(url=f"sqlite:///{tmp_path / name}", name="s", spec=spec, epochs=1)
        study.close()
        return settings

    assert asked("a.db", 12) == asked("b.db", 0)


def test_trials_share_the_gpus() -> None:
    spec = SearchSpec(space=SPACE)
    assert share_devices(spec, TrainingSpec(), 0) == (0, 1)
    assert share_devices(spec, TrainingSpec(), 8) == (1, 8)
    assert share_devices(spec, TrainingSpec(processes=2, batch_rows=512), 8) == (2, 4)
    assert share_devices(spec.model_copy(update={"parallel": 3}), TrainingSpec(), 0) == (0, 3)


def test_folds_move_the_split_into_the_past() -> None:
    splits = fold_splits(SplitSpec(train=0.8, valid=0.1, test=0.1), 3)
    assert [(one.train, one.valid, one.test) for one in splits] == [
        (0.8, 0.1, 0.1),
        (0.7, 0.1, 0.2),
        (0.6, 0.1, 0.3),
    ]


def test_the_chosen_spec_is_the_users_file_with_the_chosen_values(tmp_path: Path) -> None:
    source = Path("examples/flights/spec.yaml")
    target = tmp_path / "chosen.yaml"
    chosen = {"training.learning_rate": 0.00123, "model.hidden": [64, 32], "training.clip_norm": 1.0}
    write_chosen(source, chosen, target, remark="found by a search")
    text = target.read_text()
    assert text.startswith("# found by a search\n")
    comments = [line.strip() for line in source.read_text().splitlines() if line.strip().startswith("#")]
    assert all(comment in text for comment in comments)
    before, after = read_yaml(source.read_text()), read_yaml(text)
    assert after["training"] == {**before["training"], "learning_rate": 0.00123, "clip_norm": 1.0}
    assert after["model"] == {**before["model"], "hidden": [64, 32]}
    assert {key: after[key] for key in after if key not in ("model", "training")} == {
        key: before[key] for key in before if key not in ("model", "training")
    }
    assert load_spec(target).model.hidden == (64, 32)
