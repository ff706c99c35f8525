"""Finds an operator outside Serin by its import path, `module:Class`, and checks that it fulfils the contract."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from typing import Any

from serin.spec.code_digest import digest_of_module
from serin.spec.steps.step import FeatureStep

_METHODS = ("transform", "to_onnx", "describe", "to_json", "from_json")
_FITTING = ("measure", "merge", "fit")
_KINDS = {"string", "float", "int", "timestamp", "bool"}
_digests: dict[str, str] = {}  # of modules, as they were when this process imported them


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
