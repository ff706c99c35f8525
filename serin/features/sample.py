"""The rows of one partition, from which fits measure and features are computed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from serin.columns.column import Column


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """Columns by name. In the ETL also the targets, and fold ids; a request has neither.

    Rows with the same id are in the same fold, so that none of them learns from another's target. The first `training`
    rows train: they must not be encoded from their own targets.
    """

    columns: Mapping[str, Column]
    fold_ids: npt.NDArray[np.int64] | None = None
    target: npt.NDArray[np.float32] | None = None
    training: int = 0

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))
