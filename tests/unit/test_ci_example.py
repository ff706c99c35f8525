"""examples/ci: the comment on a pull request, and what the workflow calls. The scripts run in tests/e2e/stack."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main
import yaml

from serin.cli import app
from tests.fakes.github import FakeGitHub, running_github

ROOT = Path(__file__).resolve().parents[2]
CI = ROOT / "examples" / "ci"


@pytest.fixture
def github() -> Iterator[FakeGitHub]:
    with running_github() as made:
        yield made


def comment(github: FakeGitHub, tmp_path: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    report = tmp_path / "report.md"
    report.write_text("## Completed: late-parcels\n")
    return subprocess.run(
        [sys.executable, CI / "comment.py", str(report), "--pull-request", "7"],
        env=github.environment | variables,
        capture_output=True,
        text=True,
        timeout=150,
    )


def test_the_first_report_becomes_a_comment(github: FakeGitHub, tmp_path: Path) -> None:
    done = comment(github, tmp_path)
    assert done.returncode == 0, done.stderr
    ((method, path, body),) = github.changes
    assert (method, path) == ("POST", "/repos/birds/models/issues/7/comments")
    assert body.endswith("## Completed: late-parcels\n")


def test_the_next_report_takes_its_place_also_on_a_later_page(github: FakeGitHub, tmp_path: Path) -> None:
    comment(github, tmp_path)
    (_, _, ours) = github.changes.pop()
    others = [{"id": number, "body": "looks good"} for number in range(150)]
    github.comments = [*others, {"id": 4711, "body": ours}]
    comment(github, tmp_path)
    ((method, path, _),) = github.changes
    assert (method, path) == ("PATCH", "/repos/birds/models/issues/comments/4711")


def test_a_refusal_fails_with_githubs_words_and_without_the_token(github: FakeGitHub, tmp_path: Path) -> None:
    done = comment(github, tmp_path, GITHUB_TOKEN="another-t0ken")
    assert done.returncode == 1
    assert "GitHub answered 401" in done.stderr
    assert "another-t0ken" not in done.stderr


def test_the_workflow_calls_scripts_and_commands_that_exist() -> None:
    workflow = yaml.safe_load((CI / "workflow.yaml").read_text())
    steps = [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    scripts = {word for step in steps for word in step.split() if word.startswith("examples/")}
    assert scripts == {"examples/ci/train", "examples/ci/roll_out", "examples/ci/comment.py"}
    assert all((ROOT / script).is_file() for script in scripts)
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    said = [step.split()[1] for step in steps if step.startswith("serin ")]
    text = "".join((CI / name).read_text() for name in ("train", "roll_out", "run"))
    said += re.findall(r"(?:^|! |\()serin (\w+)", text, re.MULTILINE)
    assert said
    assert set(said) <= set(commands)
    options = {
        name for parameter in commands["run"].params for name in [*parameter.opts, *parameter.secondary_opts]
    }
    assert set(re.findall(r"--[\w-]+", text)) <= options


def test_code_of_strangers_does_not_run_on_the_runner() -> None:
    workflow = yaml.safe_load((CI / "workflow.yaml").read_text())
    assert "head.repo.full_name == github.repository" in workflow["jobs"]["train"]["if"]
    assert workflow["permissions"] == {"contents": "read", "pull-requests": "write"}
