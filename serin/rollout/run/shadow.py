"""Judges candidates by recorded requests, which processes beside the controller send to them.

What was seen is in the rollout's evidence, and so in the journal, with the place in the records: after a crash the
replay continues from there, and nothing counts twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from serin.errors import RolloutRefused
from serin.rollout.decide.shadow import Batch, Tally, add_batch, judge_shadow
from serin.rollout.decide.state import SHADOW, Hold, Rollout, Verdict
from serin.rollout.decide.verdict import Judgement
from serin.rollout.run.ports import Replay, Replayer
from serin.rollout.run.verification import FOREIGN

_AGAIN_S: Final = (1.0, 2.0, 4.0, 8.0, 16.0)
_QUIET: Final = (Hold.PAUSED, Hold.FAILED, Hold.INCONCLUSIVE, Hold.INVALID, Hold.APPROVAL)


@dataclass(slots=True)
class _Run:
    """A model's replay. `place`: the last one that was taken from it; `failures`: since the last batch."""

    rollout: str
    place: Mapping[str, Any]
    replay: Replay | None = None
    failures: int = 0
    trouble: str = ""
    again_at: float = 0.0


class Shadows:
    """At most one replay per model. It stops while a person is asked, and when the rollout has left the phase."""

    def __init__(self, replayer: Replayer | None) -> None:
        self._replayer = replayer
        self._runs: dict[str, _Run] = {}

    def check(self, now: Rollout) -> None:
        """Raises RolloutRefused for a rollout that needs recorded requests which cannot be had."""
        if now.plan.shadow is None or now.stable is None:  # a first release has nothing to replay
            return
        if self._replayer is None:
            reason = "no requests are recorded here; leave shadow out of rollout.steps"
            raise RolloutRefused(model=now.model, command="start", reason=reason)
        self._replayer.check(now)

    def judge(self, now: Rollout, t: float) -> Judgement:
        """Returns the judgement at time `t` on a rollout that is shadowing; never waits."""
        tally = Tally.from_json(now.evidence.get(SHADOW, {}))
        if now.hold in _QUIET or tally.unable:
            self.stop(now.model)
        else:
            tally = self._take(now, tally, t)
        verdict, reason = judge_shadow(now.plan, tally, elapsed_s=max(t - now.since, 0.0))
        run = self._runs.get(now.model)
        if run and run.trouble and verdict in (Verdict.WAIT, Verdict.INCONCLUSIVE):
            reason = f"{reason}; {run.trouble}"
        return Judgement(verdict=verdict, reason=reason, evidence={SHADOW: tally.to_json()})

    def stop(self, model: str) -> None:
        run = self._runs.pop(model, None)
        if run and run.replay:
            run.replay.stop()

    def close(self) -> None:
        for model in list(self._runs):
            self.stop(model)

    def _take(self, now: Rollout, tally: Tally, t: float) -> Tally:
        run = self._runs.get(now.model)
        if run is None or run.rollout != now.id or dict(run.place) != dict(tally.place):
            # Another rollout, or a decision that was not recorded, or one to begin again.
            self.stop(now.model)
            run = self._runs[now.model] = _Run(rollout=now.id, place=tally.place)
        try:
            reports = self._reports(run, now, t)
        except FOREIGN as error:
            run.replay, run.again_at = None, t + _AGAIN_S[min(run.failures, len(_AGAIN_S) - 1)]
            run.failures, run.trouble = run.failures + 1, str(error)
            return tally
        for report in reports:
            tally = _add(tally, report, now)
            run.failures, run.trouble = 0, ""
        run.place = tally.place
        return tally

    def _reports(self, run: _Run, now: Rollout, t: float) -> Sequence[Mapping[str, Any]]:
        if run.replay is None:
            if t < run.again_at:
                return ()
            assert self._replayer is not None, "such a rollout was refused"
            run.replay = self._replayer.start(now, run.place)
        return run.replay.take()


def _add(tally: Tally, report: Mapping[str, Any], now: Rollout) -> Tally:
    if "unable" in report:
        return replace(tally, unable=str(report["unable"]))
    if "waiting" in report:
        return replace(tally, waiting=str(report["waiting"]))
    return add_batch(tally, Batch.from_json(report), now.plan)
