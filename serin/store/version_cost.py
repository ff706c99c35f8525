"""What a model version cost: the receipts of the stages that made it, found by what each stage left.

Each is kept once more under the name of its result, here and in a store that other hosts share, because a later version
may use the same dataset or weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serin.store.receipt import Receipt, added, known_sum
from serin.store.stage_results import find_result, keep_result

STAGES = ("etl", "train", "export")
_KIND = "receipts"


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionCost:
    """`receipts`: by stage, those that are known. Sums are None when no stage has the number."""

    receipts: Mapping[str, Receipt]

    @property
    def unknown(self) -> tuple[str, ...]:
        """The stages without a receipt: of an imported version, or made by another host without a shared store."""
        return tuple(stage for stage in STAGES if stage not in self.receipts)

    @property
    def seconds(self) -> float:
        return sum(receipt.seconds for receipt in self.receipts.values())

    @property
    def gpu_s(self) -> float:
        """Seconds of GPUs that were leased."""
        return sum(
            cost.booked_s for receipt in self.receipts.values() for cost in receipt.device if cost.id != "cpu"
        )

    @property
    def joules(self) -> float | None:
        return known_sum(receipt.joules for receipt in self.receipts.values())

    @property
    def cost(self) -> float | None:
        return known_sum(receipt.cost for receipt in self.receipts.values())

    def to_json(self) -> dict[str, Any]:
        return {
            "stages": {stage: receipt.to_json() for stage, receipt in self.receipts.items()},
            "unknown": list(self.unknown),
            "seconds": self.seconds,
            "gpu_s": self.gpu_s,
            "joules": self.joules,
            "cost": self.cost,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    """The receipts of all attempts at one result, in their order."""

    attempts: tuple[Receipt, ...]


def keep_receipt(
    home: Path, stage: str, made: str, receipt: Receipt | None, *, resumed: bool = False
) -> None:
    """Keeps the receipt of the work that made `made`: a dataset's digest, a training's folder, MODEL-vVERSION.

    `resumed`: an earlier receipt for the same is of work that this one has continued, and counts too."""
    if receipt is None:
        return
    name = f"{stage}-{made}"
    before = find_result(home, _KIND, name, _Kept) if resumed else None
    earlier = [each for each in before.attempts if each.started != receipt.started] if before else []
    keep_result(home, _KIND, name, _Kept(attempts=(*earlier, receipt)))


def read_version_cost(home: Path, release: str, lineage: Mapping[str, Any]) -> VersionCost:
    """What the version `release` (MODEL-vVERSION) cost, by its lineage."""
    made = {"etl": lineage.get("dataset"), "train": lineage.get("training"), "export": release}
    found = {
        stage: find_result(home, _KIND, f"{stage}-{name}", _Kept) for stage, name in made.items() if name
    }
    return VersionCost(receipts={stage: added(kept.attempts) for stage, kept in found.items() if kept})
