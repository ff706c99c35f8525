"""Evidence of one gateway for the leading controller: blocks of requests, one object per second.

    cluster/evidence/<host>/<seq>.json      numbered from 1 without gaps, written once

Blocks are counts (rollout/decide/blocks.py). The controller adds the blocks of the same second over all gateways before
it compares the arms. `complete_to`: no block before this second will come any more. The host removes old ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from serin.machine.typed_json import Document


def key_of(host: str, seq: int) -> str:
    return f"cluster/evidence/{host}/{seq:012d}.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEvidence:
    """Blocks of one rollout, empty ones too: an object that names the rollout shows that its evidence had begun.

    `since_epoch`: of the arm by which they were cut. `newest`: arrival of the newest request so far; 0: none. `before`:
    bin counts of stable's latencies before the rollout's first weight epoch. `course`: how far the log was cut, as an
    agent that has lost its state needs it.
    """

    rollout: str
    since_epoch: int
    newest: float
    blocks: tuple[tuple[int, Mapping[str, Any]], ...]  # (second, Block.to_json())
    before: Sequence[Sequence[Any]] | None = None
    bad_lines: int = 0
    course: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostEvidence(Document, form="serin.evidence"):
    host: str
    seq: int
    complete_to: int  # seconds since 1970
    desired_seq: int  # the desired state by which the requests were routed last
    models: Mapping[str, ModelEvidence] = field(default_factory=dict)
