"""What the watcher tells the controller about the quality of releases: the object watch/quality/<model>/evidence.json
of a home, or of the store that several hosts share.

Blocks of labelled rows in the order in which they were judged. The controller bets on those of its rollout itself, so
that its journal has the numbers and nothing is counted for a rollout that came before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from serin.machine.typed_json import Document
from serin.spec.names import valid_model_name
from serin.store.objects import Objects


@dataclass(frozen=True, slots=True, kw_only=True)
class QualityBlocks:
    """`limit`: the largest mean loss that is allowed, `offline` that of the test rows. `blocks`: when the period of a
    block's requests ended (seconds since 1970), their mean loss, and how many there were."""

    loss_name: str
    offline: float
    limit: float
    blocks: tuple[tuple[float, float, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Evidence(Document, form="serin.quality-evidence"):
    releases: Mapping[str, QualityBlocks]


def write_quality_blocks(objects: Objects, model: str, releases: Mapping[str, QualityBlocks]) -> None:
    """Writes the evidence of all releases of a model."""
    objects.put(_key(model), _Evidence(releases=releases).dump())


def read_quality_blocks(objects: Objects, model: str, release: str) -> QualityBlocks | None:
    """The evidence about a release; None when it has no quality objective, or nothing is known. Raises
    StoreUnreachable."""
    try:
        stored = objects.read(_key(model))
        return None if stored is None else _Evidence.load(stored.content).releases.get(release)
    except (OSError, ValueError):
        return None


def _key(model: str) -> str:
    return f"watch/quality/{valid_model_name(model)}/evidence.json"
