"""What the watcher tells the controller about the quality of releases: watch/quality/<model>/evidence.json.

Blocks of labelled rows in the order in which they were judged. The controller bets on those of its rollout itself, so
that its journal has the numbers and nothing is counted for a rollout that came before it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from serin.machine.durable import write_whole
from serin.spec.names import valid_model_name

FORMAT, VERSION = "serin.quality-evidence", 1
FILE = "evidence.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class QualityBlocks:
    """`limit`: the largest mean loss that is allowed, `offline` that of the test rows. `blocks`: when the period of a
    block's requests ended (seconds since 1970), their mean loss, and how many there were."""

    loss_name: str
    offline: float
    limit: float
    blocks: tuple[tuple[float, float, int], ...] = ()


def write_quality_blocks(folder: Path, releases: Mapping[str, QualityBlocks]) -> None:
    """Writes the evidence of all releases of a model into its folder."""
    document = {
        name: {
            "loss_name": each.loss_name,
            "offline": each.offline,
            "limit": each.limit,
            "blocks": each.blocks,
        }
        for name, each in releases.items()
    }
    write_whole(folder / FILE, json.dumps({"format": FORMAT, "version": VERSION, "releases": document}))


def read_quality_blocks(home: Path, model: str, release: str) -> QualityBlocks | None:
    """The evidence about a release; None when it has no quality objective, or nothing is known."""
    path = home / "watch" / "quality" / valid_model_name(model) / FILE
    try:
        document = json.loads(path.read_bytes())
        if (document["format"], document["version"]) != (FORMAT, VERSION):
            return None
        entry = document["releases"][release]
        blocks = tuple((float(ended), float(mean), int(rows)) for ended, mean, rows in entry.pop("blocks"))
        return QualityBlocks(**entry, blocks=blocks)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
