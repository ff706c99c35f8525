"""How often a column is missing together with the target: counted before the rows without a target are dropped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from serin.columns.column import Column


class Unknown(NamedTuple):
    """Rows in which a column is null, and in which the target is null too."""

    rows: int
    null: int
    both: int


def count_unknown(
    columns: Mapping[str, Column], names: Sequence[str], target_null: npt.NDArray[np.bool_]
) -> dict[str, Unknown]:
    """For the columns `names` of one piece."""
    lost = np.flatnonzero(target_null)
    found = {}
    for name in names:
        column = columns[name]
        missing = column.null_count()
        both = column.null_count(lost) if missing and len(lost) else 0
        found[name] = Unknown(len(column), missing, both)
    return found
