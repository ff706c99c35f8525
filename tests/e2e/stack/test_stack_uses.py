"""Runs that people start themselves, on a real stack: Prefect's own page and command, a schedule, the scripts for CI.

The tests share one model. A schedule trains its first version; the second one is trained by CI and rolled out again and
again: at 50% it waits for approval, and there its process is killed or it is approved. The next ones are made by placed
stages, which a schedule and a person start in Prefect's page. NVIDIA's clients get the answers of each.
"""

import json
import re
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
import yaml

from serin.formats.schema import read_schema
from serin.host.state import running_stack
from serin.host.supervisor import Supervisor
from serin.pipeline.experiments import trainings
from serin.rollout.run.status import ModelStatus, model_status
from serin.store.store import Store
from tests.e2e.prefect_page import PrefectPage
from tests.e2e.whole_stack import Stack, until
from tests.fakes.github import running_github
from tests.fakes.small_pipeline import small_spec
from tests.signals import hit
from tests.unit.serving.bundles import infer_inputs, score

pytestmark = pytest.mark.timeout(1500)

ROOT = Path(__file__).parents[3]
CI, DOCS = ROOT / "examples" / "ci", ROOT / "docs" / "how-to" / "schedule.md"
MODEL = "daily-parcels"
TREES = {"kind": "xgboost", "rounds": 12, "options": {"max_depth": 3}}
EVERY_S = 25  # workers find the runs of the next ten seconds at once: two of them would meet in one rollout
ROLLOUT = {
    "steps": [50, 100], "approve": [100], "step_time": "0s", "min_requests": 0, "bake": "0s", "deadline": "600s"
}  # fmt: skip


class Parcels:
    """The specs of the model's versions: each exists as a file, as in a repository."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.first = self._write("first.yaml")
        self.second = self._write("second.yaml", objectives={"latency_ms": 400})
        self.placed = self._write("placed.yaml", rollout={**ROLLOUT, "approve": []}, training={"seed": 4})
        self.worse = self._write("worse.yaml", model={**TREES, "rounds": 1, "options": {"max_depth": 1}})
        self.wrong = folder / "wrong.yaml"
        self.wrong.write_text(self.first.read_text().replace("features:", "feature:"))

    def _write(self, name: str, **sections: dict[str, Any]) -> Path:
        sections = {"model": TREES, "training": {"seed": 3}, "rollout": ROLLOUT, **sections}
        path = self.folder / name
        path.write_text(yaml.safe_dump(small_spec(self.folder / "data", **sections) | {"name": MODEL}))
        return path


@pytest.fixture(scope="module")
def parcels(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Parcels:
    """The first version is live: it was trained and rolled out by a run that a schedule has started, that of the docs
    with times that come soon."""
    made = Parcels(tmp_path_factory.mktemp("parcels"))
    _ends_well(stack, _fired(stack, _deploy_as_the_docs_say(stack, made)))
    return made


def test_a_schedule_fires_and_its_run_ends_in_a_served_version(stack: Stack, parcels: Parcels) -> None:
    status = _status(stack)
    assert (status.live, status.rollout.phase) == (1, "promoted")
    rows, scores = parcels.folder / "rows.csv", parcels.folder / "scores.csv"
    rows.write_text("weight,distance,carrier\n2.5,1900,slow\n1.0,10,swift\n")
    stack.serin("predict", MODEL, str(rows), "--out", str(scores))
    late, early = (float(line.rpartition(",")[2]) for line in scores.read_text().splitlines()[1:])
    assert late > early
    _answers_nvidias_clients(stack)


def test_ci_scores_what_has_come_into_a_database_each_row_once(stack: Stack, parcels: Parcels) -> None:
    rows, database, uri = (parcels.folder / name for name in ("arrived", "scores.db", "uri"))
    rows.mkdir()
    database.touch()
    uri.write_text(f"sqlite:///{database}")
    out = json.dumps({"table": "scores", "connection": f"file:{uri}"})
    given = f"--param model={MODEL} --param rows={rows} --param out='{out}'"
    for name, arrived, known in (("a", 2, 2), ("b", 3, 5)):
        (rows / f"{name}.csv").write_text("weight,distance,carrier\n" + "2.5,1900,slow\n" * arrived)
        done = stack.shell(
            f'eval "$(serin env)" && prefect deployment run score/scheduled --watch {given}', parcels.folder
        )
        assert done.returncode == 0, done.stderr
        with closing(sqlite3.connect(database)) as read:
            assert read.execute("select count(*), count(distinct score) from scores").fetchone() == (known, 1)


def test_the_runs_of_a_schedule_are_found_by_their_model(stack: Stack, parcels: Parcels) -> None:
    wanted = {"flow_runs": {"tags": {"all_": [MODEL]}}, "flows": {"name": {"any_": ["pipeline"]}}}
    first = stack.call("POST", "/flow_runs/filter", {**wanted, "sort": "START_TIME_ASC"})[0]
    assert first["created_by"]["type"] == "SCHEDULE"
    assert MODEL in {training.model for training in trainings(stack.home).read().records}


def test_ci_trains_a_pull_request_and_comments_on_it_without_serving_it(
    stack: Stack, parcels: Parcels
) -> None:
    done = _ci(stack, "train", parcels.second)
    assert done.returncode == 0, done.stderr
    *before, version, metrics, compared, following = _told(done.stderr)
    assert [line for line in before if not LINES.fullmatch(line)] == []
    assert [version, metrics, compared, following] == [
        f"{MODEL} version 2 is published, not served",
        "auc N, logloss N on N test rows",
        "compared with version 1: auc N against N, equal on N rows",
        f"next: serin rollout start {MODEL}:2",
    ]
    assert _status(stack).live == 1
    with running_github() as github:
        written = subprocess.run(
            [sys.executable, CI / "comment.py", parcels.folder / "report" / "report.md", "--pull-request", "7"],
            env=github.environment, capture_output=True, text=True, timeout=150,
        )  # fmt: skip
        assert written.returncode == 0, written.stderr
        ((_, _, body),) = github.changes
    assert "## Completed: " in body
    assert f"### {MODEL} version 2" in body


def test_ci_reports_a_wrong_spec_as_such_and_not_the_run_before_it(stack: Stack, parcels: Parcels) -> None:
    done = _ci(stack, "train", parcels.wrong)
    assert done.returncode == 2
    report = (parcels.folder / "report" / "report.md").read_text()
    assert report.startswith("## No run\n")
    assert "feature: " in report
    assert "Completed" not in report


def test_a_rollback_fails_ci_and_prefects_command_with_one_line(stack: Stack, parcels: Parcels) -> None:
    why = f"release {MODEL}-v2 was rolled back: {MODEL}-v2 is not running; `serin rollout report {MODEL}` writes"
    with _at_the_canary(stack, lambda: _kill(stack)):
        done = _ci(stack, "roll_out", parcels.second)
    assert done.returncode == 1
    said = _told(done.stderr)
    assert [line for line in said if not LINES.fullmatch(line)] == []
    assert said[-2] == f"serin: the run of {parcels.second} failed: {_numbers(why)} the full report"
    assert why in (parcels.folder / "report" / "report.md").read_text()
    _is_clean(done.stderr)

    with _at_the_canary(stack, lambda: _kill(stack)):
        watched = _watch(stack, parcels.second)
    assert watched.returncode == 1, watched.stdout
    assert f"the run failed: {why}" in _unfolded(watched.stdout)
    _is_clean(watched.stdout)
    assert _status(stack).live == 1


def test_a_refusal_fails_both_commands_with_one_line(stack: Stack, parcels: Parcels) -> None:
    watched = _watch(stack, parcels.worse)
    assert watched.returncode == 1, watched.stdout
    why = f"the candidate for '{MODEL}' is worse than the live version 1: overall auc "
    assert f"the run failed: {why}0." in _unfolded(watched.stdout)
    _is_clean(watched.stdout)

    done = _ci(stack, "train", parcels.worse)
    assert done.returncode == 1
    said = _told(done.stderr)
    assert [line for line in said if not LINES.fullmatch(line)] == []
    assert said[-2].startswith(
        f"serin: the run of {parcels.worse} failed: {why}N against N, worse by N (between N"
    )
    assert why in (parcels.folder / "report" / "report.md").read_text()
    assert [found["version"] for found in stack.ask("models", "list") if found["model"] == MODEL] == [1, 2]


def test_a_version_that_is_approved_is_live_and_the_command_says_where(
    stack: Stack, parcels: Parcels
) -> None:
    with _at_the_canary(stack, lambda: stack.serin("rollout", "approve", MODEL)):
        watched = _watch(stack, parcels.second)
    assert watched.returncode == 0, watched.stdout
    said = _unfolded(watched.stdout)
    assert f"{MODEL} version 2 is live" in said
    assert f"/v2/models/{MODEL}/infer" in said
    assert said.endswith("the run completed Flow run finished successfully in 'Completed'.")
    _is_clean(watched.stdout)

    again = _ci(stack, "roll_out", parcels.second)
    assert again.returncode == 0, again.stderr
    assert _told(again.stderr)[2:] == LIVE_ALREADY
    assert _status(stack).live == 2


def test_a_run_that_is_started_in_prefects_page_shows_its_outcome_there(
    stack: Stack, parcels: Parcels, page: PrefectPage
) -> None:
    run = page.start_run("inline", parcels.second)
    assert run["parameters"]["spec"] == str(parcels.second)
    _ends_well(stack, run)
    page.open(f"/runs/flow-run/{run['id']}", run["name"], "Completed", f"{MODEL} version 2 is live")
    _answers_nvidias_clients(stack)


def test_a_schedule_that_is_made_in_prefects_page_places_the_stages_of_its_runs(
    stack: Stack, parcels: Parcels, page: PrefectPage
) -> None:
    """The deployment is the stack's own; its schedule has the spec."""
    page.add_schedule("placed", every_s=EVERY_S, spec=parcels.placed)
    run = _fired(stack, "placed")
    _ends_well(stack, run)
    shown = page.open(f"/runs/flow-run/{run['id']}", "Completed", f"{MODEL} version 3 is live", MODEL)
    assert "train placed as train/placed" in shown
    _answers_nvidias_clients(stack)


def test_a_person_starts_a_placed_run_with_parameters_in_prefects_page(
    stack: Stack, parcels: Parcels, page: PrefectPage
) -> None:
    run = page.start_run("placed", parcels.placed, fresh=["export"])
    assert run["parameters"]["fresh"] == ["export"]
    _ends_well(stack, run)
    page.open(
        f"/runs/flow-run/{run['id']}", "Completed", "train done before", "export placed as export/placed"
    )
    below = {"flow_runs": {"parent_flow_run_id": {"any_": [run["id"]]}}}
    (export,) = stack.call("POST", "/flow_runs/filter", below)
    assert (MODEL in export["tags"], export["state_type"]) == (True, "COMPLETED")
    assert _status(stack).live == 4
    _answers_nvidias_clients(stack)


# Every line that a run of this model may show; anything else is noise.
LINES = re.compile(
    r"sent package \w+ to the store: .*|longest waits: .*|"
    r"pipeline/inline on http\S+|[a-z]+-[a-z]+: http\S+/runs/flow-run/\S+|made before: dataset|trained before:|"
    rf"exported before: {MODEL} version \d|exporting the model \(changed since the last time: .*\)|"
    r"writing the (model|features) as ONNX|(gate|champion|importance of|quality|engine)\b.*|"
    rf"published {MODEL}-v\d|the controller has accepted {MODEL}-v\d|"
    rf"{MODEL}-v\d: (pending|loading|verifying|N%|N%, held \(approval\)|aborting|rolled back): .*|"
    rf"triton {MODEL}-v\d: .*successfully loaded.*|serin: the run of .* failed: .*|http\S+ shows all of it"
)
LIVE_ALREADY = [
    "made before: dataset",
    "trained before:",
    f"exported before: {MODEL} version 2",
    f"{MODEL}-v2 is live already",
    f"{MODEL} version 2 is live",
    "auc N, logloss N on N test rows",
    "compared with version 1: auc N against N, equal on N rows",
    f"it answers at http://127.0.0.1:N/v2/models/{MODEL}/infer",
    f"try it: serin predict {MODEL} ROWS.csv (its columns: serin models show {MODEL})",
    f"next: serin status, serin rollout report {MODEL}",
]


def _deploy_as_the_docs_say(stack: Stack, parcels: Parcels) -> str:
    """By the file that the docs show, with this spec and times that come soon; the deployment's name."""
    (block,) = re.findall(r"```yaml\n(# nightly\.yaml\n.*?)```", DOCS.read_text(), re.DOTALL)
    content = yaml.safe_load(block)
    (deployment,) = content["deployments"]
    deployment["parameters"]["spec"] = str(parcels.first)
    begin = f"DTSTART:{datetime.now(UTC):%Y%m%dT%H%M%SZ}"
    deployment["schedules"] = [{"rrule": f"{begin}\nRRULE:FREQ=SECONDLY;INTERVAL={EVERY_S};COUNT=60"}]
    file = parcels.folder / "nightly.yaml"
    file.write_text(yaml.safe_dump(content))
    stack.serin("deploy", str(file))
    return str(deployment["name"])


def _fired(stack: Stack, deployment: str) -> dict[str, Any]:
    """The first run of the deployment's schedule, once a worker has taken it; the schedule is deleted then, and with it
    the runs that were planned."""
    number = stack.call("GET", f"/deployments/name/pipeline/{deployment}")["id"]
    taken = {"state": {"type": {"not_any_": ["SCHEDULED"]}}, "tags": {"all_": ["auto-scheduled"]}}
    body = {
        "deployments": {"id": {"any_": [number]}}, "flow_runs": taken, "sort": "EXPECTED_START_TIME_ASC"
    }  # fmt: skip
    found = until(
        lambda: stack.call("POST", "/flow_runs/filter", body), "a scheduled run starts", alive=stack.is_well
    )
    for schedule in stack.call("GET", f"/deployments/{number}/schedules"):
        stack.call("DELETE", f"/deployments/{number}/schedules/{schedule['id']}")
    assert found[0]["created_by"]["type"] == "SCHEDULE"
    return dict(found[0])


def _ends_well(stack: Stack, run: dict[str, Any]) -> None:
    until(
        lambda: stack.state(run["id"]) == "COMPLETED",
        "it completes",
        alive=lambda: _goes_on(stack, run["id"]),
    )


def _answers_nvidias_clients(stack: Stack) -> None:
    """Over HTTP and gRPC, as its live version does in this process."""
    bundle = Store(str(stack.home / "store")).bundle(MODEL, _status(stack).live or 0)
    columns = {
        "weight": np.array([[2.5], [1.0]], np.float32),
        "distance": np.array([[1900], [10]], np.int64),
        "carrier": np.array([["slow"], ["swift"]], object),
    }
    schema, wanted = read_schema(Path(bundle.path)), score(bundle.path, columns)
    assert wanted[0] > wanted[1]
    address = running_stack(stack.home).gateway_url.removeprefix("http://")
    for library in (tritonclient.http, tritonclient.grpc):
        client = library.InferenceServerClient(address)
        try:
            answer = client.infer(MODEL, infer_inputs(library, columns, schema))
        finally:
            client.close()
        np.testing.assert_allclose(answer.as_numpy("score"), wanted, rtol=1e-5)


def _goes_on(stack: Stack, run: str) -> bool:
    return stack.is_well() and stack.state(run) not in ("FAILED", "CRASHED", "CANCELLED")


def _watch(stack: Stack, spec: Path) -> subprocess.CompletedProcess[str]:
    """As people type it."""
    line = f"prefect deployment run 'pipeline/inline' --watch --param spec={spec}"
    return stack.shell(f'eval "$(serin env)" && {line}', spec.parent)


def _ci(stack: Stack, script: str, spec: Path) -> subprocess.CompletedProcess[str]:
    return stack.shell(f"{CI / script} {spec} report", spec.parent)


@contextmanager
def _at_the_canary(stack: Stack, act: Callable[[], object]) -> Iterator[None]:
    """Acts once when the rollout that begins in this block waits for approval."""
    from concurrent.futures import ThreadPoolExecutor

    before = _status(stack).rollout.id

    def waits() -> bool:
        rollout = _status(stack).rollout
        return rollout.id != before and rollout.hold == "approval"

    with ThreadPoolExecutor(1) as pool:
        acting = pool.submit(lambda: (until(waits, "it waits for approval", alive=stack.is_well), act()))
        yield
        acting.result()


def _kill(stack: Stack) -> None:
    pid = Supervisor(stack.home).pid(f"{MODEL}-v2")
    assert pid is not None
    hit(pid)


def _status(stack: Stack) -> ModelStatus:
    found = model_status(stack.home, MODEL)
    assert found is not None
    return found


def _told(stderr: str) -> list[str]:
    """The lines without their times, paths and numbers, and without those about the report."""
    told = [line for line in stderr.splitlines() if not re.fullmatch(r"wrote report/(report|card)\.md", line)]
    lines = [re.sub(r"^ *[\d.]+ s  ", "", line) for line in told]
    return [re.sub(r"(made before: dataset|trained before:) .*", r"\1", _numbers(line)) for line in lines]


def _numbers(line: str) -> str:
    """All but those of versions."""
    return re.sub(r"(?<![\w/.-])\d[\d.,]*\d|(?<=127\.0\.0\.1:)\d+", "N", line)


def _unfolded(text: str) -> str:
    """Prefect's command breaks its lines and puts a time before each."""
    return " ".join(re.sub(r"^▪ +[\d:.]+ \w+ ", "", text, flags=re.MULTILINE).split())


def _is_clean(said: str) -> None:
    for noise in ("Traceback", "Finished in state", "CudaDriverHelper", "Error("):
        assert noise not in said, said
