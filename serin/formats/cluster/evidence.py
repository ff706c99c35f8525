"""Evidence of one gateway for the leading controller: blocks of requests, one object per second.

    cluster/evidence/<host>/<seq>.json      numbered from 1 without gaps, written once

Blocks are counts (rollout/decide/blocks.py). The controller adds the blocks of the same second over all gateways before
it compares the arms. `complete_to`: no block before this second will come any more. The host removes old ones.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Self

FORMAT: Final = "serin.evidence"
VERSION: Final = 1


def key_of(host: str, seq: int) -> str:
    return f"cluster/evidence/{host}/{seq:012d}.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEvidence:
    """Blocks of one rollout, empty ones too: an object that names the rollout shows that its evidence had begun.

    `since_epoch`: of the arm by which they were cut. `newest`: arrival of the newest request so far; 0: none. `before`:
    bin counts of stable's latencies before the rollout's first weight epoch.
    """

    rollout: str
    since_epoch: int
    newest: float
    blocks: Sequence[tuple[int, Mapping[str, Any]]]  # (second, Block.to_json())
    before: Sequence[Sequence[Any]] | None = None
    bad_lines: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HostEvidence:
    host: str
    seq: int
    complete_to: int  # seconds since 1970
    desired_seq: int  # the desired state by which the requests were routed last
    models: Mapping[str, ModelEvidence] = field(default_factory=dict)

    def dump(self) -> bytes:
        models = {
            model: {
                "rollout": found.rollout,
                "since_epoch": found.since_epoch,
                "newest": found.newest,
                "blocks": [[second, dict(block)] for second, block in found.blocks],
                "before": found.before,
                "bad_lines": found.bad_lines,
            }
            for model, found in sorted(self.models.items())
        }
        return json.dumps(
            {
                "format": FORMAT,
                "version": VERSION,
                "host": self.host,
                "seq": self.seq,
                "complete_to": self.complete_to,
                "desired_seq": self.desired_seq,
                "models": models,
            }
        ).encode()

    @classmethod
    def load(cls, content: bytes) -> Self:
        """Raises ValueError, TypeError or KeyError for anything else."""
        value = dict(json.loads(content))
        if (value.pop("format"), value.pop("version")) != (FORMAT, VERSION):
            raise ValueError(f"not a {FORMAT} of version {VERSION}")
        models = {
            model: ModelEvidence(
                **{**found, "blocks": tuple((second, block) for second, block in found["blocks"])}
            )
            for model, found in value.pop("models").items()
        }
        return cls(**value, models=models)
