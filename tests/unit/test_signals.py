"""What tests signal may have ended: that must not hide why."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from tests.e2e.browser import open_browser
from tests.signals import hit, kill_9, send_group


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
