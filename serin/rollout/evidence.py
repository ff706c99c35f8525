"""What is known about a rollout's arms: counts, folded from the request log line by line. Pure.

The counts begin anew with each weight epoch; a line that arrives late still counts, unless its request is older than
`since`. Pinned requests are no evidence: nobody drew lots for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Self

from serin.formats.request import Request

RECENT_S: Final = 30


@dataclass(frozen=True, slots=True)
class Counts:
    requests: int = 0
    errors: int = 0

    @property
    def error_share(self) -> float:
        return self.errors / self.requests if self.requests else 0.0

    def and_one(self, *, failed: bool) -> Counts:
        return Counts(self.requests + 1, self.errors + failed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    epoch: int = 0
    candidate: Counts = Counts()
    stable: Counts = Counts()
    blocks: Mapping[int, Counts] | None = None  # stable's last seconds, by second of arrival

    @property
    def stable_recent(self) -> Counts:
        blocks = (self.blocks or {}).values()
        return Counts(sum(block.requests for block in blocks), sum(block.errors for block in blocks))

    def to_json(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "candidate": [self.candidate.requests, self.candidate.errors],
            "stable": [self.stable.requests, self.stable.errors],
            "blocks": [[second, c.requests, c.errors] for second, c in sorted((self.blocks or {}).items())],
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """An empty object is evidence of nothing yet."""
        if not value:
            return cls()
        return cls(
            epoch=value["epoch"],
            candidate=Counts(*value["candidate"]),
            stable=Counts(*value["stable"]),
            blocks={second: Counts(requests, errors) for second, requests, errors in value["blocks"]},
        )


def fold(
    evidence: Evidence, requests: Iterable[Request], *, epoch: int, candidate: str, stable: str, since: float
) -> Evidence:
    """`evidence` with `requests` added. `candidate` and `stable` are the names of the arms' releases."""
    if evidence.epoch != epoch:
        evidence = replace(evidence, epoch=epoch, candidate=Counts(), stable=Counts())
    counts = {"candidate": evidence.candidate, "stable": evidence.stable}
    arms = {("candidate", candidate), ("stable", stable)}
    blocks = dict(evidence.blocks or {})
    for request in requests:
        if request.t < since or (request.arm, request.release) not in arms:
            continue
        failed = request.failed
        counts[request.arm] = counts[request.arm].and_one(failed=failed)
        if request.arm == "stable":
            second = int(request.t)
            blocks[second] = blocks.get(second, Counts()).and_one(failed=failed)
    newest = max(blocks, default=0)
    return Evidence(
        epoch=epoch,
        candidate=counts["candidate"],
        stable=counts["stable"],
        blocks={second: block for second, block in blocks.items() if second > newest - RECENT_S},
    )
