"""The common part of all scalings: (x - shift) / scale in float32. They differ in where the two numbers come from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from serin.features.fitted import FittedNumbers, Floats

if TYPE_CHECKING:
    from serin.columns.onnx_graph import GraphBuilder

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


@dataclass(frozen=True, slots=True)
class Scaling(FittedNumbers):
    """Both are float32 values; `scale` is positive and finite."""

    shift: float
    scale: float

    def transform(self, values: Floats) -> Floats:
        with np.errstate(over="ignore", invalid="ignore"):
            return (values - np.float32(self.shift)) / np.float32(self.scale)

    @property
    def shape(self) -> tuple[str, ...]:
        return ("scale",)

    @classmethod
    def to_onnx(
        cls, graph: GraphBuilder, values: str, null: str | None, steps: Sequence[Scaling]
    ) -> tuple[str, str | None]:
        shifts = graph.constant(np.asarray([step.shift for step in steps], np.float32), "shifts")
        scales = graph.constant(np.asarray([step.scale for step in steps], np.float32), "scales")
        return graph.op("Div", graph.op("Sub", values, shifts), scales), null

    def describe(self) -> str:
        return f"minus {self.shift:g}, divided by {self.scale:g}"


def scale_of(width: float) -> float:
    """Returns a divisor for values that far apart: 1 when they do not differ, and never more than float32 can
    represent."""
    with np.errstate(over="ignore"):
        scale = float(np.float32(width))
    return min(scale, float(np.finfo(np.float32).max)) or 1.0
