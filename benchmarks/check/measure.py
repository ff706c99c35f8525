"""The subset of benchmarks that `make bench-check` runs, and the ratios of their rounds."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.__main__ import BENCHMARKS
from benchmarks.race import Choice, Result
from benchmarks.report import Report

Ratios = dict[str, list[float]]  # a reference's seconds over ours, round by round, by the name of the ratio


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Ours against one reference that needs no other environment, with enough rounds for an interval."""

    benchmark: str
    reference: str
    repetitions: int
    times_the_data: int = 1
    cases: frozenset[str] | None = None

    def measure(self, say: Callable[[str], None]) -> Ratios:
        choice = Choice(
            contenders=frozenset({"ours", self.reference}),
            cases=self.cases,
            repetitions=self.repetitions,
            times_the_data=self.times_the_data,
        )
        module = importlib.import_module(BENCHMARKS[self.benchmark])
        report: Report = module.measure(full=False, say=lambda _: None, choice=choice)
        say(f"{self.benchmark} against {self.reference}: {self.repetitions} rounds")
        return {
            f"{self.benchmark} {case} {self.reference}": ratios_of(results, self.reference)
            for case, results in report.cases.items()
        }


CHECKS = (
    Check(benchmark="loader", reference="limit", repetitions=17),
    Check(
        benchmark="training",
        reference="eager",
        repetitions=11,
        times_the_data=8,
        cases=frozenset({"mlp_1024"}),
    ),
    Check(benchmark="etl", reference="limit", repetitions=13, cases=frozenset({"join"})),
)


def ratios_of(results: Mapping[str, Result], reference: str) -> list[float]:
    theirs, ours = results[reference].seconds, results["ours"].seconds
    return [one / other for one, other in zip(theirs, ours, strict=True)]


def measure_all(checks: Sequence[Check], say: Callable[[str], None]) -> Ratios:
    return {name: ratios for check in checks for name, ratios in check.measure(say).items()}
