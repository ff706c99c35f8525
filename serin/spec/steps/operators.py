"""Finds the operator that a step of the spec names: Serin's by its name, yours by its import path, `module:Class`.

Yours is checked to fulfil the contract. The spec is a lower layer than the operators, so it does not import them: each
file in serin/features/ops registers its operator here when it is imported, and they are all imported when a name is
looked up for the first time.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from serin.errors import nearest
from serin.spec.code_digest import digest_of_module
from serin.spec.steps.step import OPERATORS, FeatureStep

_METHODS = ("transform", "to_onnx", "describe", "to_json", "from_json")
_FITTING = ("measure", "merge", "fit")
_KINDS = {"string", "float", "int", "timestamp", "bool"}
_digests: dict[str, str] = {}  # of modules, as they were when this process imported them
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


def import_class(path: str) -> type[Any]:
    """The class at `module:Class`; ValueError with what is wrong and how to fix it."""
    module, _, name = path.partition(":")
    if module not in _digests:
        _digests[module] = digest_of_module(module)
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, ValueError) as error:
        raise ValueError(
            f"own operator {path!r} cannot be imported: {error}; install its package, or put its folder on PYTHONPATH, "
            "on every machine that makes the dataset or the model"
        ) from error
    except AttributeError as error:
        raise ValueError(f"own operator {path!r}: module {module!r} has no {name!r}") from error
    if not isinstance(found, type):
        raise ValueError(f"own operator {path!r} is not a class")  # noqa: TRY004 - pydantic shows ValueErrors
    return found


def load_class(path: str) -> type[Any]:
    """The operator at `module:Class`: a subclass of FeatureStep, or a plain class that fulfils the contract."""
    found = import_class(path)
    if not issubclass(found, FeatureStep):
        _check(path, found)
    elif inspect.isabstract(found):
        raise ValueError(f"own operator {path!r} lacks {', '.join(sorted(found.__abstractmethods__))}")
    return found


def fingerprint(path: str) -> str:
    """Digest of the class's module and all it imports: a changed operator makes a new dataset. A process that has
    imported the module computes with it as it was then, and so this is of that moment."""
    load_class(path)
    return _digests[path.partition(":")[0]]


def load_operator(path: str, arguments: Mapping[str, Any]) -> Any:
    """A new instance of a plain class, with these arguments."""
    kind = load_class(path)
    try:
        return kind(**arguments)
    except TypeError as error:
        raise ValueError(f"own operator {path!r} does not take these arguments: {error}") from error


def _check(path: str, kind: type[Any]) -> None:
    missing = [name for name in _METHODS if not callable(getattr(kind, name, None))]
    fitting = [name for name in _FITTING if callable(getattr(kind, name, None))]
    if fitting and len(fitting) < len(_FITTING):
        missing += [name for name in _FITTING if name not in fitting]
    if getattr(kind, "makes", None) == "categorical" and not hasattr(kind, "size"):
        missing.append("size")
    if missing:
        raise ValueError(f"own operator {path!r} lacks {', '.join(missing)}")
    if getattr(kind, "makes", None) not in ("numeric", "categorical"):
        raise ValueError(f"own operator {path!r}: `makes` must be 'numeric' or 'categorical'")
    if getattr(kind, "reads", None) not in ("numbers", "column"):
        raise ValueError(f"own operator {path!r}: `reads` must be 'numbers' or 'column'")
    if kind.reads == "column" and not set(getattr(kind, "accepts", ())) & _KINDS:
        raise ValueError(
            f"own operator {path!r}: `accepts` must name kinds of columns: {', '.join(sorted(_KINDS))}"
        )
