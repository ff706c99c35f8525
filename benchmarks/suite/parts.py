"""A part of `make bench` or `make gpu-test`: a benchmark with its goals or a file of tests, and how it is run."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from benchmarks.machine import StolenTime

ROOT = Path(__file__).resolve().parents[2]
Verdict = Literal["passed", "failed", "skipped", "goal missed", "timed out", "not run"]
_FIGURE = re.compile(r"(?<!\S)([A-Za-z]\S*?)=(-?[\d.]+(?:e[+-]?\d+)?)(?!\S)")
_SKIPPED_FILE = re.compile(r"'Skipped: (.*)'\)")
_NO_TESTS = 5  # pytest's exit code when nothing was collected
_DISTURBED = 0.03  # of the CPU time: from here on figures say more of the host than of the code
_SHARED = {"OMP_WAIT_POLICY": "passive"}  # beside others: threads that spin would slow them down


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """The least (or the most) that a figure should be."""

    least: float | None = None
    most: float | None = None

    def is_met(self, value: float) -> bool:
        return (self.least is None or value >= self.least) and (self.most is None or value <= self.most)

    def __str__(self) -> str:
        return f">= {self.least:g}" if self.least is not None else f"<= {self.most:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """`alone`: nothing else may use the machine in the meantime. `goals`: by the names of a benchmark's last line.
    `complete`: one without a figure for each goal has failed."""

    name: str
    command: tuple[str, ...]
    alone: bool = False
    tests: bool = False
    goals: Mapping[str, Goal] = field(default_factory=dict)
    complete: bool = True
    report: bool = False  # it is a benchmark that writes all its figures with --json

    @property
    def file_name(self) -> str:
        """The name of its files, without an ending."""
        return re.sub(r"\W+", "-", self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The outcome of a part. `figures`: those of its last line. `detail`: counts of tests, or the last lines. `curves`:
    those of a benchmark that has some. `stolen`: the share of the CPU time that the host took in the meantime."""

    name: str
    result: Verdict
    seconds: float
    figures: Mapping[str, float] = field(default_factory=dict)
    detail: str = ""
    curves: Mapping[str, Any] = field(default_factory=dict)
    stolen: float = 0.0

    @property
    def has_failed(self) -> bool:
        return self.result in ("failed", "timed out")

    @property
    def is_disturbed(self) -> bool:
        return self.stolen >= _DISTURBED

    def is_better_than(self, other: Outcome) -> bool:
        """Whether this one counts, of two runs of the same part: the first failure, if there is one."""
        if self.has_failed or other.has_failed:
            return not other.has_failed
        return bool(self.figures) and (not other.figures or self.stolen < other.stolen)


class Running:
    """A part that runs, with its output in a file. `ended` gives its outcome once."""

    def __init__(self, part: Part, folder: Path) -> None:
        name = part.file_name
        self.part, self.log, self._report = part, folder / f"{name}.log", folder / f"{name}.xml"
        self._figures = folder / f"{name}.json"
        command = [sys.executable, *part.command, *([f"--junitxml={self._report}"] if part.tests else [])]
        command += ["--json", str(self._figures)] if part.report else []
        with self.log.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **({} if part.alone else _SHARED)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._began, self._stolen = time.monotonic(), StolenTime()

    def ended(self) -> Outcome | None:
        """None while it runs. Where no test of a file was chosen, the outcome has no name."""
        code = self._process.poll()
        if code is None:
            return None
        seconds = time.monotonic() - self._began
        judge = self._tests_ended if self.part.tests else self._benchmark_ended
        return replace(judge(code, seconds), stolen=self._stolen.share())

    def stop(self) -> Outcome:
        """Ends a part that took too long, with the processes that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        seconds = time.monotonic() - self._began
        return Outcome(
            name=self.part.name,
            result="timed out",
            seconds=seconds,
            detail=self._tail(),
            stolen=self._stolen.share(),
        )

    def _tests_ended(self, code: int, seconds: float) -> Outcome:
        counts = read_counts(self._report)
        if code == _NO_TESTS and not counts.get(
            "skipped"
        ):  # of a file that is skipped as a whole, that counts one
            return Outcome(name="", result="skipped", seconds=seconds)
        words = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
        if counts.get("skipped"):
            words += f" ({read_reason(self._report)})"
        if code not in (0, _NO_TESTS):
            detail = f"{words}\n{self._tail()}" if words else self._tail()
            return Outcome(name=self.part.name, result="failed", seconds=seconds, detail=detail)
        result: Verdict = "passed" if counts.get("passed") else "skipped"
        return Outcome(name=self.part.name, result=result, seconds=seconds, detail=words)

    def _benchmark_ended(self, code: int, seconds: float) -> Outcome:
        text = self.log.read_text(encoding="utf-8", errors="replace")
        figures = read_figures(text)
        missing = [name for name in self.part.goals if name not in figures]
        if code or (missing and self.part.complete):
            why = f"no figure for {', '.join(missing)}\n" if missing and not code else ""
            detail = f"{why}{self._tail()}"
            return Outcome(
                name=self.part.name, result="failed", seconds=seconds, figures=figures, detail=detail
            )
        judged = [goal.is_met(figures[name]) for name, goal in self.part.goals.items() if name in figures]
        met = all(judged) and not missing
        return Outcome(
            name=self.part.name,
            result="passed" if met else "goal missed",
            seconds=seconds,
            figures=figures,
            curves=self._curves(),
        )

    def _curves(self) -> Mapping[str, Any]:
        if not self._figures.exists():
            return {}
        found: Mapping[str, Any] = json.loads(self._figures.read_text(encoding="utf-8"))["figures"]
        return found.get("curves", {})

    def _tail(self, lines: int = 25) -> str:
        text = self.log.read_text(encoding="utf-8", errors="replace")
        return "\n".join(text.splitlines()[-lines:])


def read_figures(text: str) -> dict[str, float]:
    """The key=value pairs of the last line."""
    lines = [line for line in text.splitlines() if line.strip()]
    return {name: float(value) for name, value in _FIGURE.findall(lines[-1])} if lines else {}


def read_reason(report: Path) -> str:
    """Why the first test that was skipped was; of an expected failure, why it is expected."""
    for each in ET.parse(report).getroot().iter("skipped"):
        whole_file = _SKIPPED_FILE.search(each.text or "")
        return (whole_file[1] if whole_file else each.get("message", ""))[:100]
    return ""


def read_counts(report: Path) -> dict[str, int]:
    """How many tests passed, failed and were skipped, by pytest's report; nothing when there is none."""
    try:
        suites = list(ET.parse(report).getroot().iter("testsuite"))
    except (OSError, ET.ParseError):
        return {}
    total = {
        key: sum(int(suite.get(key, 0)) for suite in suites)
        for key in ("tests", "failures", "errors", "skipped")
    }
    failed = total["failures"] + total["errors"]
    return {
        "passed": total["tests"] - failed - total["skipped"],
        "failed": failed,
        "skipped": total["skipped"],
    }
