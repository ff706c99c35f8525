"""A run of these tests meets no other one, and leaves nothing: whatever ends it."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cluster.isolated import remove_left
from tests.cluster.part import need
from tests.kit.waiting import until

ROOT = Path(__file__).resolve().parents[2]
# A bridge, a named network namespace, and a process that no one waits for, all with the same names in every run.
SCENE = (
    "ip link add name kube-br type bridge; ip netns add kube-10; setsid sleep 600 & echo made; exec sleep 600"
)
CODE = """
import os, sys
from tests.cluster.isolated import run_isolated, temporary_folder
with temporary_folder() as folder:
    (folder / "used").touch()
    sys.exit(run_isolated(["sh", "-c", sys.argv[1]], os.environ))
"""


def begin(mark: str, temporary: Path, script: str = SCENE) -> subprocess.Popen[str]:
    variables = {**os.environ, "SERIN_TEST_MARK": mark, "TMPDIR": str(temporary)}
    return subprocess.Popen(
        [sys.executable, "-c", CODE, script], env=variables, cwd=ROOT, stdout=subprocess.PIPE, text=True
    )


@contextmanager
def running(mark: str, temporary: Path) -> Iterator[subprocess.Popen[str]]:
    process = begin(mark, temporary)
    try:
        assert process.stdout.readline() == "made\n"
        yield process
    finally:
        process.kill()
        process.wait()


def marked(mark: str) -> list[str]:
    """The commands of all processes of a run."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if (
                entry.name.isdigit()
                and f"SERIN_TEST_MARK={mark}".encode() in (entry / "environ").read_bytes()
            ):
                found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:  # it has ended
            continue
    return [command for command in found if command]


def names_here() -> str:
    """The links and named namespaces of the machine."""
    words = (["ip", "-brief", "link"], ["ip", "netns", "list"])
    return "\n".join(
        subprocess.run(each, capture_output=True, text=True, check=True).stdout for each in words
    )


@pytest.fixture(autouse=True)
def _tools() -> None:
    need("namespaces")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_of_a_run_that_is_ended(number: signal.Signals, tmp_path: Path) -> None:
    mark = f"ended-{os.getpid()}-{number}"
    with running(mark, tmp_path) as process:
        assert len(marked(mark)) >= 4
        assert "kube" not in names_here()
        process.send_signal(number)
        assert process.wait(60) != 0
        until(lambda: not marked(mark), "the end of all of it")  # of a killed one the kernel ends the rest
    folders = list(tmp_path.iterdir())
    assert len(folders) == (1 if number == signal.SIGKILL else 0)
    done = begin(f"{mark}-next", tmp_path, "true")
    assert done.wait(60) == 0
    assert list(tmp_path.iterdir()) == [], "the next run removes what a killed one left"


def test_two_runs_at_once_do_not_meet(tmp_path: Path) -> None:
    marks = [f"two-{os.getpid()}-{number}" for number in range(2)]
    with running(marks[0], tmp_path), running(marks[1], tmp_path):
        assert len(list(tmp_path.iterdir())) == 2
        assert all(len(marked(mark)) >= 4 for mark in marks)


def test_the_exit_code_is_that_of_the_command(tmp_path: Path) -> None:
    assert begin("code", tmp_path, "exit 7").wait(60) == 7


def test_a_folder_of_a_run_that_begins_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    young, old = tmp_path / "sc-young", tmp_path / "sc-old"
    for folder in (young, old, tmp_path / "other"):
        folder.mkdir()
    os.utime(old, (0, 0))
    assert remove_left() == [old]
    assert {path.name for path in tmp_path.iterdir()} == {"sc-young", "other"}
