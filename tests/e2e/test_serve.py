"""Serving alone, as a container runs it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

from serin.stack.survivors import stack_processes


def test_serving_alone_answers_and_leaves_nothing_when_it_is_told_to_end(tmp_path: Path) -> None:
    home, port = tmp_path / "home", _free_port()
    log = tmp_path / "serve.log"
    with log.open("wb") as output:
        serving = subprocess.Popen(
            [sys.executable, "-m", "serin.stack.serve", "--port", str(port)],
            env={**os.environ, "SERIN_HOME": str(home)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        _until(lambda: _answers(f"http://127.0.0.1:{port}/v2/health/live"), serving, log)
        _until(
            lambda: _runs(home, "serin.stack.controller"), serving, log
        )  # the gateway was started before it
        serving.send_signal(signal.SIGTERM)
        assert serving.wait(timeout=30) == 0, log.read_text()
        assert stack_processes(home) == []
    finally:
        serving.kill()
        serving.wait()
        for pid in stack_processes(home):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _until(true: Callable[[], bool], serving: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert serving.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=10):
            return True
    except OSError:
        return False


def _runs(home: Path, module: str) -> bool:
    words: list[bytes] = []
    for pid in stack_processes(home):
        with contextlib.suppress(OSError):
            words += Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return module.encode() in words


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
