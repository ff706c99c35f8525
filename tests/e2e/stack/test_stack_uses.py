"""Runs that people start themselves, on a real stack: Prefect's own command, a schedule, the scripts for CI.

The tests share one model. A schedule trains its first version; the second one is trained by CI and rolled out again and
again: at 50% it waits for approval, and there its process is killed or it is approved.
"""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from serin.host.supervisor import Supervisor
from serin.rollout.run.status import ModelStatus, model_status
from tests.e2e.whole_stack import Stack, until
from tests.fakes.github import running_github
from tests.fakes.small_pipeline import small_spec
from tests.signals import hit

pytestmark = pytest.mark.timeout(1500)

ROOT = Path(__file__).parents[3]
CI, DOCS = ROOT / "examples" / "ci", ROOT / "docs" / "how-to" / "schedule.md"
MODEL = "daily-parcels"
TREES = {"kind": "xgboost", "rounds": 12, "options": {"max_depth": 3}}
ROLLOUT = {
    "steps": [50, 100], "approve": [100], "step_time": "0s", "min_requests": 0, "bake": "0s", "deadline": "600s"
}  # fmt: skip


class Parcels:
    """The specs of the model's versions: each exists as a file, as in a repository."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.first = self._write("first.yaml")
        self.second = self._write("second.yaml", objectives={"latency_ms": 400})
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
    """The first version is live: it was trained and rolled out by a run that a schedule has started."""
    made = Parcels(tmp_path_factory.mktemp("parcels"))
    deployment = _schedule_as_the_docs_say(stack, made)
    run = until(
        lambda: _started_by_schedule(stack, deployment), "a scheduled run starts", alive=stack.is_well
    )
    _delete_schedules(stack, deployment)
    until(
        lambda: stack.state(run["id"]) == "COMPLETED",
        "it completes",
        alive=lambda: _goes_on(stack, run["id"]),
    )
    return made


def test_a_schedule_fires_and_its_run_ends_in_a_served_version(stack: Stack, parcels: Parcels) -> None:
    status = _status(stack)
    assert (status.live, status.rollout.phase) == (1, "promoted")
    rows, scores = parcels.folder / "rows.csv", parcels.folder / "scores.csv"
    rows.write_text("weight,distance,carrier\n2.5,1900,slow\n1.0,10,swift\n")
    stack.serin("predict", MODEL, str(rows), "--out", str(scores))
    late, early = (float(line.rpartition(",")[2]) for line in scores.read_text().splitlines()[1:])
    assert late > early


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
            [sys.executable, CI / "comment.py", parcels.folder / "report.md", "--pull-request", "7"],
            env=github.environment, capture_output=True, text=True, timeout=150,
        )  # fmt: skip
        assert written.returncode == 0, written.stderr
        ((_, _, body),) = github.changes
    assert "## Completed: " in body
    assert f"### {MODEL} version 2" in body


def test_ci_reports_a_wrong_spec_as_such_and_not_the_run_before_it(stack: Stack, parcels: Parcels) -> None:
    done = _ci(stack, "train", parcels.wrong)
    assert done.returncode == 2
    report = (parcels.folder / "report.md").read_text()
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
    assert why in (parcels.folder / "report.md").read_text()
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
    assert why in (parcels.folder / "report.md").read_text()
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


# Every line that a run of this model may show; anything else is noise.
LINES = re.compile(
    r"sent package \w+ to the store: .*|"
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


def _schedule_as_the_docs_say(stack: Stack, parcels: Parcels) -> str:
    """By the file that the docs show, with this spec and times that come soon."""
    (block,) = re.findall(r"```yaml\n(# nightly\.yaml\n.*?)```", DOCS.read_text(), re.DOTALL)
    content = yaml.safe_load(block)
    (deployment,) = content["deployments"]
    deployment["parameters"]["spec"] = str(parcels.first)
    begin = f"DTSTART:{datetime.now(UTC):%Y%m%dT%H%M%SZ}"
    # Workers find the runs of the next ten seconds at once: two of them would meet in one rollout.
    deployment["schedules"] = [{"rrule": f"{begin}\nRRULE:FREQ=SECONDLY;INTERVAL=25;COUNT=60"}]
    file = parcels.folder / "nightly.yaml"
    file.write_text(yaml.safe_dump(content))
    stack.serin("deploy", str(file))
    found = stack.call("GET", f"/deployments/name/pipeline/{deployment['name']}")
    return str(found["id"])


def _started_by_schedule(stack: Stack, deployment: str) -> dict[str, Any] | None:
    body = {"deployments": {"id": {"any_": [deployment]}}, "flow_runs": {"start_time": {"is_null_": False}}}
    found = stack.call("POST", "/flow_runs/filter", body)
    assert all(run["created_by"]["type"] == "SCHEDULE" for run in found)
    return found[0] if found else None


def _delete_schedules(stack: Stack, deployment: str) -> None:
    """And with them the runs that were planned."""
    for schedule in stack.call("GET", f"/deployments/{deployment}/schedules"):
        stack.call("DELETE", f"/deployments/{deployment}/schedules/{schedule['id']}")


def _goes_on(stack: Stack, run: str) -> bool:
    return stack.is_well() and stack.state(run) not in ("FAILED", "CRASHED", "CANCELLED")


def _watch(stack: Stack, spec: Path) -> subprocess.CompletedProcess[str]:
    """As people type it."""
    line = f"prefect deployment run 'pipeline/inline' --watch --param spec={spec}"
    return _shell(stack, f'eval "$(serin env)" && {line}', spec.parent)


def _ci(stack: Stack, script: str, spec: Path) -> subprocess.CompletedProcess[str]:
    return _shell(stack, f"{CI / script} {spec} report.md", spec.parent)


def _shell(stack: Stack, line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    began = time.monotonic()
    done = subprocess.run(
        ["bash", "-c", line],
        env={**stack.environment, "PATH": programs},
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
    )
    print(f"{line[-60:]}: {time.monotonic() - began:.1f} s")
    return done


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
    """The lines without their times, paths and numbers."""
    lines = [re.sub(r"^ *[\d.]+ s  ", "", line) for line in stderr.splitlines()]
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
