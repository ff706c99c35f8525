"""Which rollout controller leads, where several share a store.

    cluster/leader.json     changed by compare-and-swap only; renewed about each second by the leader

Everyone else measures with their own clock for how long the record has not changed. `term` grows with each change of
the leader, and is in everything that a leader writes.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Final, Self

FORMAT: Final = "serin.leader"
VERSION: Final = 1
KEY: Final = "cluster/leader.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Leader:
    """`holder`: unique for each process that ever led; empty: the last leader has resigned."""

    holder: str
    term: int
    beat: int = 0

    def dump(self) -> bytes:
        return json.dumps({"format": FORMAT, "version": VERSION, **asdict(self)}).encode()

    @classmethod
    def load(cls, content: bytes) -> Self:
        """Raises ValueError, TypeError or KeyError for anything else."""
        value = dict(json.loads(content))
        if (value.pop("format"), value.pop("version")) != (FORMAT, VERSION):
            raise ValueError(f"not a {FORMAT} of version {VERSION}")
        return cls(**value)
