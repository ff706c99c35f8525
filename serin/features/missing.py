"""The indicator that a fill may add: 1 where a value is null, else 0."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from serin.features.fitted import FittedNumbers, Floats
from serin.features.operator import register_fitted

if TYPE_CHECKING:
    from serin.columns.onnx_graph import GraphBuilder

_FLOAT = 1  # onnx.TensorProto.FLOAT


@dataclass(frozen=True, slots=True)
class Missing(FittedNumbers):
    def transform(self, values: Floats) -> Floats:
        return np.isnan(values).astype(np.float32)

    @classmethod
    def to_onnx(
        cls,
        graph: GraphBuilder,
        values: str,
        null: str | None,
        steps: Sequence[Missing],  # noqa: ARG003
    ) -> tuple[str, str | None]:
        where = graph.op("IsNaN", values) if null is None else null
        return graph.op("Cast", where, to=_FLOAT), None

    def describe(self) -> str:
        return "1 where it is null, else 0"


register_fitted("numeric", "missing", Missing)
