"""What the run of a stage gave, for the host that asked for it: `runs/<run>.json` in the store that hosts share.

Prefect keeps results on the disk of the host that ran, which others cannot read.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from serin.store.stage_results import shared_objects


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """`value`: the stage's result as JSON. `notes`: what was noted for the run (stage_keys.py)."""

    value: dict[str, Any]
    notes: Sequence[dict[str, Any]]


def share_outcome(run: str, value: Any, notes: Sequence[dict[str, Any]]) -> None:
    """Does nothing without a store that hosts share."""
    shared = shared_objects()
    if shared is not None:
        content = {"value": dataclasses.asdict(value), "notes": list(notes)}
        shared.put(_key(run), json.dumps(content).encode())


def read_outcome(run: str) -> Outcome | None:
    shared = shared_objects()
    found = None if shared is None else shared.read(_key(run))
    return None if found is None else Outcome(**json.loads(found.content))


def _key(run: str) -> str:
    return f"runs/{run}.json"
