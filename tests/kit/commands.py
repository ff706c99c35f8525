"""Serin's commands: in this process, as a terminal starts them, and in a process of their own."""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from typer.testing import CliRunner

SERIN = (sys.executable, "-m", "serin.cli")


def serin(*words: str, code: int = 0) -> str:
    """All that the command says, errors included."""
    from serin.cli import app

    done = CliRunner().invoke(app, words)
    said = done.output + (str(done.exception) if done.exception else "")
    assert done.exit_code == code, (words, said)
    return said


def serin_main(*words: str) -> int:
    """The exit code of the program; what it prints is printed, with the errors as a user sees them."""
    from serin import cli

    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as ended:
        patch.setattr(sys, "argv", ["serin", *words])
        cli.main()
    return int(ended.value.code or 0)


def serin_process(
    *words: str, env: Mapping[str, str], code: int | None = 0, timeout_s: float = 600.0
) -> subprocess.CompletedProcess[str]:
    """`env`: all its variables. `code` None: whatever it ends with."""
    return run(*SERIN, *words, env=env, code=code, timeout_s=timeout_s)


def run(
    *command: str | Path,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    code: int | None = 0,
    timeout_s: float = 600.0,
) -> subprocess.CompletedProcess[str]:
    """A program to its end, which must be `code`; None: whatever it ends with."""
    done = subprocess.run(
        command, env=env, cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s
    )
    said = f"{' '.join(map(str, command))[:300]} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
    assert code is None or done.returncode == code, said
    return done
