"""Runs the jobs of examples/ci as GitHub Actions and GitLab CI do: steps, variables and conditions of their files."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml

from tests.architecture.sources import ROOT

CI = ROOT / "examples" / "ci"
ACTIONS = {"actions/checkout@v4", "actions/setup-python@v5", "actions/upload-artifact@v4"}
_EXPRESSION = re.compile(r"\$\{\{(.*?)\}\}")
_VARIABLE = re.compile(r"\$(\w+)")

Execute = Callable[[str, Mapping[str, str]], int]
"""Runs a script of bash in the checkout with these variables; returns its exit code."""


@dataclass(kw_only=True)
class Job:
    """What happened in a job. `code`: of the first step that failed. `artifacts`: files that were kept of it."""

    code: int = 0
    ran: list[str] = field(default_factory=list)
    artifacts: list[str] = field(default_factory=list)

    def keep(self, folder: Path) -> None:
        self.artifacts += sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((CI / name).read_text())
    return found


@dataclass(kw_only=True)
class GitHubActions:
    """A runner of GitHub. `own`: values that replace those of the file's `env`, as its users write them there.
    `runner`: variables that the runner sets itself."""

    checkout: Path
    execute: Execute
    own: Mapping[str, str]
    secrets: Mapping[str, str]
    runner: Mapping[str, str] = field(default_factory=dict)

    def run(self, event: str, *, number: int = 7, fork: bool = False) -> dict[str, Job]:
        """Returns the jobs that an event starts, in their order."""
        head = {"repo": SimpleNamespace(full_name="stranger/models" if fork else "birds/models")}
        request = SimpleNamespace(number=number, head=SimpleNamespace(**head))
        payload = SimpleNamespace(pull_request=request)
        github = SimpleNamespace(event_name=event, event=payload, repository="birds/models")
        file = read("github.yaml")
        assert set(self.own) <= set(file["env"])
        done: dict[str, Job] = {}
        for name, job in file["jobs"].items():
            needed = done.get(job["needs"]) if "needs" in job else Job()
            if needed and needed.code == 0 and self._holds(job["if"], github):
                variables = file["env"] | dict(self.own) | job.get("env", {})
                done[name] = self._job(job, variables, github)
        return done

    def _job(self, job: Mapping[str, Any], variables: Mapping[str, str], github: Any) -> Job:
        now = Job()
        for step in job["steps"]:
            if not self._holds(step.get("if", "success()"), github, ok=now.code == 0):
                continue
            if "uses" in step:
                assert step["uses"] in ACTIONS
                if "upload" in step["uses"]:
                    now.keep(self.checkout / step["with"]["path"])
                continue
            filled = {
                key: self._fill(value, github)
                for key, value in ({**variables, **step.get("env", {})}).items()
            }
            assert "${{" not in step["run"], "what an expression holds must not become part of a script"
            now.ran.append(step["run"])
            code = self.execute(f"set -e\n{step['run']}", {**self.runner, **filled})
            now.code = now.code or code
        return now

    def _holds(self, expression: str, github: Any, *, ok: bool = True) -> bool:
        names = {"github": github, "always": lambda: True, "success": lambda: ok, "hashFiles": self._hash}
        python = expression.replace("&&", " and ").replace("||", " or ")
        return bool(eval(python, {"__builtins__": {}}, names)) and (ok or "always()" in expression)

    def _hash(self, name: str) -> str:
        return "x" if (self.checkout / name).is_file() else ""

    def _fill(self, value: str, github: Any) -> str:
        """The value of a variable with its expressions: a secret, or a part of the event."""
        names = {"github": github, "secrets": SimpleNamespace(**self.secrets)}
        return _EXPRESSION.sub(lambda found: str(eval(found[1], {"__builtins__": {}}, names)), value)


@dataclass(kw_only=True)
class GitLab:
    """A runner of GitLab. `own`: see GitHubActions. `project`: the variables of the project's settings."""

    checkout: Path
    execute: Execute
    own: Mapping[str, str]
    project: Mapping[str, str]
    runner: Mapping[str, str] = field(default_factory=dict)

    def run(self, **event: str) -> dict[str, Job]:
        """Returns the jobs that an event starts, stage by stage. `event`: variables such as CI_PIPELINE_SOURCE."""
        file = read("gitlab.yaml")
        assert set(self.own) <= set(file["variables"])
        variables = {**file["variables"], **self.own, **self.project, **self.runner, **event}
        done: dict[str, Job] = {}
        for stage in file["stages"]:
            for name, job in self._jobs(file, stage):
                if any(self._holds(rule["if"], variables) for rule in job["rules"]):
                    done[name] = self._job(file["default"]["before_script"], job, variables)
            if any(job.code for job in done.values()):
                break
        return done

    def _jobs(self, file: Mapping[str, Any], stage: str) -> Iterator[tuple[str, dict[str, Any]]]:
        yield from (
            (name, job)
            for name, job in file.items()
            if isinstance(job, dict) and "script" in job and job["stage"] == stage
        )

    def _job(self, before: list[str], job: Mapping[str, Any], variables: Mapping[str, str]) -> Job:
        now = Job(ran=[*before, *job["script"]])
        now.code = self.execute("\n".join(["set -eo pipefail", *now.ran]), variables)
        if after := job.get("after_script"):
            now.ran += after
            assert self.execute("\n".join(after), variables) == 0
        for path in job.get("artifacts", {}).get("paths", ()):
            now.keep(self.checkout / path)
        return now

    def _holds(self, rule: str, variables: Mapping[str, str]) -> bool:
        python = _VARIABLE.sub(lambda name: repr(variables.get(name[1], "")), rule.replace("&&", " and "))
        return bool(eval(python, {"__builtins__": {}}))
