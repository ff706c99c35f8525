"""What the controller tells a replay process: one line of JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, Self


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """`live` and `candidate` are names of releases, `place` is where the replay continues."""

    home: str
    parent: int
    live: str
    candidate: str
    address: str  # of the candidate's HTTP endpoint
    timeout_s: float
    max_batch_rows: int
    share: float
    rows: int
    place: dict[str, Any]

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        return cls(**json.loads(text))
