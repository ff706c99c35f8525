"""examples/ci: the comment on a request, the schemas of both files, and what they call. Their steps run on hosts in
tests/cluster/test_ci.py."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from serin.cli import app
from serin.spec.load import checked_spec
from serin.spec.yaml_file import read_mapping
from tests.architecture.sources import ROOT
from tests.fakes.github import FakeGitHub, running_github
from tests.kit.ci_files import CI, GitHubActions, read

FILES = ("github.yaml", "gitlab.yaml")
SECRETS = {"PREFECT_LOGIN": "s1", "STORE_KEY_ID": "s2", "STORE_KEY": "s3", "GITHUB_TOKEN": "s4"}


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


def test_gitlab_gets_a_note_on_the_merge_request_and_then_another_text(
    github: FakeGitHub, tmp_path: Path
) -> None:
    report = tmp_path / "report.md"
    for text in ("first", "second"):
        report.write_text(text)
        command = [sys.executable, CI / "comment.py", report, "--merge-request", "7"]
        subprocess.run(command, env=github.gitlab_environment, check=True, timeout=150, capture_output=True)
    notes = "/projects/42/merge_requests/7/notes"
    assert [change[:2] for change in github.changes] == [("POST", notes), ("PUT", f"{notes}/1")]
    assert [change[2].splitlines()[-1] for change in github.changes] == ["first", "second"]


def test_variables_that_are_missing_are_named(tmp_path: Path) -> None:
    command = [sys.executable, CI / "comment.py", tmp_path / "report.md", "--merge-request", "7"]
    done = subprocess.run(command, env={"CI_PROJECT_ID": "42"}, capture_output=True, text=True, timeout=150)
    assert done.returncode == 1
    assert done.stderr == "GITLAB_TOKEN and CI_API_V4_URL must be set\n"


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("github.yaml", ["vendor.github-workflows"]),
        ("gitlab.yaml", ["vendor.gitlab-ci", "--data-transform", "gitlab-ci"]),
    ],
)
def test_the_files_fit_the_schemas_of_their_services(name: str, options: list[str]) -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", *options, str(CI / name)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr


def steps(name: str) -> list[str]:
    found = read(name).values() if name == "gitlab.yaml" else read(name)["jobs"].values()
    jobs = [job for job in found if isinstance(job, dict)]
    lists = [job[key] for job in jobs for key in ("before_script", "script", "after_script") if key in job]
    return [*chain(*lists), *(step["run"] for job in jobs for step in job.get("steps", ()) if "run" in step)]


def test_both_files_call_the_same_scripts_and_these_call_commands_that_exist() -> None:
    called = {name: set(re.findall(r"\bci/([\w.]+)", "\n".join(steps(name)))) for name in FILES}
    assert called["github.yaml"] == called["gitlab.yaml"]
    assert called["github.yaml"] == {"install", "check", "sample", "train", "roll_out", "comment.py"}
    scripts = [CI / name for name in (*called["github.yaml"], "run") if not name.endswith(".py")]
    assert all(os.access(script, os.X_OK) for script in scripts)
    group = typer.main.get_command(app)
    text = "\n".join(
        line for script in scripts for line in script.read_text().splitlines() if line[:1] != "#"
    )
    said = [words.split() for words in re.findall(r"(?:^|! |exec |\()serin ([^|>&\n]*)", text, re.MULTILINE)]
    assert {words[0] for words in said} == {"check", "run", "runs"}
    for words in said:
        _exists(group, words)


def _exists(command: Any, words: list[str]) -> None:
    """Raises KeyError for a command, and fails for an option, that `serin` does not have."""
    while hasattr(command, "commands"):
        command, words = command.commands[words[0]], words[1:]
    known = {name for each in command.params for name in (*each.opts, *each.secondary_opts)}
    assert {word for word in words if word.startswith("--")} <= known


def test_code_of_strangers_runs_without_secrets_and_not_on_the_workers() -> None:
    seen: list[tuple[str, Mapping[str, str]]] = []
    runner = GitHubActions(
        checkout=CI, execute=lambda script, given: seen.append((script, given)) or 0, own={}, secrets=SECRETS
    )
    assert list(runner.run("pull_request", fork=True)) == ["check"]
    assert not set(SECRETS.values()) & {value for _, given in seen for value in given.values()}
    assert list(runner.run("pull_request")) == ["check", "train"]
    assert list(runner.run("push")) == ["roll-out"]
    assert {"s1", "s2", "s3"} <= {value for _, given in seen for value in given.values()}
    assert read("github.yaml")["permissions"] == {"contents": "read", "pull-requests": "write"}


def test_a_request_cannot_cancel_a_rollout_that_waits() -> None:
    """GitHub cancels what waits in a group of concurrency when something newer begins to wait there."""
    assert read("github.yaml")["concurrency"] == {
        "group": "model-${{ github.ref }}",
        "cancel-in-progress": False,
    }


def sample_of(spec: Path, where: str) -> bytes:
    command = [sys.executable, CI / "sample.py", spec, where]
    return subprocess.run(command, capture_output=True, check=True, timeout=150).stdout


def test_a_sample_of_a_spec_with_joins_is_a_spec(tmp_path: Path) -> None:
    """YAML 1.1 reads the key `on` as true."""
    spec = ROOT / "examples" / "flights" / "spec.yaml"
    made = tmp_path / "sample.yaml"
    made.write_bytes(sample_of(spec, "distance % 10 == 0"))
    (ours, theirs) = (checked_spec(read_mapping(path), where=str(path)) for path in (made, spec))
    assert ours.data == theirs.data.model_copy(update={"where": ours.data.where})
    assert (ours.name, ours.data.where) == ("flight-delays-sample", "distance % 10 == 0")


def test_a_sample_is_the_same_spec_with_fewer_rows_and_another_name(tmp_path: Path) -> None:
    spec = tmp_path / "spec.yaml"
    rows = {"tables": {"t": "t.parquet"}, "where": "a > 1 or b"}
    spec.write_text(yaml.safe_dump({"name": "owls", "data": rows, "model": {"kind": "dcn"}}))
    made = yaml.safe_load(sample_of(spec, "id % 10 == 0"))
    assert made.pop("name") == "owls-sample"
    assert made == {
        "data": {**rows, "where": "(a > 1 or b) and (id % 10 == 0)"},
        "model": {"kind": "dcn"},
    }
    spec.write_text("name: owls\n")
    command = [sys.executable, CI / "sample.py", spec, "id % 10 == 0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert done.returncode == 1
    assert "is not a spec with a name and data" in done.stderr
