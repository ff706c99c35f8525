"""The subset of benchmarks that `make bench-check` runs, and the ratios of their rounds.

Judged is CPU time, in many short laps of two processes that take turns: what other programs take from the machine is
not part of it, and what they do to caches and clocks meets both.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.__main__ import BENCHMARKS
from benchmarks.check import serving
from benchmarks.race import Choice, Result
from benchmarks.report import Report

Ratios = dict[
    str, list[float]
]  # a reference's CPU seconds over ours, round by round, by the name of the ratio


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Ours against one reference that needs no other environment, with enough rounds for an interval.

    One thread, unless `threads` is None: threads that wait for each other use CPU time too.
    """

    benchmark: str
    reference: str
    repetitions: int
    times_the_data: float = 1.0
    limit_times: int = 1
    threads: int | None = 1
    cases: frozenset[str] | None = None

    def measure(self, say: Callable[[str], None]) -> Ratios:
        found = self.laps()
        say(f"{self.benchmark} against {self.reference}: {self.repetitions} rounds")
        return {
            f"{self.benchmark} {case} {self.reference}": ratios_of(results, self.reference)
            for case, results in found.items()
        }

    def laps(self) -> Mapping[str, Mapping[str, Result]]:
        choice = Choice(
            contenders=frozenset({"ours", self.reference}),
            cases=self.cases,
            repetitions=self.repetitions,
            times_the_data=self.times_the_data,
            limit_times=self.limit_times,
            threads=self.threads,
        )
        module = importlib.import_module(BENCHMARKS[self.benchmark])
        report: Report = module.measure(full=False, say=lambda _: None, choice=choice)
        return report.cases


class ServingCheck(Check):
    """Requests of one row through the gateway."""

    def laps(self) -> Mapping[str, Mapping[str, Result]]:
        return {"one row": serving.measure(self.repetitions)}


CHECKS: tuple[Check, ...] = (
    Check(benchmark="loader", reference="limit", repetitions=60, times_the_data=0.25),
    Check(
        benchmark="training",
        reference="eager",
        repetitions=60,
        times_the_data=0.5,
        cases=frozenset({"mlp_1024"}),
    ),
    Check(
        benchmark="etl",
        reference="limit",
        repetitions=25,
        limit_times=5,
        threads=None,
        cases=frozenset({"join"}),
    ),
    Check(benchmark="trees", reference="limit", repetitions=25, times_the_data=0.2),
    Check(benchmark="bulk", reference="limit", repetitions=25, times_the_data=0.1),
    ServingCheck(benchmark="serving", reference=serving.REFERENCE, repetitions=60),
)


def ratios_of(results: Mapping[str, Result], reference: str) -> list[float]:
    theirs, ours = results[reference].cpu_seconds, results["ours"].cpu_seconds
    return [one / other for one, other in zip(theirs, ours, strict=True)]


def measure_all(checks: Sequence[Check], say: Callable[[str], None]) -> Ratios:
    return {name: ratios for check in checks for name, ratios in check.measure(say).items()}
