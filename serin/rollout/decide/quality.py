"""The quality guard: bets that a candidate's mean loss on labelled rows exceeds what its spec allows. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, Self

from serin.evidence.e_process import bet_on_share, e_value, start

QUALITY: Final = "quality"
WEIGHT: Final = 0.2  # among the guards, when a release has a quality objective


@dataclass(frozen=True, slots=True, kw_only=True)
class QualityBet:
    """`e_value`: evidence that the mean loss is above `limit`. `mean`: of `rows` labelled rows in `blocks` blocks."""

    loss_name: str
    offline: float
    limit: float
    e_value: float = 1.0
    mean: float | None = None
    rows: int = 0
    blocks: int = 0

    def __str__(self) -> str:
        found = (
            "no label has come yet"
            if self.mean is None
            else f"is {self.mean:.4g} on {self.rows} labelled rows"
        )
        return (
            f"its mean {self.loss_name} {found}, at most {self.limit:.4g} is allowed ({self.offline:.4g} on the test "
            "rows)"
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any] | None) -> Self | None:
        return None if value is None else cls(**value)


def bet_on_quality(
    blocks: Iterable[tuple[float, float, int]], *, since: float, loss_name: str, offline: float, limit: float
) -> QualityBet:
    """Bets on the blocks that ended after `since`. Each is (when the period of its requests ended, mean loss, rows)."""
    log_wealth, rows, total, count = start(), 0, 0.0, 0
    for ended, mean, size in blocks:
        if ended <= since:
            continue
        log_wealth = bet_on_share(log_wealth, mean, limit)
        rows, total, count = rows + size, total + mean * size, count + 1
    return QualityBet(
        loss_name=loss_name,
        offline=offline,
        limit=limit,
        e_value=float(e_value(log_wealth)),
        mean=total / rows if rows else None,
        rows=rows,
        blocks=count,
    )
