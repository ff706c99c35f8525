"""The logarithm of 1 + |x|, with the sign of x: defined everywhere, and log(1 + x) where x is not negative.

In float64, stored as float32 (class B). By log(1 + x), since ONNX has no log1p.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from serin.columns.column import array_module
from serin.features.aggregates.aggregate import Fit, ready
from serin.features.fitted import FittedNumbers, Floats
from serin.features.operator import NumberOperator, Source, register

if TYPE_CHECKING:
    from serin.columns.onnx_graph import GraphBuilder

_FLOAT, _DOUBLE = 1, 11  # onnx.TensorProto


class Log1p(NumberOperator):
    """The logarithm of 1 + |x|, with the sign of x."""

    name = "log1p"
    exact = False

    def fit(self, source: Source) -> Fit[FittedLog1p]:
        del source
        return ready(FittedLog1p())


@dataclass(frozen=True, slots=True)
class FittedLog1p(FittedNumbers):
    exact: ClassVar[bool] = False

    def transform(self, values: Floats) -> Floats:
        logs = np.log(np.abs(values).astype(np.float64) + 1.0).astype(np.float32)
        signed: Floats = array_module(values).where(values < 0, -logs, logs)
        return signed

    @classmethod
    def to_onnx(
        cls,
        graph: GraphBuilder,
        values: str,
        null: str | None,
        steps: Sequence[FittedLog1p],  # noqa: ARG003
    ) -> tuple[str, str | None]:
        wide = graph.op("Cast", graph.op("Abs", values), to=_DOUBLE)
        logs = graph.op("Log", graph.op("Add", wide, graph.constant(np.float64(1), "one")))
        narrow = graph.op("Cast", logs, to=_FLOAT)
        below = graph.op("Less", values, graph.constant(np.float32(0), "zero"))
        return graph.op("Where", below, graph.op("Neg", narrow), narrow), null

    def describe(self) -> str:
        return "logarithm of 1 + |x|, with the sign of x"


register(Log1p, FittedLog1p)
