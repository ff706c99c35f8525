"""Evidence that the mean of a loss has come to exceed a limit at some unknown time. Pure.

The claim: in every block, given the past, the mean loss is at most the limit. A bettor multiplies by
1 + stake (mean / limit - 1), which is 1 on average at the limit and never negative. The Shiryaev-Roberts statistic
M = (1 + M) x factor sums the wealth of bettors started at each block, so that it finds a change after any time without
one. While the claim holds the mean of M after n blocks is at most n: with an alarm at c, the mean number of blocks
until a false alarm is at least c.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Self

import numpy as np

from serin.evidence.e_process import STAKES, Array

_TRACKED: Final = 4  # the stake whose latest restart says since when
_LARGEST: Final = 600.0


def _nothing() -> Array:
    return np.full(len(STAKES), -np.inf)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MeanEvidence:
    """`log_m`: the logarithm of M, by stake. The others follow the tracked stake since its latest restart: `run` its
    log wealth, `since` the time of the restart, `rows` and `total` the rows after it and the sum of their losses."""

    log_m: Array = field(default_factory=_nothing)
    run: float = 0.0
    since: float | None = None
    rows: int = 0
    total: float = 0.0

    @property
    def value(self) -> float:
        """M, the mean over the stakes."""
        return float(np.exp(np.minimum(self.log_m, _LARGEST)).mean())

    @property
    def mean(self) -> float | None:
        """The mean loss since the latest restart."""
        return self.total / self.rows if self.rows else None

    def add(self, *, began: float, mean: float, rows: int, limit: float, most: float) -> MeanEvidence:
        """Returns the evidence after a block. `most`: evidence beyond it is not remembered, so that a loss that has
        come back within the limit is recognised."""
        factors = np.log1p(STAKES * (mean / limit - 1.0))
        log_m = np.minimum(np.logaddexp(0.0, self.log_m) + factors, np.log(most) + 1.0)
        run = min(self.run + float(factors[_TRACKED]), float(np.log(most)))
        if run <= 0:
            return MeanEvidence(log_m=log_m)
        since = began if self.since is None else self.since
        return MeanEvidence(
            log_m=log_m, run=run, since=since, rows=self.rows + rows, total=self.total + mean * rows
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "log_m": [None if value == -np.inf else float(value) for value in self.log_m],
            "run": self.run,
            "since": self.since,
            "rows": self.rows,
            "total": self.total,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Reads evidence. An empty object means none yet."""
        if not value:
            return cls()
        log_m = np.array([-np.inf if each is None else each for each in value["log_m"]])
        return cls(**{**value, "log_m": log_m})
