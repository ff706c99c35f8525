"""Fitted features as JSON and back. Encodings that several outputs share are written once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from serin.features.codes import CategoricalFeature
from serin.features.fitted import Encoding
from serin.features.numbers import Numbers
from serin.features.operator import fitted_class, fitted_name


class PlanWriter:
    """`exact_only` leaves out every number that was fitted on, or is, the result of a function (class B)."""

    def __init__(self, *, exact_only: bool = False) -> None:
        self.encodings: list[dict[str, Any]] = []
        self._places: dict[int, int] = {}
        self._exact_only = exact_only

    def numbers(self, numbers: Numbers) -> dict[str, Any]:
        document: dict[str, Any] = {"column": numbers.column, "kind": numbers.kind}
        exact = True
        if numbers.encoding is not None:
            document |= {"encoding": self._encoding(numbers.encoding), "place": numbers.place}
            exact = numbers.encoding.exact
        document["steps"] = []
        for step in numbers.steps:
            exact = exact and step.exact
            fitted = {} if self._exact_only and not exact else step.to_json()
            document["steps"].append({"step": fitted_name(step), **fitted})
        return document

    def codes(self, feature: CategoricalFeature) -> dict[str, Any]:
        document: dict[str, Any] = {"column": feature.column, "kind": feature.kind}
        if feature.numbers is not None:
            document["numbers"] = self.numbers(feature.numbers)
        return document | {"steps": [{"step": fitted_name(feature.step), **feature.step.to_json()}]}

    def _encoding(self, encoding: Encoding) -> int:
        if id(encoding) not in self._places:
            document: dict[str, Any] = {"encoding": fitted_name(encoding)}
            if encoding.exact or not self._exact_only:
                document |= encoding.to_json()
            if isinstance(encoding.inner, Numbers):
                document["numbers"] = self.numbers(encoding.inner)
            elif encoding.inner is not None:
                document["codes"] = self.codes(encoding.inner)
            self.encodings.append(document)
            self._places[id(encoding)] = len(self.encodings) - 1
        return self._places[id(encoding)]


class PlanReader:
    def __init__(self, encodings: list[dict[str, Any]]) -> None:
        self._documents = encodings
        self._made: dict[int, Encoding] = {}

    def numbers(self, document: Mapping[str, Any]) -> Numbers:
        encoding = self._encoding(document["encoding"]) if "encoding" in document else None
        return Numbers(
            column=document["column"],
            kind=document["kind"],
            encoding=encoding,
            place=document.get("place", 0),
            steps=tuple(fitted_class("numeric", step["step"]).from_json(step) for step in document["steps"]),
        )

    def codes(self, document: Mapping[str, Any]) -> CategoricalFeature:
        (step,) = document["steps"]
        return CategoricalFeature(
            column=document["column"],
            kind=document["kind"],
            step=fitted_class("categorical", step["step"]).from_json(step),
            numbers=self.numbers(document["numbers"]) if "numbers" in document else None,
        )

    def _encoding(self, place: int) -> Encoding:
        if place not in self._made:
            document = self._documents[place]
            inner: Any = None
            if "numbers" in document:
                inner = self.numbers(document["numbers"])
            elif "codes" in document:
                inner = self.codes(document["codes"])
            kind = fitted_class("encoding", document["encoding"])
            self._made[place] = kind.from_json(document, inner)
        return self._made[place]
