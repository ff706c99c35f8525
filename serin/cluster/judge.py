"""The judge of a rollout at several gateways: adds their blocks second by second, then compares the arms.

All of its state is in the evidence, and so in the journal: for each host the last object that was counted. After a
change of the leader, no second is judged twice and none is lost.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Final

from serin.cluster.desired import HOSTS
from serin.cluster.hosts import Hosts, load_foreign
from serin.evidence.e_process import Array
from serin.formats.cluster.evidence import HostEvidence, ModelEvidence, key_of
from serin.rollout.decide.blocks import Block, json2counts
from serin.rollout.decide.cutting import complete_at
from serin.rollout.decide.evidence import Evidence, fold_blocks
from serin.rollout.decide.state import Rollout, Verdict
from serin.rollout.decide.verdict import Judgement
from serin.rollout.run.judge import Quality, arm_of, judge_evidence
from serin.store.numbered import read_many
from serin.store.objects import Objects

_KEEP: Final = 1200  # objects of one host: twenty minutes
_BEHIND_S: Final = 15  # a gateway whose evidence is later than this does not delay the others any more


class EvidenceFeed:
    """The hosts' evidence, each object read once."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._known: dict[str, dict[int, HostEvidence | None]] = {}

    def between(self, host: str, after: int, last: int) -> Iterator[HostEvidence]:
        """Yields the objects above `after` up to `last` that are (still) there, in order."""
        known = self._known.setdefault(host, {})
        wanted = [seq for seq in range(after + 1, last + 1) if seq not in known]
        for seq, stored in zip(
            wanted, read_many(self._objects, [key_of(host, seq) for seq in wanted]), strict=True
        ):
            known[seq] = load_foreign(HostEvidence, stored.content, key_of(host, seq)) if stored else None
        for seq in sorted(known)[:-_KEEP]:
            del known[seq]
        yield from (found for seq in range(after + 1, last + 1) if (found := known.get(seq)))

    def forget(self, host: str) -> None:
        """Drops what is known of a host whose numbers have begun again."""
        self._known.pop(host, None)


@dataclass(slots=True)
class _Gathered:
    """New blocks of all gateways. `places`: by host, the last object and the second it was complete to. `courses`: by
    host, how far it had cut its log then."""

    places: dict[str, tuple[int, int]]
    courses: dict[str, Mapping[str, Any]]
    blocks: list[tuple[int, Block]] = field(default_factory=list)
    before: Array | None = None
    newest: float = 0.0
    bad_lines: int = 0

    def add(self, found: ModelEvidence) -> None:
        self.blocks += [(second, Block.from_json(block)) for second, block in found.blocks]
        if found.before is not None:
            earlier = json2counts(found.before)
            self.before = earlier if self.before is None else self.before + earlier
        self.newest = max(self.newest, found.newest)
        self.bad_lines += found.bad_lines


class ClusterJudge:
    """`wall`: the clock of the times in the gateways' logs."""

    def __init__(
        self,
        objects: Objects,
        hosts: Hosts,
        wall: Callable[[], float],
        quality: Quality | None = None,
    ) -> None:
        self._feed, self._hosts, self._wall, self._quality = EvidenceFeed(objects), hosts, wall, quality

    def judge(self, rollout: Rollout, t: float) -> Judgement:
        """Returns the judgement at time `t` on a rollout that is shifting or baking. Raises StoreUnreachable."""
        memory = rollout.evidence
        gathered = self._gather(rollout)
        due = complete_at(self._wall(), rollout.plan)
        held, trouble = self._delayed(gathered.places, due, begun_s=t - rollout.evidence_from)
        counted = [gathered.places[host][1] for host in self._hosts.reports if host not in held]
        evidence = Evidence.from_json(memory.get("guards", {}))
        evidence = fold_blocks(
            evidence,
            gathered.blocks,
            arm=arm_of(rollout),
            plan=rollout.plan,
            newest=gathered.newest,
            complete_to=min(counted, default=evidence.closed),
            before=gathered.before,
        )
        counts = {
            HOSTS: {
                host: [*place, gathered.courses.get(host, {})]
                for host, place in sorted(gathered.places.items())
            },
            "bad_lines": memory.get("bad_lines", 0) + gathered.bad_lines,
        }
        judgement = judge_evidence(rollout, evidence, t, quality=self._quality, memory=counts)
        if trouble and judgement.verdict is not Verdict.FAIL:
            return replace(judgement, verdict=Verdict.INCIDENT, reason=trouble)
        return judgement

    def _gather(self, rollout: Rollout) -> _Gathered:
        known: Mapping[str, Any] = rollout.evidence.get(HOSTS, {})
        gathered = _Gathered(
            places={host: (place[0], place[1]) for host, place in known.items()},
            courses={host: place[2] for host, place in known.items()},
        )
        for host, report in self._hosts.reports.items():
            newest = report.evidence_seq
            if host in gathered.places and gathered.places[host][0] > newest:
                self._feed.forget(host)  # its numbers have begun again: it lost its state
                del gathered.places[host]
            if host not in gathered.places:
                gathered.places[host] = (self._begin(rollout, host, newest), 0)
            for found in self._feed.between(host, gathered.places[host][0], newest):
                entry, complete_to = found.models.get(rollout.model), gathered.places[host][1]
                if entry is not None and entry.rollout == rollout.id:
                    complete_to = found.complete_to
                    gathered.courses[host] = entry.course
                    if _is_of(entry, rollout):
                        gathered.add(entry)
                gathered.places[host] = (found.seq, complete_to)
        return gathered

    def _begin(self, rollout: Rollout, host: str, newest: int) -> int:
        """Returns the number before a host's first object about this rollout."""
        seq = newest
        while seq > 0:
            found = next(self._feed.between(host, seq - 1, seq), None)
            if found is None or not _names(found, rollout):
                break
            seq -= 1
        return seq

    def _delayed(
        self, places: Mapping[str, tuple[int, int]], due: int, *, begun_s: float
    ) -> tuple[set[str], str]:
        """Returns the gateways that nobody waits for, and why the rollout is held for them; "": it is not."""
        if not self._hosts.reports:
            return set(), "no gateway reports; is `serin agent` running?"
        held, why = set(), []
        for host, seconds in self._hosts.silent.items():
            held.add(host)
            since = datetime.fromtimestamp(self._wall() - seconds, UTC)
            why.append(f"gateway {host} is silent since {since:%H:%M:%S} UTC")
        for host in self._hosts.reporting:
            complete_to = places[host][1]
            if not complete_to and begun_s > _BEHIND_S:
                held.add(host)
                why.append(f"gateway {host} sends no evidence")
            elif complete_to and due - complete_to > _BEHIND_S:
                held.add(host)
                why.append(f"the evidence of gateway {host} is {due - complete_to} s behind; check its clock")
            elif complete_to - due > _BEHIND_S:
                held.add(host)
                why.append(f"the clock of gateway {host} is {complete_to - due} s ahead of the controller's")
        advice = "; `serin hosts remove HOST` continues without it" if self._hosts.silent else ""
        return held, "; ".join(why) + (advice if why else "")


class JudgeOfNow:
    """Judges by what the hosts have reported by now, for views: it keeps nothing and changes nothing."""

    def __init__(self, objects: Objects) -> None:
        self._hosts = Hosts(objects, time.monotonic)
        self._judge = ClusterJudge(objects, self._hosts, time.time)

    def judge(self, rollout: Rollout, t: float) -> Judgement:
        self._hosts.refresh()
        return self._judge.judge(rollout, t)


def _is_of(found: ModelEvidence, rollout: Rollout) -> bool:
    return (found.rollout, found.since_epoch) == (rollout.id, rollout.evidence_epoch)


def _names(found: HostEvidence, rollout: Rollout) -> bool:
    entry = found.models.get(rollout.model)
    return entry is not None and _is_of(entry, rollout)
