"""Rollouts: the list of all, and one with its traffic, evidence, latencies and decisions."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from serin.cluster.judge import JudgeOfNow
from serin.console.views.models import model_tab
from serin.console.views.view import Parameters, meter, stretched
from serin.evidence.histogram import bands_us, latency_name, quantiles_us
from serin.formats.serving.journal import Decision
from serin.reports.charts import Drawing, Scale
from serin.reports.rollout_page import (
    EvidencePoint,
    RolloutStory,
    evidence_drawing,
    latency_drawing,
    proof_drawing,
)
from serin.rollout.decide.evidence import Evidence
from serin.rollout.decide.plan import Plan
from serin.rollout.decide.sentences import doubt, not_proven
from serin.rollout.decide.state import Phase, Rollout
from serin.rollout.run.access import find_cluster, find_rollouts
from serin.rollout.run.record import decision2rollout
from serin.rollout.run.status import ModelStatus, problems, statuses
from serin.rollout.run.story import point, tell
from serin.spec.roles import Access

_MOST_DECISIONS = 60
_MOST_POINTS = 240  # of a chart over time


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardRow:
    """The evidence of one guard."""

    name: str
    e_value: float
    threshold: float
    proof: bool = False

    @property
    def share(self) -> float:
        """How far it is to the threshold, on a logarithmic scale."""
        return min(max(math.log(max(self.e_value, 1e-300)) / math.log(self.threshold), 0.0), 1.0)

    @property
    def bar(self) -> str:
        return meter(self.share, "good" if self.proof else "alarm", "of the way to the threshold")


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmRow:
    name: str
    requests: int
    errors: int
    refused: int
    quantiles: tuple[tuple[str, float | None, float, float], ...]  # name, value and band in ms


def read_rollouts(home: Path, parameters: Parameters, access: Access) -> dict[str, Any]:
    del parameters
    found = [each for each in statuses(find_rollouts(home)) if access.sees(each.name)]
    running = [state for state in found if state.rollout.running]
    ended = sorted((state for state in found if not state.rollout.running), key=lambda s: -s.rollout.decided)
    bars = {state.name: traffic_bar(state) for state in running}
    known = problems(home) if find_cluster(home) is None else {}
    known = {name: text for name, text in known.items() if access.sees(name)}
    return {"running": running, "ended": ended, "bars": bars, "problems": known}


def read_rollout(home: Path, parameters: Parameters, access: Access) -> dict[str, Any]:
    del access
    model = parameters["model"]
    shown = {**model_tab(home, model, "rollout"), "story": None}
    state: ModelStatus | None = shown["state"]
    if state is None:
        return shown
    decisions = _decisions(home, model, state.rollout.id)
    if not decisions:
        return shown
    now, evidence, reason = _latest(home, decisions)
    story = _up_to_now(tell(thinned(decisions)), now, evidence)
    seen = point(now, evidence, time.time()) if evidence.blocks else None
    return {
        **shown,
        "story": story,
        "reason": reason,
        "now": now,
        "bar": traffic_bar(state),
        "guards": _guards(now.plan, seen) if seen else [],
        "words": _words(now, evidence, seen, reason) if seen else [],
        "acts": [each for each in decisions if each.command not in (None, each.rollout)],
        "arms": _arms(now, evidence) if evidence.blocks else [],
        "evidence": _embedded(evidence_drawing(story), "Evidence against the candidate over time"),
        "proof": _embedded(proof_drawing(story), "Evidence that the candidate is not slower, over time"),
        "latency": _embedded(latency_drawing(story), "Latency distributions of both arms"),
        "decisions": list(reversed(story.decisions[-_MOST_DECISIONS:])),
        "earlier": _earlier(home, model, state.rollout.id),
    }


def _up_to_now(story: RolloutStory, now: Rollout, evidence: Evidence) -> RolloutStory:
    """Adds what the request log shows since the journal's last line. One point alone is not drawn."""
    if evidence.blocks and not now.phase.final:
        latest = point(now, evidence, time.time())
        seen = (evidence.seen[0], evidence.seen[1])
        story = replace(story, points=(*story.points, latest), latencies=seen)
    return story if len(story.points) > 1 else replace(story, points=())


def thinned(decisions: list[Decision]) -> list[Decision]:
    """Returns few enough decisions for a chart: those that look like their neighbours are left out."""
    if len(decisions) <= _MOST_POINTS:
        return decisions
    every = len(decisions) // _MOST_POINTS + 1
    kept, before = [], None
    for index, decision in enumerate(decisions):
        looks = (decision.phase, decision.weight, decision.verdict, decision.state.get("hold"))
        if index % every == 0 or looks != before or decision.command or index == len(decisions) - 1:
            kept.append(decision)
        before = looks
    return kept


_READERS: dict[tuple[Path, str], tuple[str, Callable[[], list[Decision]]]] = {}
_LOCK = threading.Lock()


def _decisions(home: Path, model: str, rollout: str) -> list[Decision]:
    """Returns the decisions of a rollout; a reader for each model reads only what is new."""
    with _LOCK:
        known, read = _READERS.get((home, model), ("", None))
        if read is None or known != rollout:
            read = find_rollouts(home).reader(model, rollout)
            _READERS[home, model] = rollout, read
        return read()


def _latest(home: Path, decisions: list[Decision]) -> tuple[Rollout, Evidence, str]:
    """Returns the rollout, its evidence up to now as the controller will find it, and the reason for its state."""
    now = decision2rollout(decisions[-1])
    if now.phase in (Phase.SHIFTING, Phase.BAKING):
        found = JudgeOfNow(find_rollouts(home).objects).judge(now, time.time())
        reason = now.reason if now.hold else found.reason
        return now, Evidence.from_json(found.evidence.get("guards", {})), reason
    last = next((each.evidence for each in reversed(decisions) if each.evidence.get("guards")), {})
    return now, Evidence.from_json(last.get("guards", {})), now.reason


def _guards(plan: Plan, seen: EvidencePoint) -> list[GuardRow]:
    against = {"all together": seen.total, **seen.e_values}
    rows = [GuardRow(name=name, e_value=e, threshold=plan.rollback_at) for name, e in against.items()]
    return rows + [
        GuardRow(name=name, e_value=e, threshold=plan.promote_at, proof=True)
        for name, e in seen.proofs.items()
    ]


def _words(now: Rollout, evidence: Evidence, seen: EvidencePoint, reason: str) -> list[str]:
    """Returns what the evidence says: against the candidate, and, while the rollout runs, what is missing for it,
    unless `reason` says it at the top of the page."""
    strongest = max(seen.e_values, key=lambda name: seen.e_values[name], default="")
    found = [doubt(now.plan, strongest, seen.total)]
    if not now.phase.final and (missing := not_proven(now.plan, evidence)) not in ("", reason):
        found.append(missing)
    return [f"{text[:1].upper()}{text[1:]}." for text in found]


def _arms(now: Rollout, evidence: Evidence) -> list[ArmRow]:
    rows = []
    for name, counts, row in (
        (now.candidate.name, evidence.candidate, evidence.seen[1]),
        (now.stable.name if now.stable else "nothing", evidence.stable, evidence.seen[0]),
    ):
        found = zip(
            now.plan.quantiles,
            quantiles_us(row, now.plan.quantiles),
            bands_us(row, now.plan.quantiles),
            strict=True,
        )
        quantiles = tuple(
            (latency_name(q), None if us is None else us / 1000, low / 1000, high / 1000)
            for q, us, (low, high) in found
        )
        rows.append(
            ArmRow(
                name=name,
                requests=counts.requests,
                errors=counts.errors,
                refused=counts.refused,
                quantiles=quantiles,
            )
        )
    return rows


def traffic_bar(state: ModelStatus) -> str:
    """Draws the share of each release as one bar."""
    colours = {"stable": "blue", "baseline": "pale", "candidate": "orange"}
    drawing, x = Drawing(600, 26), Scale(0.0, 100.0, 0.0, 600.0)
    drawing.rect(0, 4, 600, 18, "soft")
    left, words = 0.0, []
    order = sorted(state.releases, key=lambda release: release.arm != "candidate")
    for release in order:
        width = x(left + release.weight_percent) - x(left)
        drawing.rect(x(left), 4, width, 18, colours[release.arm])
        left += release.weight_percent
        words.append(f"version {release.label} ({release.arm}) {release.weight_percent:g}%")
    return stretched(drawing, f"Traffic: {', '.join(words) or 'none'}")


def _embedded(drawing: Drawing | None, label: str) -> str | None:
    return drawing.embedded(label) if drawing else None


def _earlier(home: Path, model: str, current: str) -> list[dict[str, Any]]:
    """Returns the rollouts before the current one, newest first."""
    ends: dict[str, Decision] = {}
    for decision in find_rollouts(home).decisions(model):
        ends[decision.rollout] = decision
    ends.pop(current, None)
    found = []
    for decision in reversed(ends.values()):
        now = decision2rollout(decision)
        row = {"label": now.candidate.label, "phase": now.phase.value, "t": decision.t}
        found.append({**row, "reason": now.reason})
    return found[:20]
