"""Wraps a user's plain class as an operator, found by import path (`module:Class`). See docs/how-to/features.md.

It always works on numpy arrays: data on a GPU is copied to the host and back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from serin.columns.column import Column, array_module
from serin.errors import OperatorFailed
from serin.features.aggregates.aggregate import Fit
from serin.features.fitted import Codes, Floats, Sample
from serin.features.numbers import Numbers
from serin.features.operator import Source, register_fitted
from serin.formats.dataset import CategoricalColumn
from serin.formats.schema import Kind
from serin.spec.steps.operators import load_class
from serin.spec.steps.parse import Own

if TYPE_CHECKING:
    from serin.columns.onnx_graph import GraphBuilder


@dataclass(frozen=True, slots=True, eq=False)
class OwnAggregate:
    """The aggregate of a user's operator: over `numbers`, or else over the column."""

    operator: Any
    column: str
    numbers: Numbers | None

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.column,) if self.numbers is None else tuple(self.numbers.columns)

    def measure(self, sample: Sample) -> Any:
        if self.numbers is None:
            return self.operator.measure(sample.columns[self.column].on_host())
        return self.operator.measure(_host(self.numbers.of(sample)))

    def merge(self, left: Any, right: Any) -> Any:
        return self.operator.merge(left, right)


def fit_own(step: Own, source: Source) -> Fit[OwnNumbers | OwnCodes]:
    """Returns the fitted operator; the class's instance itself when it has nothing to fit."""
    operator, numbers = step.operator, None if source.numbers is None else source.numbers.numbers
    if hasattr(operator, "measure"):
        measured = yield OwnAggregate(operator, source.column, numbers)
        operator = operator.fit(measured)
    if step.made == "codes":
        return OwnCodes(path=step.path, operator=operator)
    return OwnNumbers(
        path=step.path, operator=operator, column=source.column, kind=source.kind, inner=numbers
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OwnNumbers:
    """An operator that makes numbers, of `inner` numbers or, when there are none, of the column."""

    path: str
    operator: Any
    column: str
    kind: Kind
    inner: Numbers | None

    @property
    def exact(self) -> bool:
        return bool(getattr(self.operator, "exact", True)) and (self.inner is None or self.inner.exact)

    @property
    def columns(self) -> Mapping[str, Kind]:
        return {self.column: self.kind} if self.inner is None else self.inner.columns

    def outputs(self) -> tuple[str, ...]:
        return (self.column if self.inner is None else self.inner.name,)

    def transform(self, sample: Sample) -> tuple[Floats, ...]:
        if self.inner is None:
            column = sample.columns[self.column]
            there: Any = column.values
            made = self.operator.transform(column.on_host())
        else:
            there = self.inner.of(sample)
            made = self.operator.transform(_host(there))
        _check(self.path, made, np.float32, len(there))
        return (array_module(there).asarray(made),)

    def to_onnx(self, graph: GraphBuilder, inputs: Mapping[str, str]) -> tuple[str, ...]:
        values = inputs[self.column] if self.inner is None else self.inner.to_onnx(graph, inputs)
        return (str(self.operator.to_onnx(graph, values)),)

    def describe(self) -> str:
        before = "" if self.inner is None else self.inner.describe()
        return f"{before}; {self.operator.describe()}" if before else str(self.operator.describe())

    def to_json(self) -> dict[str, Any]:
        return {
            "path": self.path,
            "column": self.column,
            "kind": self.kind,
            "operator": self.operator.to_json(),
        }

    @classmethod
    def from_json(cls, document: dict[str, Any], inner: Numbers | None = None) -> OwnNumbers:
        operator = load_class(document["path"]).from_json(document["operator"])
        where = {key: document[key] for key in ("path", "column", "kind")}
        return cls(**where, operator=operator, inner=inner)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OwnCodes:
    """An operator that makes codes."""

    path: str
    operator: Any

    @property
    def size(self) -> int:
        return int(self.operator.size)

    def outputs(self, column: str) -> tuple[CategoricalColumn, ...]:
        return (CategoricalColumn(name=column, size=self.size),)

    def labels(self) -> tuple[tuple[str, ...], ...]:
        return (("null", *map(str, range(1, self.size))),)

    def transform(self, column: Column) -> tuple[Codes, ...]:
        host = column.on_host()
        made = self.operator.transform(host.floats() if self.operator.reads == "numbers" else host)
        _check(self.path, made, np.int32, len(column))
        if len(made) and (int(made.min()) < 0 or int(made.max()) >= self.size):
            raise OperatorFailed(operator=self.path, problem=f"made a code outside 0 .. {self.size - 1}")
        return (array_module(column.values).asarray(made),)

    def to_onnx(self, graph: GraphBuilder, values: str, kind: Kind) -> tuple[str, ...]:  # noqa: ARG002
        return (str(self.operator.to_onnx(graph, values)),)

    def describe(self) -> str:
        return str(self.operator.describe())

    def to_json(self) -> dict[str, Any]:
        return {"path": self.path, "operator": self.operator.to_json()}

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> OwnCodes:
        operator = load_class(document["path"]).from_json(document["operator"])
        return cls(path=document["path"], operator=operator)


def _host(values: Any) -> Any:
    return values if isinstance(values, np.ndarray) else values.get()


def _check(path: str, made: Any, dtype: type[np.generic], rows: int) -> None:
    if not isinstance(made, np.ndarray) or made.dtype != dtype or made.shape != (rows,):
        form = f"{made.dtype}{list(made.shape)}" if isinstance(made, np.ndarray) else type(made).__name__
        raise OperatorFailed(operator=path, problem=f"made {form}, not {np.dtype(dtype)}[{rows}]")


register_fitted("categorical", "own", OwnCodes)
register_fitted("encoding", "own", OwnNumbers)
