"""House rules that a reader of the sources could check by eye, and would forget to."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.architecture.sources import ROOT, python_files, repository_files, tree

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 50
LISTS_NOT_LOGIC = {"serin/errors.py"}  # one class after the other: splitting it would hide the tree

PRODUCT = ("serin", "flows", "tasks")


def test_a_file_is_no_longer_than_one_job_needs() -> None:
    lengths = {name: (ROOT / name).read_text(encoding="utf-8").count("\n") for name in python_files()}
    lengths = {name: lines for name, lines in lengths.items() if name not in LISTS_NOT_LOGIC}
    long = {name: lines for name, lines in lengths.items() if lines > MAX_FILE_LINES}
    assert not long, "split these by responsibility"


def test_a_function_fits_on_a_screen() -> None:
    long = {}
    for name in python_files(*PRODUCT, "benchmarks", "deployments", "docs", "examples", "triton_models"):
        for node in ast.walk(tree(name)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > MAX_FUNCTION_LINES:
                    long[f"{name}:{node.name}"] = lines
    assert not long


def test_package_files_are_empty() -> None:
    packages = [name for name in python_files() if Path(name).name == "__init__.py"]
    full = [name for name in packages if (ROOT / name).read_text(encoding="utf-8").strip()]
    assert full == ["serin/__init__.py"], "the front door alone holds code"


def test_every_module_says_its_one_job_first() -> None:
    modules = [name for name in python_files(*PRODUCT, "triton_models") if Path(name).name != "__init__.py"]
    assert [name for name in modules if not ast.get_docstring(tree(name))] == []


def test_only_environment_py_reads_environment_variables() -> None:
    readers = ("environ", "environb", "getenv", "putenv")
    found = []
    for name in python_files(*PRODUCT):
        if name == "serin/machine/environment.py":
            continue
        for node in ast.walk(tree(name)):
            if isinstance(node, ast.Attribute) and node.attr in readers:
                found.append(f"{name}:{node.lineno}: {node.attr}")
            elif isinstance(node, ast.ImportFrom) and node.module == "os":
                found += [
                    f"{name}:{node.lineno}: {alias.name}" for alias in node.names if alias.name in readers
                ]
    assert not found


def test_only_durable_py_and_writers_of_open_files_call_fsync() -> None:
    calls = {
        name
        for name in python_files(*PRODUCT)
        for node in ast.walk(tree(name))
        if isinstance(node, ast.Attribute) and node.attr == "fsync"
    }
    assert calls == {"serin/machine/durable.py", "serin/formats/serving/journal.py", "serin/formats/rows.py"}


def test_only_the_command_and_the_watcher_catch_everything() -> None:
    """A bug in one of the watcher's duties, or in a library that sends alerts, must not stop the others."""
    found = []
    for name in python_files(*PRODUCT, "benchmarks", "examples", "triton_models"):
        if name in ("serin/cli.py", "serin/stack/watch/duty.py", "serin/monitoring/alerts/attempt.py"):
            continue
        handlers = (node for node in ast.walk(tree(name)) if isinstance(node, ast.ExceptHandler))
        found += [f"{name}:{handler.lineno}" for handler in handlers if _catches_everything(handler)]
    assert not found


def _catches_everything(handler: ast.ExceptHandler) -> bool:
    """A handler that tidies up and raises again catches nothing."""
    last = handler.body[-1]
    if isinstance(last, ast.Raise) and last.exc is None:
        return False
    if handler.type is None:
        return True
    return any(getattr(part, "id", None) in ("Exception", "BaseException") for part in ast.walk(handler.type))


def test_no_file_knows_the_machine_it_was_written_on() -> None:
    folders = re.compile(r"(?<![\w./-])/(?:root|work|home|farm|Users|opt/(?:pypi|wheels))/[\w.-]+")
    hosts = re.compile(
        r"--(?:extra-)?index-url|--find-links|https?://[\w.-]*(?:artifactory|nexus|mirror|pypi-proxy)"
    )
    found = []
    for name in repository_files():
        if name.startswith(("docker/", "deployments/")) or name == "tests/architecture/test_sources.py":
            continue  # containers have folders of their own
        data = (ROOT / name).read_bytes()
        if b"\0" in data:
            continue
        for number, line in enumerate(data.decode("utf-8").splitlines(), 1):
            if folders.search(line) or hosts.search(line):
                found.append(f"{name}:{number}: {line.strip()}")
    assert not found


def test_every_pin_is_exact_and_neutral_to_the_platform() -> None:
    pin = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*==[0-9][A-Za-z0-9.]*")
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert [line for line in pins if not pin.fullmatch(line)] == []
    names = [re.sub(r"[-_.]+", "-", line.split("==")[0]).lower() for line in pins]
    assert [name for name in names if names.count(name) > 1] == []
