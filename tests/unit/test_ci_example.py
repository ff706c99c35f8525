"""examples/ci: the scripts for real, against a `serin` and a GitHub that only remember what they were asked."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from serin.cli import app

ROOT = Path(__file__).resolve().parents[2]
CI = ROOT / "examples" / "ci"


@pytest.fixture
def serin(tmp_path: Path) -> Path:
    """A folder with a `serin` that notes its arguments and exits with the next of the codes in a file."""
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / "serin"
    program.write_text(
        "#!/usr/bin/env bash\n"
        f'echo "$*" >> {tmp_path}/asked\n'
        'if [ "$1" = runs ]; then echo "## Completed: late-parcels"; exit "${REPORT_CODE:-0}"; fi\n'
        f"code=$(head -n 1 {tmp_path}/codes); sed -i 1d {tmp_path}/codes; exit $code\n"
    )
    program.chmod(0o755)
    return folder


def run(
    script: str, serin: Path, tmp_path: Path, codes: list[int], **variables: str
) -> tuple[int, list[str], str]:
    """Exit code, what `serin` was asked, the report."""
    (tmp_path / "codes").write_text("".join(f"{code}\n" for code in codes))
    done = subprocess.run(
        [CI / script, "model/spec.yaml", str(tmp_path / "report.md")],
        env={**os.environ, "PATH": f"{serin}:{os.environ['PATH']}", **variables},
        cwd=tmp_path,
        timeout=150,
    )
    return (
        done.returncode,
        (tmp_path / "asked").read_text().splitlines(),
        (tmp_path / "report.md").read_text(),
    )


def test_a_pull_request_is_trained_and_not_served(serin: Path, tmp_path: Path) -> None:
    code, asked, report = run("train", serin, tmp_path, [0])
    assert (code, asked) == (0, ["run model/spec.yaml --no-serve", "runs report"])
    assert report == "## Completed: late-parcels\n"


def test_a_merge_is_rolled_out(serin: Path, tmp_path: Path) -> None:
    assert run("roll_out", serin, tmp_path, [0])[:2] == (0, ["run model/spec.yaml", "runs report"])


@pytest.mark.parametrize("script", ["train", "roll_out"])
@pytest.mark.parametrize("code", [1, 2])
def test_a_failure_fails_the_job_and_is_reported(serin: Path, tmp_path: Path, script: str, code: int) -> None:
    found, asked, report = run(script, serin, tmp_path, [code])
    assert found == code
    assert asked[-1] == "runs report"
    assert "Completed" in report


def test_a_training_that_was_preempted_goes_on_once(serin: Path, tmp_path: Path) -> None:
    code, asked, _ = run("train", serin, tmp_path, [75, 0])
    assert code == 0
    assert asked[:2] == ["run model/spec.yaml --no-serve"] * 2


def test_without_a_run_to_report_the_report_says_how_it_ended(serin: Path, tmp_path: Path) -> None:
    code, _, report = run("train", serin, tmp_path, [2], REPORT_CODE="1")
    assert code == 2
    assert "`serin run model/spec.yaml` ended with code 2" in report


class FakeGitHub:
    """Comments of one pull request, as GitHub keeps them: 100 on a page."""

    def __init__(self, comments: list[dict[str, Any]]) -> None:
        self.comments = comments
        self.changes: list[tuple[str, str, str]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def _answer(self) -> None:
                if self.headers["Authorization"] != "Bearer t0ken":
                    self._say(401, {"message": "Bad credentials"})
                    return
                if self.command == "GET":
                    page = int(re.search(r"[?&]page=(\d+)", self.path)[1])  # type: ignore[index]
                    self._say(200, outer.comments[(page - 1) * 100 : page * 100])
                    return
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["body"]
                outer.changes.append((self.command, self.path, body))
                self._say(201, {"id": 1})

            do_GET = do_POST = do_PATCH = _answer  # noqa: N815 (names that http.server looks for)

            def _say(self, code: int, content: Any) -> None:
                self.send_response(code)
                self.end_headers()
                self.wfile.write(json.dumps(content).encode())

            def log_message(self, *_: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)


@pytest.fixture
def github() -> Iterator[FakeGitHub]:
    made = FakeGitHub([])
    thread = threading.Thread(target=made.http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield made
    made.http.shutdown()
    made.http.server_close()
    thread.join()


def comment(github: FakeGitHub, tmp_path: Path, token: str = "t0ken") -> subprocess.CompletedProcess[str]:
    report = tmp_path / "report.md"
    report.write_text("## Completed: late-parcels\n")
    return subprocess.run(
        [sys.executable, CI / "comment.py", str(report), "--pull-request", "7"],
        env={
            "GITHUB_TOKEN": token,
            "GITHUB_REPOSITORY": "birds/models",
            "GITHUB_API_URL": f"http://127.0.0.1:{github.http.server_port}",
        },
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
    done = comment(github, tmp_path, token="another-t0ken")
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
    text = (CI / "train").read_text() + (CI / "roll_out").read_text()
    said += re.findall(r"^serin (\w+)", text, re.MULTILINE)
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
