"""Finds the operator that a step of the spec names.

The spec is a lower layer than the operators, so it does not import them: each file in serin/features/ops registers its
operator here when it is imported, and they are all imported when a name is looked up for the first time.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from types import MappingProxyType

from serin.errors import nearest
from serin.spec.steps.step import OPERATORS, FeatureStep

_registered: dict[str, type[FeatureStep]] = {}


def add_operator(kind: type[FeatureStep]) -> None:
    """Makes an operator known by its name."""
    known = _registered.setdefault(kind.name, kind)
    if known is not kind and (known.__module__, known.__qualname__) != (kind.__module__, kind.__qualname__):
        raise ValueError(
            f"two operators are named {kind.name!r}: {known.__module__} and {kind.__module__}; rename one of them"
        )
    _registered[kind.name] = kind


def operators() -> Mapping[str, type[FeatureStep]]:
    """Every operator by its name."""
    package = importlib.import_module(OPERATORS)
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{OPERATORS}.{module.name}")
    return MappingProxyType(_registered)


def operator_named(name: str) -> type[FeatureStep]:
    """The operator, or ValueError with the name that may have been meant."""
    kind = _registered.get(name) or operators().get(name)
    if kind is None:
        raise ValueError(f"unknown step {name!r}{nearest(name, operators())}")
    return kind
