"""Every sequence of events and commands, as far as they lead: equal states are followed once."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from serin.errors import RolloutRefused
from serin.rollout.decide.advance import Seen, advance
from serin.rollout.decide.plan import Mode, Plan, ShadowPlan
from serin.rollout.decide.state import CONTROLLER, Hold, Phase, Rollout, Verdict
from serin.rollout.decide.verdict import Judgement
from serin.rollout.run.apply_command import apply_command
from serin.rollout.run.commands import Command, Kind
from serin.store.artifacts import Release

V1, V2 = Release(model="flights", version=1), Release(model="flights", version=2)
PLAN = Plan(
    steps=(5.0, 50.0, 100.0), approve=(50.0,), drain_s=0.0, load_s=1e9, baseline=True, second_opinion=True
)  # fmt: skip
COMMANDS: tuple[Kind, ...] = ("pause", "resume", "approve", "promote", "abort", "rollback")
LENGTH = 6


@dataclass(frozen=True, slots=True)
class Event:
    name: str
    seen: Seen | None = None
    command: Kind | None = None

    def happen(self, now: Rollout) -> Rollout:
        t = now.since + 10.0
        if self.command is None:
            assert self.seen is not None
            return advance(now, self.seen, t)
        try:
            return apply_command(now, Command(kind=self.command, model="flights", by="ann"), t)
        except RolloutRefused:
            return now


def _seen(verdict: Verdict, **changes: Any) -> Seen:
    return Seen(verified=True, judgement=Judgement(verdict=verdict, reason="as judged"), **changes)


EVENTS = (
    *(Event(verdict.value, _seen(verdict)) for verdict in Verdict),
    Event(
        "slow by chance",
        Seen(judgement=Judgement(verdict=Verdict.FAIL, reason="as judged", latency_alone=True)),
    ),
    Event("absent", _seen(Verdict.PASS, candidate="absent")),
    Event("dead", _seen(Verdict.PASS, candidate="dead")),
    Event("hung", _seen(Verdict.PASS, candidate="starting", unready_s=9.0)),
    Event("not routed", _seen(Verdict.PASS, routed=False)),
    Event("stable gone", _seen(Verdict.PASS, stable_ready=False)),
    Event("control gone", _seen(Verdict.PASS, baseline="dead")),
    Event("control gone, fail", _seen(Verdict.FAIL, baseline="dead")),
    Event("unverified", replace(_seen(Verdict.WAIT), verified=False)),
    *(Event(command, command=command) for command in COMMANDS),
)


def key(now: Rollout) -> tuple[object, ...]:
    """All that decides how a rollout goes on, without its times."""
    return (now.phase, now.step, now.hold, now.approved, now.verdict, now.plan, now.restarted)


def first(mode: Mode) -> Rollout:
    return Rollout(
        id="r1",
        candidate=V2,
        stable=V1,
        previous=None,
        plan=replace(PLAN, mode=mode, shadow=None if mode == "hold" else ShadowPlan()),
        began=0.0,
        since=0.0,
        evidence_from=0.0,
    )


def transitions(mode: Mode) -> Iterator[tuple[Rollout, Event, Rollout]]:
    """Every move from every state that any sequence of events leads to, however long."""
    states, new = {key(first(mode)): first(mode)}, [first(mode)]
    while new:
        found = []
        for now in new:
            for event in EVENTS:
                then = event.happen(now)
                yield now, event, then
                if key(then) not in states:
                    states[key(then)] = then
                    found.append(then)
        new = found


def states(mode: Mode) -> list[Rollout]:
    return list({key(then): then for _, _, then in transitions(mode)}.values())


MODES: tuple[Mode, ...] = ("enforce", "hold", "observe")


@pytest.mark.parametrize("mode", MODES)
def test_no_sequence_gives_traffic_without_the_evidence_or_a_person_s_word(mode: Mode) -> None:
    for now, event, then in transitions(mode):
        if then.weight_percent <= now.weight_percent or then.phase is Phase.PROMOTED:
            continue
        if event.command is not None:
            assert event.command == "promote", (now, event)
            continue
        assert now.hold is None or now.hold.ends_by_itself, (now, event)
        if now.phase is Phase.VERIFYING:
            assert event.seen.verified
            assert now.plan.shadow is None or now.step is not None, (
                "it had recorded requests before a restart"
            )
            continue
        judged = ("pass",) if now.baseline_percent else ("pass", "control gone")
        assert event.name in judged, (now, event)
        assert then.by == CONTROLLER
        following = 0 if now.phase is Phase.SHADOWING else (now.step or 0) + 1
        assert now.plan.steps[following] not in now.plan.approve or now.approved == following


@pytest.mark.parametrize("mode", MODES)
def test_no_sequence_promotes_but_through_the_bake_and_the_drain(mode: Mode) -> None:
    for now, event, then in transitions(mode):
        if then.phase is Phase.PROMOTED and now.phase is not Phase.PROMOTED:
            assert now.phase is Phase.DRAINING
        if then.phase is Phase.DRAINING and now.phase is not Phase.DRAINING:
            assert now.phase is Phase.BAKING
            judged = event.seen.judgement if event.seen else None
            assert event.command == "promote" or (judged and judged.verdict is Verdict.PASS)


@pytest.mark.parametrize("mode", MODES)
def test_no_sequence_is_stuck(mode: Mode) -> None:
    """A person can always end it; evidence and a person's word can always bring it to an end that is good."""
    for now in states(mode):
        assert _ends(now, "abort") in (Phase.ROLLED_BACK, Phase.PROMOTED)
        wanted = Phase.ROLLED_BACK if now.phase in (Phase.ABORTING, Phase.ROLLED_BACK) else Phase.PROMOTED
        if mode != "observe":
            assert _ends(now) is wanted
        assert _ends(now, "promote") is wanted


def _ends(now: Rollout, *commands: Kind) -> Phase:
    for command in ("resume", *commands):
        now = Event(command, command=command).happen(now)
    for _ in range(4 * LENGTH):
        if now.hold is Hold.APPROVAL:
            now = Event("approve", command="approve").happen(now)
        stopped = "absent" if now.phase is Phase.RESTARTING else "ready"
        now = Event("pass", _seen(Verdict.PASS, candidate=stopped)).happen(now)
        if commands and now.phase is Phase.BAKING and commands[0] == "promote":
            now = Event("promote", command="promote").happen(now)
    return now.phase


@pytest.mark.parametrize("mode", MODES)
def test_a_dead_candidate_has_no_traffic_after_any_sequence(mode: Mode) -> None:
    dead = next(event for event in EVENTS if event.name == "dead")
    for now in states(mode):
        if now.phase in (Phase.SHADOWING, Phase.SHIFTING, Phase.BAKING, Phase.DRAINING):
            assert dead.happen(now).phase is Phase.ABORTING


@pytest.mark.parametrize("mode", MODES)
def test_a_candidate_is_started_again_at_most_once_and_only_for_latency(mode: Mode) -> None:
    for now, event, then in transitions(mode):
        if then.restarted and not now.restarted:
            assert (event.name, now.phase, then.phase) == (
                "slow by chance",
                Phase.SHIFTING,
                Phase.WITHDRAWING,
            )
        if then.phase is Phase.WITHDRAWING and now.phase is not Phase.WITHDRAWING:
            assert not now.restarted
        assert then.restarted or not now.restarted or then.id != now.id
        if then.phase in (Phase.WITHDRAWING, Phase.RESTARTING):
            assert then.weight_percent == 0
