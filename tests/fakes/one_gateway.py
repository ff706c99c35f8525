"""Ports of a controller in a test that has one gateway and no agent: routes are applied and the log is read at once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path

from serin.cluster.version_settings import model_timeouts
from serin.errors import ReleaseNotReady
from serin.formats.serving.request_log import Offset, find_offset, read_requests
from serin.rollout.decide.evidence import Evidence, fold
from serin.rollout.decide.state import Rollout, Verdict
from serin.rollout.decide.verdict import Judgement
from serin.rollout.run.judge import Quality, arm_of, judge_evidence
from serin.rollout.run.ports import Fleet
from serin.serving.envoy.gateway import Gateway
from serin.serving.envoy.routes import Timeouts
from serin.store.artifacts import Endpoint, ModelRoute, Release


class GatewayRouter:
    """The gateway as a rollout sees it: each route with the addresses and timeouts of its releases."""

    def __init__(self, gateway: Gateway, fleet: Fleet, timeouts: Callable[[Release], Timeouts]) -> None:
        self._gateway, self._fleet, self._timeouts = gateway, fleet, timeouts

    def apply(self, routes: Sequence[ModelRoute]) -> None:
        endpoints: dict[str, Endpoint] = {}
        for release in {release for route in routes for release in route.releases}:
            endpoints[release.name] = self._fleet.endpoint(release)
        for release in self._fleet.running():
            with contextlib.suppress(ReleaseNotReady):  # it is being started or stopped
                endpoints[release.name] = self._fleet.endpoint(release)
        running = list(map(Release.parse, endpoints))
        timeouts = {
            route.model: model_timeouts(
                self._timeouts,
                [*route.releases, *(release for release in running if release.model == route.model)],
            )
            for route in routes
            if route.releases
        }
        self._gateway.apply(routes, endpoints, timeouts)

    def active_requests(self, release: Release) -> int:
        return self._gateway.active_requests(release) + self._gateway.arriving_requests()


class LogJudge:
    """Judges a rollout by the request log, and by the labels of the candidate's answers where it has a quality
    objective. `log_clock` is the clock of the times in the log; None: the rollout's own."""

    def __init__(
        self, log: Path, log_clock: Callable[[], float] | None = None, quality: Quality | None = None
    ) -> None:
        self._log, self._log_clock, self._quality = log, log_clock, quality

    def judge(self, rollout: Rollout, t: float) -> Judgement:
        """Returns the judgement at time `t` on a rollout that is shifting or baking."""
        try:
            evidence, offset, bad_lines = self._read(rollout, t)
        except OSError as error:
            reason = f"the request log cannot be read: {error}"
            return Judgement(verdict=Verdict.INCIDENT, reason=reason, evidence=rollout.evidence)
        memory = {"offset": offset.to_json(), "bad_lines": bad_lines}
        return judge_evidence(rollout, evidence, t, quality=self._quality, memory=memory)

    def _read(self, rollout: Rollout, t: float) -> tuple[Evidence, Offset, int]:
        memory = rollout.evidence
        evidence = Evidence.from_json(memory.get("guards", {}))
        begun = "offset" in memory
        place = Offset.from_json(memory["offset"]) if begun else find_offset(self._log, rollout.evidence_from)
        bad_lines: int = memory.get("bad_lines", 0)
        more = True
        while more:
            batch = read_requests(self._log, place)
            place, more = batch.offset, batch.more
            bad_lines += batch.bad_lines
            now = None if more else self._log_clock() if self._log_clock else t
            evidence = fold(evidence, batch.requests, arm=arm_of(rollout), plan=rollout.plan, now=now)
        return evidence, place, bad_lines
