"""Which rollout controller leads, where several share a store.

    cluster/leader.json     changed by compare-and-swap only; renewed about each second by the leader

Everyone else measures with their own clock for how long the record has not changed. `term` grows with each change of
the leader, and is in everything that a leader writes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from serin.machine.typed_json import Document

KEY: Final = "cluster/leader.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Leader(Document, form="serin.leader"):
    """`holder`: unique for each process that ever led; empty: the last leader has resigned."""

    holder: str
    term: int
    beat: int = 0
