"""The judge that reads the gateway's request log. All it remembers is in the evidence, and so in the journal."""

from __future__ import annotations

from pathlib import Path

from serin.formats.request_log import Offset, find_offset, read_requests
from serin.rollout.evidence import Evidence, fold
from serin.rollout.state import Phase, Rollout
from serin.rollout.verdict import Judgement, Verdict, judge_bake, judge_step


class LogJudge:
    def __init__(self, log: Path) -> None:
        self._log = log

    def judge(self, rollout: Rollout, t: float) -> Judgement:
        """What the log says at time `t` about a rollout that is shifting or baking."""
        try:
            evidence, offset, bad_lines = self._read(rollout)
        except OSError as error:
            reason = f"the request log cannot be read: {error}"
            return Judgement(verdict=Verdict.INCIDENT, reason=reason, evidence=rollout.evidence)
        rule = judge_bake if rollout.phase is Phase.BAKING else judge_step
        verdict, reason = rule(rollout.plan, evidence, elapsed_s=max(t - rollout.since, 0.0))
        memory = {"counts": evidence.to_json(), "offset": offset.to_json(), "bad_lines": bad_lines}
        return Judgement(verdict=verdict, reason=reason, evidence=memory)

    def _read(self, rollout: Rollout) -> tuple[Evidence, Offset, int]:
        memory = rollout.evidence
        evidence = Evidence.from_json(memory["counts"] if memory else {})
        place = (
            Offset.from_json(memory["offset"]) if memory else find_offset(self._log, rollout.evidence_from)
        )
        bad_lines: int = memory["bad_lines"] if memory else 0
        more = True
        while more:
            batch = read_requests(self._log, place)
            evidence = fold(
                evidence,
                batch.requests,
                epoch=rollout.epoch,
                candidate=rollout.candidate.name,
                stable=rollout.stable.name if rollout.stable else "",
                since=rollout.evidence_from,
            )
            place, more = batch.offset, batch.more
            bad_lines += batch.bad_lines
        return evidence, place, bad_lines
