"""What a fitted step is. There is one file per step; a step gives the same bits in arrays and in the ONNX graph.

A numeric step maps float32 to float32 without ever turning an order of values around (fits rely on it), with NaN for
null, and makes no null of its own. It makes no difference between 0 and -0, which processors treat differently in
minima and maxima. A categorical step maps a column to columns of int32 codes, 0 for null. An encoding makes numbers
out of anything: text, a time, codes, the target of other rows.

A step is `exact` when it needs no more than + - * /, comparisons and lookups: the same bits everywhere (class A). One
that takes a logarithm or a sine does so in float64, and its float32 results are at most 1 ulp apart (class B).

Arrays may be numpy's or cupy's; a step makes new ones with the module its argument comes from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

import numpy as np
import numpy.typing as npt

from serin.columns.column import Column
from serin.features.aggregates.sample import Sample
from serin.formats.dataset import CategoricalColumn
from serin.formats.schema import Kind

if TYPE_CHECKING:
    from serin.columns.onnx_graph import GraphBuilder

Floats = npt.NDArray[np.float32]
Codes = npt.NDArray[np.int32]


class NumericStep(Protocol):
    name: ClassVar[str]
    exact: ClassVar[bool]

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


@dataclass(frozen=True, slots=True)
class PlainStep:
    """What a numeric step is that has nothing to fit, besides what it does."""

    name: ClassVar[str]

    @property
    def shape(self) -> tuple[str, ...]:
        return (self.name,)

    def to_json(self) -> dict[str, Any]:
        return {}

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Self:  # noqa: ARG003
        return cls()


class CategoricalStep(Protocol):
    name: ClassVar[str]

    def outputs(self, column: str) -> tuple[CategoricalColumn, ...]: ...

    def labels(self) -> tuple[tuple[str, ...], ...]:
        """What each code means, for people, one tuple per output; the first is null."""
        ...

    def transform(self, column: Column) -> tuple[Codes, ...]: ...

    def to_onnx(self, graph: GraphBuilder, values: str, kind: Kind) -> tuple[str, ...]:
        """One int64 tensor of codes per output."""
        ...

    def describe(self) -> str: ...

    def to_json(self) -> dict[str, Any]: ...


class Encoding(Protocol):
    name: ClassVar[str]

    @property
    def inner(self) -> Any:
        """The numbers or codes it works on, if it does not read columns itself."""
        ...

    @property
    def exact(self) -> bool: ...

    @property
    def columns(self) -> Mapping[str, Kind]:
        """What must be there to transform, in the ETL and in a request."""
        ...

    def outputs(self) -> tuple[str, ...]:
        """The names of the numbers."""
        ...

    def transform(self, sample: Sample) -> tuple[Floats, ...]:
        """One array per output, NaN for null."""
        ...

    def to_onnx(self, graph: GraphBuilder, inputs: Mapping[str, str]) -> tuple[str, ...]:
        """One float32[batch] per output, NaN for null; inputs are rank-1 tensors in wire form."""
        ...

    def describe(self) -> str: ...

    def to_json(self) -> dict[str, Any]: ...
