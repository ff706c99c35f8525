"""The pages of experiments: filters, order, pages, trainings side by side, searches and outcomes."""

import json
import re
import shutil
import time
from pathlib import Path
from urllib.parse import urlencode

import httpx
import pytest

from serin.console.views.experiments import Score, paged
from serin.console.views.outcomes import training_of
from serin.pipeline.experiments import keep_experiment
from serin.store.store import Store
from tests.fakes.experiments import leave_search, leave_training
from tests.unit.console.conftest import Visitor, visitor
from tests.unit.serving.bundles import MODEL


@pytest.fixture
def guest(home: Path) -> Visitor:
    return visitor(home).login("viewer")


def shown(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return re.sub(r"\s+", " ", answer.text)


def listed(answer: httpx.Response) -> list[str]:
    return re.findall(r'<tr id="run-([^"]+)"', shown(answer))


def test_trainings_are_filtered_by_model_kind_state_and_words(home: Path, guest: Visitor) -> None:
    first = leave_training(home, model="flights", kind="dcn", began=3.0, learning_rate=0.003)
    second = leave_training(home, model="flights", kind="mlp", began=2.0, state="failed")
    third = leave_training(home, model="delays", kind="mlp", began=1.0, hidden=(64, 32))
    assert listed(guest.get("/experiments")) == [first, second, third]
    for query, runs in (
        ("model=flights", [first, second]),
        ("model=flights&kind=dcn", [first]),
        ("state=failed", [second]),
        ("text=learning_rate%3D0.003", [first]),
        ("text=hidden+64%2C", [third]),
        (f"text={second[:14]}", [second]),
        ("model=&kind=&state=&text=", [first, second, third]),
    ):
        assert listed(guest.get(f"/experiments?{query}")) == runs, query
    none = shown(guest.get("/experiments?model=nothing"))
    assert "No training fits these filters." in none


def test_trainings_are_sorted_by_a_column_in_both_directions_and_unknown_values_are_last(
    home: Path, guest: Visitor
) -> None:
    cheap = leave_training(home, auc=0.7, cost=0.1, seconds=30.0, began=1.0)
    dear = leave_training(home, auc=0.8, cost=9.0, seconds=10.0, began=2.0)
    free = leave_training(home, auc=0.75, cost=None, seconds=20.0, began=3.0)
    for sort, runs in (
        ("", [free, dear, cheap]), ("-metric", [dear, free, cheap]), ("metric", [cheap, free, dear]),
        ("cost", [cheap, dear, free]), ("-cost", [dear, cheap, free]), ("took", [dear, free, cheap]),
        ("nonsense", [cheap, dear, free]), ("-began", [free, dear, cheap]),
    ):  # fmt: skip
        assert listed(guest.get(f"/experiments?sort={sort}" if sort else "/experiments")) == runs, sort
    page = shown(guest.get("/experiments?sort=-metric&model=flights"))
    assert 'aria-sort="descending"><a href="/experiments?model=flights&amp;sort=metric">Metric ↓' in page


def test_a_loss_is_better_when_it_is_smaller() -> None:
    good, bad = Score(name="test_logloss", value=0.4), Score(name="test_logloss", value=0.5)
    assert good.rank > bad.rank
    assert Score(name="test_auc", value=0.9, error=0.01).interval == "±0.02"


def test_a_long_list_has_pages_that_keep_the_filters(home: Path, guest: Visitor) -> None:
    runs = [leave_training(home, began=float(number + 1), seed=number) for number in range(120)]
    pages = [listed(guest.get(f"/experiments?model=flights&page={page}")) for page in (1, 2, 3)]
    assert [len(page) for page in pages] == [50, 50, 20]
    assert [run for page in pages for run in page] == runs[::-1]
    text = shown(guest.get("/experiments?model=flights&page=2"))
    assert "Page 2 of 3" in text
    assert 'rel="next" href="/experiments?model=flights&amp;page=3"' in text
    for odd in ("0", "-1", "99", "x", "9" * 40):
        assert listed(guest.get(f"/experiments?page={odd}")) in (pages[0], pages[2])
    assert paged([], "1").pages == 1


def test_the_settings_that_differ_among_the_listed_are_shown(home: Path, guest: Visitor) -> None:
    for rate in (0.004, 0.002):
        leave_training(home, learning_rate=rate, patience=7)
    text = shown(guest.get("/experiments"))
    assert "<code>learning_rate 0.004</code>" in text
    assert "patience" not in text.replace("patience=", "")


def test_trainings_stand_side_by_side_with_what_differs(home: Path, guest: Visitor) -> None:
    one = leave_training(home, auc=0.75, error=0.005, learning_rate=0.001)
    two = leave_training(home, auc=0.80, error=None, learning_rate=0.002, state="done")
    query = urlencode([("run", one), ("run", two)])
    text = shown(guest.get(f"/experiments/compare?{query}"))
    metrics = text.partition("Metrics</th>")[2]
    assert '0.7500 <span class="dim">±0.0098</span></td><td>0.8000 <span class="badge good">best' in metrics
    differing = text.partition("Settings that differ")[2].partition("</tbody>")[0]
    assert "<code>0.001</code></td><td><code>0.002</code>" in differing
    assert "training.epochs" not in differing
    assert "training.epochs" in text.partition("Settings that are equal")[2]
    for words in (
        "NVIDIA H200",
        "5 min",
        "28.1k J",
        "0.42",
        "valid_auc over epochs:",
        "train_loss over epochs:",
    ):
        assert words in text, words
    assert "different datasets" not in text


def test_different_datasets_are_said(home: Path, guest: Visitor) -> None:
    runs = [leave_training(home, auc=0.7, dataset="a"), leave_training(home, auc=0.8, dataset="b")]
    assert "used 2 different datasets" in shown(guest.get(f"/experiments/compare?run={','.join(runs)}"))


def test_an_unknown_training_is_named_and_the_others_are_shown(home: Path, guest: Visitor) -> None:
    run = leave_training(home)
    text = shown(guest.get(f"/experiments/compare?run={run}&run=train-gone"))
    assert "There is no training train-gone" in text
    assert "0.7800" in text
    answer = guest.get("/experiments/compare?run=train-gone")
    assert (answer.status_code, run in answer.text) == (404, True)
    assert guest.get("/experiments/compare?run=../../etc/passwd").status_code == 404
    assert "Choose trainings in the list" in shown(guest.get("/experiments/compare"))


def test_more_than_eight_are_cut(home: Path, guest: Visitor) -> None:
    runs = [leave_training(home, began=float(number + 1)) for number in range(10)]
    assert "2 are left out" in shown(guest.get(f"/experiments/compare?run={','.join(runs)}"))


def test_damaged_runs_are_lines_in_the_list_and_not_an_error(home: Path, guest: Visitor) -> None:
    good, bad = leave_training(home, began=2.0), leave_training(home, began=1.0)
    (home / "runs" / bad / "training.json").write_text('{"model": "<b>"}')
    search = leave_search(home)
    (home / "runs" / search / "result.json").write_text("{")
    answer = guest.get("/experiments")
    assert set(listed(answer)) == {good, bad}
    assert "unreadable" in answer.text
    assert "unreadable" in shown(guest.get(f"/experiments/compare?run={bad}"))
    assert "result.json is damaged" in shown(guest.get("/experiments/searches"))
    assert "result.json is damaged" in shown(guest.get(f"/experiments/searches/{search}"))


def test_strange_values_are_escaped(home: Path, guest: Visitor) -> None:
    run = leave_training(home)
    file = home / "runs" / run / "training.json"
    job = json.loads(file.read_text())
    job["model"]["options"] = {"<script>": "<img src=x>"}
    file.write_text(json.dumps(job))
    for path in ("/experiments", f"/experiments/compare?run={run}", "/experiments?text=%3Cscript%3E"):
        text = guest.get(path).text
        assert "<img src=x>" not in text
        assert "<script>" not in text.partition("<main")[2].partition("</main>")[0]


def test_a_training_of_another_host_is_in_the_list_and_silent_ones_are_called_so(
    home: Path, tmp_path: Path, guest: Visitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERIN_STORE", f"file://{tmp_path / 'shared'}")
    other = tmp_path / "other"
    monkeypatch.setenv("SERIN_HOME", str(other))
    run = leave_training(other, state="unfinished")
    keep_experiment(other / "runs" / run)
    monkeypatch.setenv("SERIN_HOME", str(home))
    document = tmp_path / "shared" / "stages" / "experiments" / f"{run}.json"
    known = json.loads(document.read_text())
    for seen, state in ((time.time(), "running"), (time.time() - 3600, "no news")):
        document.write_text(json.dumps({**known, "state": "running", "host": "gpu-7", "seen": seen}))
        assert state in shown(guest.get(f"/experiments/compare?run={run}&run={state.replace(' ', '-')}"))
    text = shown(guest.get("/experiments"))
    assert run in text
    assert "gpu-7" in shown(guest.get(f"/experiments/compare?run={run}"))
    assert 'href="/runs/' not in shown(guest.get(f"/experiments/compare?run={run}"))  # its log is not here


def test_a_training_links_to_its_version_and_to_the_end_of_its_rollout(
    full: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    shutil.copytree(full, home)
    monkeypatch.setenv("SERIN_HOME", str(home))
    runs = [leave_training(home, model=MODEL, began=float(number)) for number in (1, 2, 3)]
    for version, run in ((1, runs[0]), (2, runs[1])):
        manifest = home / "store" / "models" / MODEL / "versions" / str(version) / "manifest.json"
        document = json.loads(manifest.read_text())
        document["lineage"]["training"] = run
        manifest.chmod(0o644)
        manifest.write_text(json.dumps(document))
    guest = visitor(home).login("viewer")
    rows = dict(re.findall(r'<tr id="run-([^"]+)">(.*?)</tr>', shown(guest.get("/experiments"))))
    assert "version 1</a>" in rows[runs[0]]
    assert ">live</a>" in rows[runs[0]]
    assert "version 2</a>" in rows[runs[1]]
    assert ">shifting 50%</a>" in rows[runs[1]]
    assert "version" not in rows[runs[2]]
    newest = max((home / "rollouts" / MODEL / "decisions").iterdir())
    newest.write_bytes(newest.read_bytes()[:-40])
    text = shown(visitor(home).login("viewer").get("/experiments"))
    assert f"the outcome of the trainings of {MODEL} cannot be read" in text
    assert runs[2] in text


def test_a_damaged_manifest_names_no_training(home: Path) -> None:
    class Broken:
        url = "x"

        def read_file(self, *_: object) -> bytes:
            return b"[]"

    assert training_of(Broken(), "m", 1) == ""  # type: ignore[arg-type]
    assert Store(str(home / "store")).read_file("flights", 1, "manifest.json") is None


def test_searches_show_their_best_trial_their_importance_and_what_was_trained_with_it(
    home: Path, guest: Visitor
) -> None:
    search = leave_search(home)
    trials = json.loads((home / "runs" / search / "result.json").read_text())
    best = trials["trials"][trials["trial"]]
    settings = {path.partition(".")[2]: value for path, value in best["settings"].items()}
    run = leave_training(home, **settings)
    going = leave_search(home, model="delays", trials=9, done=False)
    text = shown(guest.get("/experiments/searches"))
    for words in ("16 complete, 6 pruned, 2 failed", "7 complete, 2 pruned", "unfinished", search, going):
        assert words in text, words
    page = shown(guest.get(f"/experiments/searches/{search}"))
    for words in (
        "training.learning_rate 82%",
        run,
        "loss is not finite at step 31",
        "Trials, the best first",
    ):
        assert words in page, words
    numbers = [int(number) for number in re.findall(r'<tr id="trial-(\d+)"', page)]
    assert numbers[0] == best["trial"]
    assert len(numbers) == 24
    assert guest.get("/experiments/searches/search-nothing").status_code == 404
