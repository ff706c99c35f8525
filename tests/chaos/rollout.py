"""Rollouts under load on real parts, with trouble made on purpose: `python -m tests.chaos.rollout [CASE ...]`.

One row per case: what was decided, how long after the trouble began, what clients saw, who is live then. The Prefect
server that the environment names is down all the while, in every case.
`--equal N` rolls out N equal versions in a row instead, and says what that left behind.
"""

import argparse
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from serin.host.process_scan import group_members, stack_processes
from serin.host.wiring import CONTROLLER
from serin.rollout.decide.plan import Plan
from serin.rollout.decide.state import Hold, Phase, Rollout
from serin.serving.envoy.gateway import PROCESS_NAME
from serin.store.artifacts import Release
from tests.chaos.stage import PLAN, Clients, Stage, stage
from tests.signals import hit, kill_9, send

SOON = replace(
    PLAN, quantiles=(0.5,)
)  # for cases about crashes: the median is proven in seconds on any machine
# For both arms: a candidate whose code is changed must differ from the live one in nothing else.
IN_PYTHON = {"spec": "objectives: {latency_ms: 50}\nserving: {request_timeout: 4s, backend: onnx_python}\n"}
ENDING = (Phase.ABORTING, Phase.DRAINING, Phase.PROMOTED, Phase.ROLLED_BACK)
STUCK = (Hold.INCONCLUSIVE, Hold.INVALID, Hold.FAILED)
Change = Callable[[str], str]
Strike = Callable[[Stage, Release], None]


def at_half(now: Rollout) -> bool:
    return now.weight_percent == 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    name: str
    ends: Phase
    change: Change | None = None  # of the code that Triton runs for the candidate
    strike: Strike | None = None  # done once `when` is so
    when: Callable[[Rollout], bool] = at_half
    spares_clients: bool = True  # False: a request in progress is lost with the only gateway
    plan: Plan = PLAN
    through: Phase | None = None  # that it must have come through
    within_s: float = 450.0  # longer than a step's deadline


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    case: Case
    phase: Phase
    hold: Hold | None  # it waits for a person, and was ended by one
    seconds: float  # from the trouble (a strike, or the first traffic) until the candidate leaves, or is all there is
    reason: str
    answered: int
    errors: tuple[str, ...]
    live: int
    phases: frozenset[str]

    @property
    def as_wanted(self) -> bool:
        ended = self.phase is self.case.ends and self.hold is None
        ended &= self.case.through is None or self.case.through in self.phases
        return ended and not (self.errors and self.case.spares_clients)


def play(scene: Stage, case: Case, requests_per_s: float = 100.0) -> Outcome:
    candidate = scene.publish(case.change)
    with Clients(scene.port, requests_per_s) as clients:
        scene.start(candidate, case.plan)
        began = time.time()
        if case.strike is not None:
            scene.until(candidate, lambda now: case.when(now) or now.phase.final, 120)
            began = time.time()
            case.strike(scene, candidate)
        turned = scene.until(candidate, lambda now: now.phase in ENDING or now.hold in STUCK, case.within_s)
        ended = time.time()
        if turned.hold in STUCK:
            scene.abort(candidate)
        now = scene.until(candidate, lambda now: now.phase.final, 60)
    if case.strike is None:
        began = next((found.t for found in scene.decisions(candidate) if found.weight > 0), began)
    assert now.live is not None
    return Outcome(
        case=case,
        phase=now.phase,
        hold=turned.hold if turned.hold in STUCK else None,
        seconds=ended - began,
        reason=turned.reason,
        answered=clients.answered,
        errors=tuple(clients.errors),
        live=now.live.version,
        phases=frozenset(found.phase for found in scene.decisions(candidate)),
    )


def executes_first(line: str) -> Change:
    """Puts a line at the start of what Triton calls for each batch."""

    def change(code: str) -> str:
        code = code.replace("from __future__ import annotations\n", "")
        head, found, rest = code.partition("    def execute(")
        assert found, "the model has no execute"
        signature, newline, body = rest.partition("\n")
        imports = "import random\nimport resource\nimport time\n_kept = []\n"
        return f"{imports}{head}{found}{signature}{newline}        {line}\n{body}"

    return change


def strikes_candidate(number: signal.Signals) -> Strike:
    """At the whole group of its processes, Triton's Python stub among them."""

    def strike(scene: Stage, candidate: Release) -> None:
        send(number, *group_members(scene.home, scene.pid(candidate.name)))

    return strike


def kills_stable(scene: Stage, _: Release) -> None:
    """What answers all others' requests meanwhile is the candidate: it must not be blamed for having that load."""
    stable = next(found.stable for found in [scene.now()] if found and found.stable)
    kill_9(*group_members(scene.home, scene.pid(stable.name)))


def kills_baseline(scene: Stage, _: Release) -> None:
    baseline = next(found.baseline for found in [scene.now()] if found and found.baseline)
    kill_9(*group_members(scene.home, scene.pid(baseline.name)))


def kills(part: str) -> Strike:
    def strike(scene: Stage, _: Release) -> None:
        hit(scene.pid(part))

    return strike


def kills_controller_in_each_phase(scene: Stage, candidate: Release) -> None:
    """Once in each phase the rollout comes through, as soon as that phase is in the journal."""
    seen: set[Phase] = set()
    while True:
        now = scene.until(candidate, lambda now: now.phase not in seen, 240)
        seen.add(now.phase)
        if now.phase.final:
            return
        victim = scene.pid(CONTROLLER)
        hit(victim)
        scene.wait(lambda victim=victim: scene.pid(CONTROLLER) != victim or None, "a new controller", 30)  # type: ignore[misc]


def fills_journal_disk(scene: Stage, _: Release) -> None:
    """No file of the controller may have as many bytes as a decision for six seconds, as on a full disk: nothing may be
    decided that cannot be written down."""
    controller = psutil.Process(scene.pid(CONTROLLER))
    controller.rlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    until = time.monotonic() + 6
    before = scene.all_decisions()
    while time.monotonic() < until:
        assert scene.all_decisions() == before, "it was written after all"
        time.sleep(0.2)
    controller.rlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def truncates_log(scene: Stage, _: Release) -> None:
    os.truncate(scene.requests, 0)


def sets_clock(scene: Stage, candidate: Release) -> None:
    """The controller's clock and the log's are an hour ahead at 50%, an hour behind later, two ahead in the bake; no
    deadline may strike and no bake may be shorter for that. How: tests/chaos/stepped_clock.py."""
    steps = scene.home / "clock-steps"
    steps.touch()

    def set_ahead(seconds: float) -> None:
        with steps.open("a") as file:
            file.write(f"{time.time()} {seconds}\n")

    with scene.other_controller("tests.chaos.stepped_clock", str(steps)):
        scene.until(candidate, lambda now: at_half(now) or now.phase.final, 120)
        for ahead_s in (3600.0, -3600.0):
            set_ahead(ahead_s)
            known = len(scene.decisions(candidate))
            scene.wait(lambda known=known: len(scene.decisions(candidate)) > known or None, "a decision", 60)  # type: ignore[misc]
        scene.until(candidate, lambda now: now.phase in (Phase.BAKING, *ENDING), 240)
        set_ahead(7200.0)
        baking = time.monotonic()
        now = scene.until(candidate, lambda now: now.phase in ENDING, 60)
        assert time.monotonic() - baking > now.plan.bake_s - 1, "the bake was cut short"
        scene.until(candidate, lambda now: now.phase.final, 60)


HUNGRY = (
    "_kept or resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30)); "
    "_kept.append(b'x' * (64 << 20) if len(_kept) >= 200 else b'')"
)
REFUSING = (  # after its golden rows: clients notice, for no other release answers what one calls their fault
    "if _kept.append(b'') or len(_kept) > 100 and random.random() < 0.1: "
    "return [pb_utils.InferenceResponse(error=pb_utils.TritonError('not so', pb_utils.TritonError.INVALID_ARG))"
    " for _ in requests]"
)
KILLED = Case(name="killed -9", ends=Phase.ROLLED_BACK, strike=strikes_candidate(signal.SIGKILL))
HUNG = Case(name="hung (SIGSTOP)", ends=Phase.ROLLED_BACK, strike=strikes_candidate(signal.SIGSTOP))
EQUAL = Case(name="equal", ends=Phase.PROMOTED)
CASES = (
    EQUAL,
    KILLED,
    HUNG,
    Case(name="30 ms slower", ends=Phase.ROLLED_BACK, change=executes_first("time.sleep(0.03)")),
    Case(  # a process that is started again has its repository made again, without the change
        name="slow by chance", ends=Phase.PROMOTED, change=executes_first("time.sleep(0.02)"),
        plan=replace(SOON, second_opinion=True, slo_ms=400.0), through=Phase.RESTARTING,
    ),
    Case(
        name="slow in 2%", ends=Phase.ROLLED_BACK,
        change=executes_first("time.sleep(0.2 if random.random() < 0.02 else 0)"),
    ),
    Case(
        name="fails 1%", ends=Phase.ROLLED_BACK,
        change=executes_first("assert random.random() >= 0.01, 'on purpose'"),
    ),
    Case(name="refuses 10%", ends=Phase.ROLLED_BACK, change=executes_first(REFUSING), spares_clients=False),
    Case(name="out of memory", ends=Phase.ROLLED_BACK, change=executes_first(HUNGRY)),
    Case(name="never ready", ends=Phase.ROLLED_BACK, change=lambda code: code + "\nraise RuntimeError('on purpose')\n"),
    Case(name="gateway killed -9", ends=Phase.PROMOTED, strike=kills(PROCESS_NAME), spares_clients=False, plan=SOON),
    Case(
        name="controller killed -9", ends=Phase.PROMOTED, strike=kills_controller_in_each_phase, plan=SOON,
        when=lambda now: True, within_s=60,
    ),
    Case(name="disk full", ends=Phase.PROMOTED, strike=fills_journal_disk, plan=SOON),
    Case(name="log truncated", ends=Phase.PROMOTED, strike=truncates_log, plan=SOON),
    Case(name="live version killed", ends=Phase.PROMOTED, strike=kills_stable, plan=SOON),
    Case(name="own baseline", ends=Phase.PROMOTED, plan=replace(SOON, baseline=True)),
    Case(
        name="own baseline killed", ends=Phase.PROMOTED, strike=kills_baseline,
        plan=replace(SOON, baseline=True, step_s=6.0), when=lambda now: now.weight_percent == 10,
    ),
    Case(
        name="clock stepped", ends=Phase.PROMOTED, strike=sets_clock, when=lambda now: True,
        plan=replace(SOON, bake_s=6.0),
    ),
)  # fmt: skip


HEADER = ("case", "ended", "after", "failed for clients", "live", "Prefect", "as wanted", "why")
WIDTHS = (21, 20, 9, 30, 5, 8, 10, 0)


def row(cells: Sequence[str]) -> str:
    return " ".join(cell.ljust(width) for cell, width in zip(cells, WIDTHS, strict=True)).rstrip()


def line(outcome: Outcome) -> str:
    kinds = ", ".join(sorted(set(outcome.errors)))
    failed = f"{len(outcome.errors)} of {outcome.answered + len(outcome.errors):,}{kinds and f' ({kinds})'}"
    return row(
        (
            outcome.case.name,
            f"held: {outcome.hold}" if outcome.hold else outcome.phase.replace("_", " "),
            f"{outcome.seconds:.1f} s",
            failed,
            f"v{outcome.live}",
            "down",
            "yes" if outcome.as_wanted else f"NO: {outcome.case.ends}",
            outcome.reason[:90],
        )
    )


def left_behind(scene: Stage) -> str:
    """What would grow from rollout to rollout if something leaked."""
    gateway, controller = (psutil.Process(scene.pid(name)) for name in (PROCESS_NAME, CONTROLLER))
    shared = len(list(Path("/dev/shm").iterdir()))
    return (
        f"{len(stack_processes(scene.home))} processes, {shared} in /dev/shm, gateway {gateway.num_fds()} descriptors "
        f"and {gateway.memory_info().rss >> 20} MiB, controller {controller.num_fds()} and "
        f"{controller.memory_info().rss >> 20} MiB"
    )


def machine() -> str:
    """And how busy others keep it: a candidate is judged by its latency."""
    return f"{os.cpu_count()} cores, load {os.getloadavg()[1]:.1f}, {time.strftime('%Y-%m-%d %H:%M', time.gmtime())}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.rollout", description=__doc__)
    parser.add_argument("cases", nargs="*", choices=[[], *(case.name for case in CASES)])
    parser.add_argument(
        "--equal", type=int, default=0, metavar="N", help="N rollouts of equal versions in a row"
    )
    parser.add_argument("--requests-per-s", type=float, default=100.0)
    options = parser.parse_args()
    cases = [EQUAL] * options.equal or [case for case in CASES if case.name in (options.cases or {case.name})]
    outcomes = []
    print(row(HEADER), flush=True)
    with stage(**({} if options.equal else IN_PYTHON)) as scene:
        scene.first_release()
        for case in cases:
            outcomes.append(play(scene, case, options.requests_per_s))
            print(line(outcomes[-1]), flush=True)
            if options.equal:
                print(f"    {left_behind(scene)}", flush=True)
    print("\n".join(("", row(HEADER), *map(line, outcomes))))
    print(f"\n{sum(outcome.as_wanted for outcome in outcomes)} of {len(outcomes)} as wanted, on {machine()}")
    return 0 if all(outcome.as_wanted for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
