"""Renders the page of the Python API: what `import serin` offers, each name described by its own docstring."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import serin
from serin.errors import SerinError

_OFFERED = """# Python API

`import serin` offers the names below and nothing else. They are loaded when they are first used, so that the import
itself takes no time.
"""
_MODULES = """# Python API

The command is built from these classes and functions, which scripts and notebooks may use as well.
"""
# What scripts use while the package itself offers no names.
_USED = ("serin.spec.load.load_spec", "serin.store.store.Store", "serin.serving.client.client.Client")


def render() -> str:
    offered = [name for name in getattr(serin, "__all__", ()) if not name.startswith("_")]
    if not offered:
        return "\n".join([_MODULES, *(f"\n::: {name}\n" for name in _USED)])
    return "\n".join([_OFFERED, *_objects(offered), *_errors(offered)])


def _objects(offered: list[str]) -> Iterator[str]:
    for name in offered:
        found = getattr(serin, name)
        if _is_error(found):
            continue
        if inspect.isclass(found) or inspect.isfunction(found):
            yield f"\n::: {found.__module__}.{found.__qualname__}\n"
        else:
            yield f"\n## {name}\n\n`serin.{name}`: {type(found).__name__}\n"


def _errors(offered: list[str]) -> Iterator[str]:
    names = [name for name in offered if _is_error(getattr(serin, name))]
    if names:
        links = ", ".join(f"[`{name}`](errors.md#{name.lower()})" for name in names)
        yield f"\n## Errors\n\nThe error classes are offered too: {links}.\n"


def _is_error(found: object) -> bool:
    return inspect.isclass(found) and issubclass(found, SerinError)
