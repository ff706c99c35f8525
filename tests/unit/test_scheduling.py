"""How tests share what is dear, and signal what may have ended."""

import signal
import subprocess
from pathlib import Path

import pytest

from tests.e2e.browser import open_browser
from tests.scheduling import in_turn, order, scope
from tests.signals import hit, kill_9, send_group

SHARED = {("tests/e2e/stack", "stack"): "stack", ("tests", "prefect_server"): "flows"}


def test_a_stack_and_a_prefect_server_are_started_once(request: pytest.FixtureRequest) -> None:
    """Of all tests that are run now: each worker knows them all."""
    others = []
    for item in request.session.items:
        assert isinstance(item, pytest.Function)
        for name, made in item._fixtureinfo.name2fixturedefs.items():
            wanted = SHARED.get((made[-1].baseid, name))
            if wanted not in (None, scope(item.nodeid)):
                others.append(item.nodeid)
    assert others == [], "they would start another one: see tests/scheduling.py"


def test_long_tests_come_before_short_ones_and_those_of_one_scope_together() -> None:
    tests = [
        "tests/unit/test_errors.py::test_a",
        "tests/e2e/test_client.py::test_a",
        "tests/tasks/test_train.py::test_a",
        "tests/e2e/stack/test_stack_pipeline.py::test_a[tests/unit]",
        "tests/flows/test_retrain.py::test_a",
        "tests/e2e/stack/test_stack.py::test_a",
    ]
    scopes = [scope(test) for test in sorted(tests, key=order)]
    assert scopes == [
        "stack",
        "stack",
        "flows",
        "flows",
        "tests/e2e/test_client.py",
        "tests/unit/test_errors.py",
    ]


def test_workers_collect_the_same_files_each_from_another_one_on(tmp_path: Path) -> None:
    wanted = [str(tmp_path / name) for name in ("a/test_1.py", "b/test_2.py", "b/test_3.py", "test_4.py")]
    for file in (*wanted, str(tmp_path / "b" / "scene.py"), str(tmp_path / "root" / "test_5.py")):
        Path(file).parent.mkdir(exist_ok=True)
        Path(file).touch()
    lists = [in_turn(str(tmp_path), [".*", str(tmp_path / "root")], worker, 3) for worker in range(3)]
    assert [sorted(files) for files in lists] == [wanted] * 3
    assert len({files[0] for files in lists}) == 3


def test_a_browser_that_cannot_start_says_why(tmp_path: Path) -> None:
    program = tmp_path / "chromium"
    program.write_text("#!/bin/sh\necho no library\n")
    program.chmod(0o755)
    with pytest.raises(AssertionError, match="no library"), open_browser(str(program), tmp_path / "browser"):
        pass


def test_signals_to_processes_that_have_ended_are_distinguished_from_those_that_arrived() -> None:
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as alive:
        with subprocess.Popen(["true"], start_new_session=True) as ended:
            ended.wait(60)
        assert not send_group(signal.SIGKILL, ended.pid)
        with pytest.raises(
            AssertionError, match=f"process {ended.pid} ended before it could be sent SIGKILL"
        ):
            hit(ended.pid)
        assert kill_9(ended.pid, alive.pid) == {alive.pid}
