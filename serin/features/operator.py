"""Defines operators: steps of the spec that can be fitted. A file in ops/ defines an operator completely,
or several that belong together.

Such a file has the operator (its arguments and `fit`), its fitted form (fitted.py has the interface), and a last line
that registers both.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import AfterValidator

from serin.features.aggregates.aggregate import Fit
from serin.features.aggregates.distribution import Distribution
from serin.features.numbers import CategoricalFeature
from serin.formats.schema import Kind
from serin.spec.steps.operators import add_operator, import_class, operators
from serin.spec.steps.step import NUMBERS, FeatureStep

Role = Literal["numeric", "categorical", "encoding"]
_LARGEST = 3.4028234663852886e38  # of float32
_fitted: dict[tuple[Role, str], Any] = {}
_names: dict[type[Any], str] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The input of a fit: a column of the training rows, and the result of the steps before it on that column."""

    columns: tuple[str, ...]  # one; all of the feature's for an operator that is fitted once for all of them
    kinds: Mapping[str, Kind]  # of every column of the table
    classes: int  # of a target with several; 0 for a binary target or a regression
    numbers: Distribution | None = None
    codes: CategoricalFeature | None = None

    @property
    def column(self) -> str:
        return self.columns[0]

    @property
    def kind(self) -> Kind:
        return self.kinds[self.column]

    @property
    def distribution(self) -> Distribution:
        """The numbers so far; an operator that reads numbers always has them."""
        assert self.numbers is not None
        return self.numbers


class Operator(FeatureStep):
    """A step that can be fitted."""

    @abstractmethod
    def fit(self, source: Source) -> Fit[Any]:
        """Requests aggregates over the training rows and returns the fitted operator.

        A NumericStep if the operator is `monotone`, a CategoricalStep if it makes codes, else an Encoding
        (serin/features/fitted.py).
        """
        ...


class NumberOperator(Operator):
    """An operator that maps each number to one number, without reversing their order and without making nulls."""

    kinds = NUMBERS
    follows = ("raw", "numbers")
    monotone = True


def register(
    operator: type[Operator], fitted: type[Any], *, also: Mapping[str, type[Any]] | None = None
) -> None:
    """Registers an operator for specs by its name, and its fitted form for the files that store it.

    `also`: further fitted classes, by the names under which they are stored.
    """
    role: Role = (
        "numeric" if operator.monotone else "categorical" if operator.gives == "codes" else "encoding"
    )
    add_operator(operator)
    for name, kind in {operator.name: fitted, **(also or {})}.items():
        register_fitted(role, name, kind)


def register_fitted(role: Role, name: str, kind: type[Any]) -> None:
    """Registers a class for the files that store fitted operators."""
    _fitted[role, name] = kind
    _names[kind] = name


def fitted_class(role: Role, name: str) -> Any:
    """Returns the class that is stored under a name, or under its import path."""
    if ":" in name:
        return import_class(name)
    if (role, name) not in _fitted:
        operators()
    return _fitted[role, name]


def fitted_name(fitted: Any) -> str:
    """Returns the name under which a fitted operator is stored; the import path of a class outside Serin."""
    kind = type(fitted)
    return _names[kind] if kind.__module__.startswith("serin.") else f"{kind.__module__}:{kind.__qualname__}"


def _finite(value: float) -> float:
    if not math.isfinite(value) or abs(value) > _LARGEST:
        raise ValueError(f"{value!r} is not a finite float32 number")
    return value


Finite = Annotated[float, AfterValidator(_finite)]
"""A number that float32 can hold."""


def float32_of(value: float) -> float:
    """The nearest float32; never -0."""
    return float(np.float32(value)) + 0.0


def rising(q: tuple[float, float], example: str) -> None:
    """Raises ValueError unless these are two quantiles in order."""
    if not 0 <= q[0] < q[1] <= 1:
        raise ValueError(f"q={list(q)} must be two increasing numbers between 0 and 1, such as {example}")
