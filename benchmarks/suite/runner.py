"""Runs parts of a suite, several at once or one by one, until a deadline, and keeps their outcomes in a file."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.machine import machine
from benchmarks.suite.parts import Outcome, Part, Running
from benchmarks.suite.table import show_line

_LOOK_S = 0.1


class Kept:
    """The outcomes so far, kept in a file that is whole at any time. `earlier`: parts of the file that stay.

    Raises ValueError when two parts have one name, or one name of their files: an outcome would replace the other's.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        *,
        path: Path,
        head: Mapping[str, Any],
        earlier: Sequence[Mapping[str, object]] = (),
    ) -> None:
        files = [part.file_name for part in parts]
        twins = sorted({part.name for part in parts if files.count(part.file_name) > 1})
        if twins:
            raise ValueError(f"parts with the same name or the same files: {', '.join(twins)}")
        self.path, self.outcomes = path, list[Outcome]()
        self._head, self._earlier = {**head, "machine": machine()}, earlier
        self._began = time.monotonic()

    def outcome_of(self, part: Part) -> Outcome | None:
        return next((outcome for outcome in self.outcomes if outcome.name == part.name), None)

    def add(self, outcome: Outcome, part: Part) -> None:
        """Keeps an outcome. Of two of the same part, the one that failed, or that the host disturbed less."""
        if not outcome.name:
            return  # a file in which every test needs the GPU for itself
        print(show_line(outcome, part), flush=True)
        before = self.outcome_of(part)
        if before is not None:
            if not outcome.is_better_than(before):
                return
            self.outcomes.remove(before)
        self.outcomes.append(outcome)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        document = {
            **self._head,
            "seconds": round(time.monotonic() - self._began, 1),
            "parts": [*self._earlier, *(_to_json(found, self._head) for found in self.outcomes)],
        }
        written = self.path.with_suffix(".new")
        written.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        written.replace(self.path)


def _to_json(outcome: Outcome, head: Mapping[str, Any]) -> dict[str, Any]:
    """An outcome with its date and commit: parts of one file may come from several runs."""
    return {**asdict(outcome), "date": head.get("date"), "commit": head.get("commit")}


def run_parts(parts: Sequence[Part], result: Kept, logs: Path, *, at_once: int, deadline: float) -> None:
    """Runs parts that may share the GPU side by side, then the others one by one, until the deadline."""
    together = [part for part in parts if not part.alone]
    _run(together, result, logs, at_once=at_once, deadline=deadline)
    for part in (part for part in parts if part.alone):
        _run([part], result, logs, at_once=1, deadline=deadline)


def _run(parts: Sequence[Part], result: Kept, logs: Path, *, at_once: int, deadline: float) -> None:
    waiting, running = list(parts), list[Running]()
    try:
        while waiting or running:
            late = time.monotonic() >= deadline
            if late:
                for part in waiting:
                    result.add(
                        Outcome(name=part.name, result="not run", seconds=0.0, detail="no time left"), part
                    )
                waiting.clear()
            while waiting and len(running) < at_once:
                running.append(Running(waiting.pop(0), logs))
            for one in list(running):
                outcome = one.stop() if late else one.ended()
                if outcome is not None:
                    running.remove(one)
                    result.add(outcome, one.part)
            time.sleep(_LOOK_S)
    finally:
        for one in running:  # interrupted
            one.stop()
