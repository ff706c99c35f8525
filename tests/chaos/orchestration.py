"""kill -9 at every part of a stack while pipelines run: `python -m tests.chaos.orchestration [CASE ...] [--list]`.

One line per case: what was struck when, how long until every run had ended or went on and nothing was left behind (at
most 90 s; for the supervisor, of the next `serin up`), and whether the pipeline came to its one version afterwards.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from serin.errors import StackError
from serin.stack.processes import CONTROLLER, PREFECT, RECONCILER, worker_name
from serin.stack.survivors import stack_processes
from serin.stage_keys import notes
from tests.chaos.pipelines import FINAL, Pipelines, pipelines, wait

SETTLED_S = 90.0
_REACH_S = 900.0  # until a pipeline is where it is to be struck
_END_S = 1200.0
_PARTS = ("worker-cpu", "worker-gpu", PREFECT, CONTROLLER, RECONCILER)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    stack: Pipelines
    name: str
    run: str

    @property
    def training(self) -> Path | None:
        """The folder of the training that this pipeline's run has begun."""
        for record in sorted((self.stack.home / "runs").glob("train-*/training.json")):
            script = json.loads(record.read_text())["model"]["script"]
            if Path(script).parent.name == self.name:
                return record.parent
        return None

    def runs(self) -> list[str]:
        """The pipeline's own run and those of stages it has placed."""
        others = [run.id for run in self.stack.unfinished() if run.parent is not None]
        return [self.run, *others]


Moment = Callable[[Scene], bool]
Strike = Callable[[Scene], None]


def in_stage(stage: str) -> Moment:
    """The stage's work has begun in this run or in one that it has placed."""

    def look(scene: Scene) -> bool:
        told = [entry for run in scene.runs() for entry in notes(scene.stack.home, run)]
        begun = any(
            entry["stage"] == stage and entry["ran"] and "placed as" not in entry["why"] for entry in told
        )
        return begun and (stage != "train" or _steps(scene) > 5)

    return look


def _steps(scene: Scene) -> int:
    file = scene.training / "checkpoints" / "step.json" if scene.training else None
    return json.loads(file.read_text()) if file and file.exists() else 0


def after_etl(scene: Scene) -> bool:
    return (scene.stack.home / "stages" / "etl" / f"last-{scene.name}.parts").exists()


def after_train(scene: Scene) -> bool:
    return (scene.stack.home / "stages" / "train" / f"last-{scene.name}.parts").exists()


def after_export(scene: Scene) -> bool:
    """Published; whether this was written down elsewhere is a matter of luck, and must not matter."""
    return bool(scene.stack.versions(scene.name))


def in_dask(scene: Scene) -> bool:
    return bool(_dask(scene))


def _dask(scene: Scene) -> list[int]:
    """The processes of the run's Dask cluster that compute."""
    return scene.stack.children_at(scene.run, "spawn_main")


def kills_engine(scene: Scene) -> None:
    found = scene.stack.processes(scene.run)
    for pid in found.engines if found else ():
        os.kill(pid, signal.SIGKILL)


def kills_stage(scene: Scene) -> None:
    """The process of the stage that was placed, not that of the pipeline which waits for it."""
    for run in scene.runs()[1:]:
        found = scene.stack.processes(run)
        for pid in found.engines if found else ():
            os.kill(pid, signal.SIGKILL)


def kills_dask(scene: Scene) -> None:
    os.kill(_dask(scene)[-1], signal.SIGKILL)


def kills_rank(scene: Scene) -> None:
    os.kill(scene.stack.children_at("", "train.py")[-1], signal.SIGKILL)


def kills(*parts: str) -> Strike:
    def strike(scene: Scene) -> None:
        for pid in [scene.stack.pid(part) for part in parts]:
            if pid is not None:
                os.kill(pid, signal.SIGKILL)

    return strike


def kills_worker_and_engine(scene: Scene) -> None:
    """Nobody is left who could say that the run has ended."""
    kills(worker_name("cpu"))(scene)
    kills_engine(scene)


def kills_supervisor(scene: Scene) -> None:
    os.kill(scene.stack.stack.supervisor_pid, signal.SIGKILL)


def kills_all(scene: Scene) -> None:
    for pid in stack_processes(scene.stack.home):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue  # it died with another


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    name: str
    when: Moment
    strike: Strike
    placed: bool = False
    engine: str = "process"
    processes: int = 1
    takes_stack: bool = False  # the stack has to be started again


def _matrix() -> tuple[Case, ...]:
    moments: dict[str, Moment] = {
        "in etl": in_stage("etl"), "after etl": after_etl, "in train": in_stage("train"), "after train": after_train,
        "in export": in_stage("export"), "after export": after_export,
    }  # fmt: skip
    cases = [Case(name=f"pipeline {at}", when=when, strike=kills_engine) for at, when in moments.items()]
    cases += [
        Case(name=f"placed parent {at}", when=when, strike=kills_engine, placed=True)
        for at, when in moments.items()
    ]
    stages = {at: when for at, when in moments.items() if at.startswith("in ")}
    cases += [
        Case(name=f"stage process {at}", when=when, strike=kills_stage, placed=True)
        for at, when in stages.items()
    ]
    cases += [
        Case(name="Dask worker in etl", when=in_dask, strike=kills_dask, engine="dask"),
        Case(name="torchrun rank in train", when=in_stage("train"), strike=kills_rank, processes=2),
    ]
    parts = {
        "Prefect worker": kills(worker_name("cpu")),
        "worker and run": kills_worker_and_engine,
        "Prefect server": kills(PREFECT),
        "controller": kills(CONTROLLER),
        "reconciler": kills(RECONCILER),
    }
    cases += [
        Case(name=f"{part} {at}", when=when, strike=strike, placed=part == "Prefect server")
        for part, strike in parts.items()
        for at, when in stages.items()
    ]
    cases += [
        Case(name=f"supervisord {at}", when=when, strike=kills_supervisor, takes_stack=True)
        for at, when in stages.items()
    ]
    return (
        *cases,
        Case(name="all at once in train", when=in_stage("train"), strike=kills_all, takes_stack=True),
    )


CASES = _matrix()
QUICK = (
    "worker and run in train",
    "stage process in train",
    "Prefect server in train",
    "all at once in train",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    case: Case
    settled_s: float
    state: str  # of the run, then
    resumed: bool
    wrong: tuple[str, ...]

    @property
    def line(self) -> str:
        end = "; ".join(self.wrong) or "as wanted"
        how = "resumed" if self.resumed else "went on by itself"
        return f"{self.case.name:<26} {self.settled_s:6.1f} s  {self.state:<10} {how:<18} {end}"


def play(stack: Pipelines, case: Case, number: int) -> Outcome:
    name = f"chaos-{number}"
    spec = stack.write_spec(name, seed=number, engine=case.engine, processes=case.processes)
    scene = Scene(stack=stack, name=name, run=stack.begin(spec, *(["--placed"] if case.placed else [])))
    wait(lambda: case.when(scene), f"{case.name}: to be there", _REACH_S)
    case.strike(scene)
    if case.takes_stack:
        stack.serin("up", seconds=600)
    began = time.monotonic()
    trouble = _settle(scene)
    settled_s = time.monotonic() - began
    wrong = [] if trouble is None else [f"not settled: {trouble}"]
    state = stack.run(scene.run).state
    resumed = state in FINAL and state != "COMPLETED"
    if resumed:
        stack.serin("run", "--resume", stack.run(scene.run).name, "--no-follow")
    end = wait(lambda: _ended(scene), f"{case.name}: to end", _END_S)
    if end != "COMPLETED":
        wrong.append(f"ended {end}: {stack.run(scene.run).message}")
    again = stack.begin(spec)
    if wait(lambda: _ended(Scene(stack=stack, name=name, run=again)), "the run again", _END_S) != "COMPLETED":
        wrong.append(f"a run again: {stack.run(again).message}")
    if stack.versions(name) != [1]:
        wrong.append(f"versions {stack.versions(name)}")
    return Outcome(case=case, settled_s=settled_s, state=state, resumed=resumed, wrong=tuple(wrong))


def _settle(scene: Scene) -> str | None:
    """Waits until all is well; what is not, when that takes too long."""
    deadline = time.monotonic() + SETTLED_S
    while (trouble := _trouble(scene.stack)) is not None:
        if time.monotonic() > deadline:
            return trouble
        time.sleep(0.5)
    return None


def _trouble(stack: Pipelines) -> str | None:
    """A run that nobody carries out, a GPU that a dead process holds, a process nobody waits for."""
    try:
        for part in _PARTS:
            if stack.pid(part) is None:
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


def _ended(scene: Scene) -> str | None:
    state = scene.stack.run(scene.run).state
    return state if state in FINAL else None


def ten_at_once(stack: Pipelines) -> bool:
    """Ten placed pipelines on two GPUs; each training would end with an error if it met another on its device."""
    began = time.monotonic()
    runs = [stack.begin(stack.write_spec(f"ten-{n}", seed=100 + n, steps=20), "--placed") for n in range(10)]
    ends = [
        wait(lambda run=run: _ended(Scene(stack=stack, name="", run=run)), "ten pipelines", 1800)
        for run in runs
    ]
    versions = [stack.versions(f"ten-{n}") for n in range(10)]
    good = ends == ["COMPLETED"] * 10 and versions == [[1]] * 10
    seconds = time.monotonic() - began
    print(
        f"ten pipelines on two GPUs  {seconds:6.1f} s  {ends.count('COMPLETED')} completed, versions {versions}"
    )
    return good


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.orchestration", description=__doc__)
    parser.add_argument("cases", nargs="*", help="names of cases; all when none is named")
    parser.add_argument("--quick", action="store_true", help=f"only {', '.join(QUICK)}")
    parser.add_argument("--list", action="store_true", help="name the cases and do nothing")
    parser.add_argument("--ten", action="store_true", help="only ten pipelines at once")
    options = parser.parse_args()
    wanted = QUICK if options.quick else tuple(options.cases)
    chosen = [case for case in CASES if not wanted or case.name in wanted]
    if options.list:
        print(*(case.name for case in chosen), sep="\n")
        return 0
    good = True
    with pipelines() as stack:
        for number, case in enumerate([] if options.ten else chosen):
            outcome = play(stack, case, number)
            good = good and not outcome.wrong
            print(outcome.line, flush=True)
        if options.ten or not wanted:
            good = ten_at_once(stack) and good
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
