"""Interfaces of fitted operators, which give the same bits in arrays and in the ONNX graph.

A numeric step maps float32 to float32 without ever reversing an order of values (fits rely on it), with NaN for null,
and makes no nulls. It does not distinguish 0 and -0, which processors treat differently in minima and maxima. A
categorical step maps a column to columns of int32 codes, 0 for null. An encoding makes numbers from anything: strings,
a time, codes, the target of other rows.

A step is `exact` when it needs no more than + - * /, comparisons and lookups: the same bits everywhere (class A). One
that takes a logarithm or a sine does so in float64, and its float32 results are at most 1 ulp apart (class B).

Arrays may be numpy's or cupy's; a step makes new ones with the module of its argument. `to_json` is all that is stored
of it, and the class method `from_json(document)` restores it; an encoding's also gets its `inner`: `from_json(document,
inner)`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, cast

import numpy as np
import numpy.typing as npt

from serin.columns.column import Column
from serin.formats.dataset import CategoricalColumn
from serin.formats.schema import Kind

if TYPE_CHECKING:
    from serin.columns.onnx_graph import GraphBuilder


Floats = npt.NDArray[np.float32]
Codes = npt.NDArray[np.int32]


class NumericStep(Protocol):
    exact: ClassVar[bool]

    def transform(self, values: Floats) -> Floats: ...

    @property
    def null_becomes(self) -> float | None:
        """The value that it gives to nulls; None: they stay null."""
        ...

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


class StoredFields:
    """The common part of what is stored by its fields alone."""

    __slots__ = ()

    def to_json(self) -> dict[str, Any]:
        return {field.name: _plain(getattr(self, field.name)) for field in fields(cast("Any", self))}

    @classmethod
    def from_json(cls, document: Mapping[str, Any], inner: None = None) -> Self:  # noqa: ARG003
        kind = cast("Any", cls)
        made: Self = kind(**{field.name: cls.value_of(document[field.name]) for field in fields(kind)})
        return made

    @staticmethod
    def value_of(plain: Any) -> Any:
        return tuple(plain) if isinstance(plain, list) else plain


def _plain(value: Any) -> Any:
    return (
        list(value) if isinstance(value, tuple) else value.to_json() if hasattr(value, "to_json") else value
    )


@dataclass(frozen=True, slots=True)
class FittedNumbers(StoredFields):
    """The common part of most numeric steps: they are exact, nulls stay null, and only their fields are stored."""

    exact: ClassVar[bool] = True

    @property
    def null_becomes(self) -> float | None:
        return None

    @property
    def shape(self) -> tuple[str, ...]:
        return (type(self).__module__, type(self).__qualname__)


class CategoricalStep(Protocol):
    def outputs(self, column: str) -> tuple[CategoricalColumn, ...]: ...

    def labels(self) -> tuple[tuple[str, ...], ...]:
        """What each code means, for people, one tuple per output; the first is null."""
        ...

    def transform(self, column: Column) -> tuple[Codes, ...]:
        """One array per output. A code depends on the row's value alone."""
        ...

    def to_onnx(self, graph: GraphBuilder, values: str, kind: Kind) -> tuple[str, ...]:
        """One int64 tensor of codes per output."""
        ...

    def describe(self) -> str: ...

    def to_json(self) -> dict[str, Any]: ...


class Encoding(Protocol):
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
