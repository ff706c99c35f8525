"""Finds numbers that a network can hardly learn from. Does not import torch: `serin check` asks, too."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

_LARGE = 30.0  # root mean square of a column; scaled numbers have about 1
_SHOWN = 3


def unscaled_warning(columns: Mapping[str, npt.NDArray[np.floating]]) -> str | None:
    """Returns a sentence about numbers that a network can hardly learn from as they are; None when there are none."""
    found = {name: extent for name, values in columns.items() if (extent := _unscaled(values))}
    if not found:
        return None
    shown = ", ".join(f"{name} ({extent})" for name, extent in list(found.items())[:_SHOWN])
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return (
        f"not scaled for a network: {shown}{more}; it learns little from large or tiny numbers: end the steps of these "
        "columns with normalize, or set model.numeric_scaling: robust"
    )


def _unscaled(values: npt.NDArray[np.floating]) -> str | None:
    """The extent of numbers that are mostly large, or all tiny."""
    known = values[np.isfinite(values)].astype(np.float64)
    if not len(known) or not known.any():
        return None
    large = float(np.sqrt(np.mean(np.square(known)))) > _LARGE
    tiny = float(np.abs(known).max()) < 1 / _LARGE
    return f"{known.min():g} to {known.max():g}" if large or tiny else None
