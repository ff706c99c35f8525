"""Runs a contender in a separate process, so that each can have its own environment.

    python -m benchmarks.child benchmarks.etl.polars_peer

The process reads one JSON line per request and writes one JSON line per answer. The module has `run(request) ->
answer`, which is timed, and may have `prepare(request)`, which is called once and not timed.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.clock import Watch
from benchmarks.race import Lap

ROOT = Path(__file__).resolve().parent.parent
STOP_S = 20
REPORTED = (
    "dask", "duckdb", "evidently", "lightgbm", "lightning", "numpy", "onnxruntime", "openvino", "pandas", "polars",
    "pyarrow", "serin", "torch", "tritonclient", "xgboost",
)  # fmt: skip


class ContenderFailed(Exception):
    """A contender's process exited or gave an unusable answer."""


class Child:
    """The parent's handle of a contender's process. Use it as a context manager: the process ends with it."""

    def __init__(
        self, module: str, *, python: str, threads: int, environment: Mapping[str, str] | None = None
    ) -> None:
        self._module = module
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed in __exit__)
        limits = {
            name: str(threads) for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "POLARS_MAX_THREADS")
        }
        self._process = subprocess.Popen(
            [python, "-m", "benchmarks.child", module],
            cwd=ROOT,
            env={**os.environ, **limits, "PYTHONHASHSEED": "0", **(environment or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self.versions: dict[str, str] = self._exchange(None)["versions"]

    def run(self, request: Mapping[str, Any]) -> Lap:
        return Lap(**self._exchange(request))

    def _exchange(self, request: Mapping[str, Any] | None) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            if request is not None:
                self._process.stdin.write(json.dumps(request) + "\n")
                self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self._process.wait(STOP_S)
            self._log.seek(0)
            tail = self._log.read().decode(errors="replace")[-3000:]
            raise ContenderFailed(f"{self._module} exited with code {self._process.returncode}\n{tail}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def kill(self) -> None:
        """Ends the process at once; a request that is being answered raises ContenderFailed."""
        self._process.kill()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(BrokenPipeError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._log.close()


def main(module: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries must not mix with the answers
    contender = importlib.import_module(module)
    prepare = getattr(contender, "prepare", None)
    _answer(answers, {"versions": _versions()})
    for line in sys.stdin:
        request = json.loads(line)
        if prepare is not None:
            prepare(request)
            prepare = None
        gc.collect()
        with peak_memory() as peak:
            watch = Watch()
            answer = contender.run(request) or {}
            # A contender may time its own work, to leave out preparation such as a capture or a process group.
            spent = {name: answer.pop(name, value) for name, value in watch.read().items()}
        _answer(answers, {**spent, "peak_bytes": peak[0], "answer": answer})


def _answer(stream: Any, value: dict[str, Any]) -> None:
    stream.write(json.dumps(value) + "\n")
    stream.flush()


def _versions() -> dict[str, str]:
    found = {"python": sys.version.split()[0]}
    for name in REPORTED:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


@contextlib.contextmanager
def peak_memory(every_s: float = 0.02) -> Iterator[list[int]]:
    """Samples the largest resident size of this process and its children together while the block runs."""
    me, peak, done = os.getpid(), [0], threading.Event()

    def sample() -> None:
        while True:
            peak[0] = max(peak[0], sum(_resident_bytes(process) for process in (me, *_descendants(me))))
            if done.wait(every_s):
                return

    sampler = threading.Thread(target=sample, daemon=True)
    sampler.start()
    try:
        yield peak
    finally:
        done.set()
        sampler.join()


def _descendants(pid: int) -> Iterator[int]:
    """Yields the children of a process and theirs. Asks the kernel: psutil reads the files of every process of the
    machine, 3.5 ms of CPU time for each sample where 109 run, against 0.2 ms."""
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # it has ended
            for child in map(int, listed.read_text().split()):
                yield child
                yield from _descendants(child)


def _resident_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


if __name__ == "__main__":
    main(sys.argv[1])
