"""What a fitted step is. There is one file per step; a step gives the same bits in arrays and in the ONNX graph.

A numeric step maps float32 to float32 without ever turning an order of values around (fits rely on it), with NaN for
null. A categorical step maps a column to columns of int32 codes, 0 for null.
"""

from __future__ import annotations

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

    def to_onnx(self, graph: GraphBuilder, values: str, null: str | None) -> tuple[str, str | None]:
        """The tensor after this step, and the one that says which rows are still null. Null rows may hold anything."""
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
