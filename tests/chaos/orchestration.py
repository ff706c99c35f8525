"""kill -9 at every part of a stack while pipelines run: `python -m tests.chaos.orchestration [CASE|PART ...] [--list]`.

A part is killed inside each stage and after it, of one pipeline: what is killed there goes on or is resumed, and is
killed again. One line per case: how long until every run had ended or went on and nothing was left
behind (at most 90 s; for the supervisor, of the next `serin up`). One line per pipeline: whether it came to its one
version, and a run of it afterwards to nothing new. A moment that went by meanwhile is tried again on a new pipeline.
"""

import argparse
import itertools
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from serin.errors import StackError
from serin.host.wiring import CONTROLLER, PREFECT, RECONCILER
from tests.chaos.pipelines import DEVICES, Pipelines, pipelines, wait
from tests.chaos.strikes import (
    MOMENTS,
    Moment,
    Scene,
    Strike,
    in_dask,
    is_over,
    kills,
    kills_all,
    kills_dask,
    kills_engine,
    kills_rank,
    kills_stage,
    kills_supervisor,
    kills_worker_and_engine,
    kills_workers,
)

SETTLED_S = 90.0
_REACH_S = 900.0  # until a pipeline is where it is to be struck
_END_S = 1200.0
_TRIES = 3  # until a moment is met that goes by quickly
_TEN, _TEN_STEPS, _TEN_S = 10, 100, 1500.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    name: str
    strike: Strike
    moments: tuple[str, ...] = tuple(MOMENTS)
    ends_run: bool = False  # which is resumed then
    takes_stack: bool = False  # which has to be started again
    placed: bool = False
    engine: str = "process"
    processes: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    part: Part
    moment: str

    @property
    def name(self) -> str:
        return f"{self.part.name} {self.moment}"

    @property
    def when(self) -> Moment:
        return in_dask if self.part.engine == "dask" else MOMENTS[self.moment]


PARTS = (
    Part(name="pipeline", strike=kills_engine, ends_run=True),
    Part(name="placed parent", strike=kills_engine, ends_run=True, placed=True),
    Part(name="stage process", strike=kills_stage, placed=True),
    Part(name="Dask worker", strike=kills_dask, moments=("in etl",), engine="dask"),
    Part(name="torchrun rank", strike=kills_rank, moments=("in train",), processes=2),
    Part(name="Prefect worker", strike=kills_workers, placed=True),
    Part(name="worker and run", strike=kills_worker_and_engine, ends_run=True),
    Part(name="Prefect server", strike=kills(PREFECT), placed=True),
    Part(name="controller", strike=kills(CONTROLLER)),
    Part(name="reconciler", strike=kills(RECONCILER)),
    Part(name="supervisord", strike=kills_supervisor, ends_run=True, takes_stack=True),
    Part(name="all at once", strike=kills_all, ends_run=True, takes_stack=True),
)
CASES = tuple(Case(part=part, moment=moment) for part in PARTS for moment in part.moments)
QUICK = (
    "worker and run in train",
    "stage process in train",
    "Prefect server in train",
    "all at once in train",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    case: Case
    settled_s: float = 0.0
    state: str = ""  # of the run, then
    wrong: str = ""
    late: bool = False  # the moment had gone by, or nobody was there to be killed: nothing was shown

    @property
    def line(self) -> str:
        if self.late:
            return f"{self.case.name:<28}           the moment went by"
        how = {"COMPLETED": "had ended", "CRASHED": "resumed"}.get(self.state, "went on by itself")
        return f"{self.case.name:<28} {self.settled_s:6.1f} s  {self.state:<10} {how:<18} {self.wrong or 'as wanted'}"


def play(stack: Pipelines, cases: list[Case], number: int) -> Iterator[Outcome]:
    """The cases on one pipeline, which comes to its end then; what is wrong with the end is told of the last case."""
    part, name = cases[0].part, f"chaos-{number}"
    steps = 60 if part.ends_run or len(cases) == 1 else 300  # longer than it takes to settle what went before
    spec = stack.write_spec(name, seed=number, engine=part.engine, processes=part.processes, steps=steps)
    scene = Scene(stack=stack, name=name, run=stack.begin(spec, *(["--placed"] if part.placed else [])))
    for case in cases:
        outcome = _strike(scene, case)
        print(outcome.line, flush=True)
        yield outcome
    end = wait(scene.ended, f"{name}: to end", _END_S)
    wrong = [] if end == "COMPLETED" else [f"ended {end}: {stack.run(scene.run).message}"]
    again = Scene(stack=stack, name=name, run=stack.begin(spec))
    if wait(again.ended, f"{name}: the run again", _END_S) != "COMPLETED":
        wrong.append(f"a run again: {stack.run(again.run).message}")
    if stack.versions(name) != [1]:
        wrong.append(f"versions {stack.versions(name)}")
    print(
        f"  its pipeline, in the end: {'; '.join(wrong) or 'one version, the run again as well'}", flush=True
    )
    if wrong:
        yield Outcome(case=cases[-1], wrong="; ".join(wrong))


def _strike(scene: Scene, case: Case) -> Outcome:
    stack = scene.stack
    where = wait(lambda: _where(scene, case), f"{case.name}: to be there", _REACH_S)
    killed = case.part.strike(scene) if where == "there" else set()
    if not killed:
        return Outcome(case=case, late=True)
    began = time.monotonic()
    if case.part.takes_stack:
        stack.serin("up", seconds=600)
    trouble = _settle(stack, killed, began)
    settled_s = time.monotonic() - began
    state = stack.run(scene.run).state
    if state in ("CRASHED", "FAILED", "CANCELLED"):
        stack.serin("run", "--resume", stack.run(scene.run).name, "--no-follow")
    wrong = f"not settled: {trouble}" if trouble else ""
    if state == "FAILED":
        wrong = f"{wrong}; the run failed".strip("; ")
    return Outcome(case=case, settled_s=settled_s, state=state, wrong=wrong)


def _where(scene: Scene, case: Case) -> str | None:
    if case.when(scene):
        return "gone by" if is_over(case.moment, scene) else "there"
    return "ended" if scene.ended() else None


def _settle(stack: Pipelines, killed: set[int], began: float) -> str | None:
    """Waits until all is well; what is not, when that takes too long."""
    while (trouble := _trouble(stack, killed)) is not None:
        if time.monotonic() > began + SETTLED_S:
            return trouble
        time.sleep(0.5)
    return None


def _trouble(stack: Pipelines, killed: set[int]) -> str | None:
    """A run that nobody carries out, a GPU that a dead process holds, a process nobody waits for."""
    try:
        for part in stack.parts:
            if stack.pid(part) in {None, *killed}:  # the supervisor may not have noticed yet
                return f"{part} does not run"
        runs = stack.unfinished()
    except StackError as error:  # it is being started again
        return str(error)
    for run in runs:
        found = stack.processes(run.id)
        if found is None or not found.engines:
            return f"{run.name} is {run.state.lower()} and has no process"
    if dead := stack.dead_holders():
        return f"held by the dead: {dead}"
    if orphans := stack.orphans():
        return f"orphans: {orphans}"
    return None


def play_all(stack: Pipelines, cases: list[Case]) -> bool:
    """What went by, because it is short or because what went before had not settled yet, is tried once more."""
    numbers, good = itertools.count(), True
    for part in PARTS:
        left = [case for case in cases if case.part is part]
        for _ in range(_TRIES):
            outcomes = list(play(stack, left, next(numbers))) if left else []
            left = [outcome.case for outcome in outcomes if outcome.late]
            good = good and not any(outcome.wrong for outcome in outcomes)
        for case in left:
            print(f"{case.name:<28}           never met", flush=True)
        good = good and not left
    return good


def ten_at_once(stack: Pipelines) -> bool:
    """Ten placed pipelines on two GPUs; each training would end with an error if it met another on its device."""
    began = time.monotonic()
    specs = {f"ten-{n}": stack.write_spec(f"ten-{n}", seed=100 + n, steps=_TEN_STEPS) for n in range(_TEN)}
    under_way = [
        Scene(stack=stack, name=name, run=stack.begin(spec, "--placed")) for name, spec in specs.items()
    ]
    ends: dict[str, tuple[str, float]] = {}
    two_at_once = most_devices = 0
    while under_way and time.monotonic() < began + _TEN_S:
        held = [holder.device for holder in stack.holders() if holder.kind == "exclusive"]
        two_at_once += len(held) - len(set(held))
        most_devices = max(most_devices, len(set(held)))
        with suppress(StackError):  # a server that is asked too much is asked again
            for scene in list(under_way):
                if state := scene.ended():
                    ends[scene.name] = state, time.monotonic() - began
                    under_way.remove(scene)
        time.sleep(0.25)
    versions = [stack.versions(name) for name in specs]
    completed = [seconds for state, seconds in ends.values() if state == "COMPLETED"]
    others = [scene.name for scene in under_way] + _bad(ends)
    print(
        f"ten pipelines on two GPUs: {len(completed)} completed, the first after {min(completed, default=0):.0f} s, "
        f"the last after {max(completed, default=0):.0f} s, others: {others}; versions {versions}; "
        f"GPUs in use at once: {most_devices}; one with two holders: {two_at_once} times",
        flush=True,
    )
    return (
        len(completed) == _TEN
        and versions == [[1]] * _TEN
        and not two_at_once
        and most_devices == len(DEVICES)
    )


def _bad(ends: dict[str, tuple[str, float]]) -> list[str]:
    return [f"{name} {state}" for name, (state, _) in ends.items() if state != "COMPLETED"]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.orchestration", description=__doc__)
    parser.add_argument("cases", nargs="*", help="names of cases or parts; all when none is named")
    parser.add_argument("--quick", action="store_true", help=f"only {', '.join(QUICK)}")
    parser.add_argument("--list", action="store_true", help="name the cases and do nothing")
    parser.add_argument(
        "--ten", action="store_true", help="ten pipelines at once, after the cases that are named"
    )
    parser.add_argument("--foreign", action="store_true", help="on a Prefect server that is not the stack's")
    options = parser.parse_args()
    wanted = QUICK if options.quick else tuple(options.cases)
    chosen = [case for case in CASES if not wanted or {case.name, case.part.name} & set(wanted)]
    unknown = set(wanted) - {case.name for case in CASES} - {part.name for part in PARTS}
    if unknown:
        parser.error(f"no such case: {', '.join(sorted(unknown))}; --list names them")
    if options.list:
        print(*(case.name for case in chosen), sep="\n")
        return 0
    with pipelines(foreign=options.foreign) as stack:
        good = play_all(stack, [] if options.ten and not wanted else chosen)
        if options.ten or not wanted:
            good = ten_at_once(stack) and good
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
