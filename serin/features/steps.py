"""What a fitted step is. There is one file per step; a step gives the same bits in arrays and in the ONNX graph.

A numeric step maps float32 to float32 without ever turning an order of values around (fits rely on it), with NaN for
null. It makes no difference between 0 and -0, which processors treat differently in minima and maxima.
A categorical step maps a column to columns of int32 codes, 0 for null.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from serin.features.column import Column
from serin.formats.dataset import CategoricalColumn
from serin.formats.schema import Kind

if TYPE_CHECKING:
    from serin.features.graph import GraphBuilder

Floats = npt.NDArray[np.float32]
Codes = npt.NDArray[np.int32]


class NumericStep(Protocol):
    name: ClassVar[str]

    def transform(self, values: Floats) -> Floats: ...

    @property
    def shape(self) -> tuple[str, ...]:
        """Steps of equal shape make the same nodes, with other numbers."""
        ...

    @classmethod
    def to_onnx(
        cls, graph: GraphBuilder, values: str, null: str | None, steps: Sequence[Any]
    ) -> tuple[str, str | None]:
        """The same step on several columns at once: values float32[batch, len(steps)], and which of them are null.
        What is null may hold anything; None: nothing is null any more."""
        ...

    def describe(self) -> str: ...

    def to_json(self) -> dict[str, Any]: ...


class CategoricalStep(Protocol):
    name: ClassVar[str]

    def outputs(self, column: str) -> tuple[CategoricalColumn, ...]: ...

    def transform(self, column: Column) -> tuple[Codes, ...]: ...

    def to_onnx(self, graph: GraphBuilder, values: str, kind: Kind) -> tuple[str, ...]:
        """One int64 tensor of codes per output."""
        ...

    def describe(self) -> str: ...

    def to_json(self) -> dict[str, Any]: ...
