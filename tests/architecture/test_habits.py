"""The recipes around the code: workflows, hooks and the changelog are valid and name what exists."""

import re
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.architecture.sources import ROOT, repository_files
from tests.kit.commands import run

WORKFLOWS = [name for name in repository_files() if name.startswith(".github/workflows/")]


def test_workflows_fit_the_schema_of_github_actions() -> None:
    assert WORKFLOWS
    schema = "--builtin-schema", "vendor.github-workflows"
    run(sys.executable, "-m", "check_jsonschema", *schema, *WORKFLOWS, cwd=ROOT)


def test_workflows_run_targets_that_the_makefile_has() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    called = {
        target
        for name in WORKFLOWS
        for target in re.findall(r"\bmake ([a-z-]+)", (ROOT / name).read_text(encoding="utf-8"))
    }
    assert called >= {"lint", "test", "docs", "release"}
    assert called - targets == set()


def test_what_make_unit_leaves_out_exists() -> None:
    (names,) = re.findall(r"^TRAINS +:= (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert [name for name in names.split() if not (ROOT / "tests" / "unit" / name).exists()] == []


def test_workflows_test_every_python_that_the_package_names() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = re.findall(r"Python :: (3\.\d+)", "\n".join(project["classifiers"]))
    (tested,) = (
        job["strategy"]["matrix"]["python"]
        for name in WORKFLOWS
        for job in yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))["jobs"].values()
        if "strategy" in job
    )
    assert tested == named


def test_hooks_are_valid_and_run_programs_of_the_environment() -> None:
    config = ROOT / ".pre-commit-config.yaml"
    run(sys.executable, "-m", "pre_commit", "validate-config", config, cwd=ROOT)
    hooks = [
        hook for repo in yaml.safe_load(config.read_text(encoding="utf-8"))["repos"] for hook in repo["hooks"]
    ]
    programs = [Path(hook["entry"].split()[0]) for hook in hooks if hook["language"] == "system"]
    beside = Path(sys.executable).parent
    assert [program for program in programs if not (beside / program.name).exists()] == []


@pytest.mark.parametrize(("subject", "refused"), [("a" * 72, False), ("a" * 73, True)])
def test_the_hook_refuses_a_subject_of_more_than_72_characters(subject: str, refused: bool) -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"][0][
        "hooks"
    ]
    (rule,) = (hook["entry"] for hook in hooks if hook["id"] == "commit-subject")
    assert bool(re.search(rule, f"{subject}\n\n{'a long line of the body ' * 9}\n")) is refused


def test_the_changelog_has_the_version_of_the_package() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    headings = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert headings[0] == "[Unreleased]"
    assert all(re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d", heading) for heading in headings[1:])
    assert any(heading.startswith(f"[{version}] ") for heading in headings)
