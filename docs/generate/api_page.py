"""Renders the page of the Python API: what `import serin` offers, each name described by its own docstring."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import serin
from serin.errors import SerinError

_HEAD = """# Python API

`import serin` offers the names below and nothing else. They are loaded when they are first used, so that the import
itself takes no time.
"""
# In the order of use.
_FIRST = ("Pipeline", "Dataset", "Checkpoint", "Model", "Explanation", "Client", "Store")


def render() -> str:
    offered = [name for name in serin.__all__ if not name.startswith("_")]
    offered.sort(key=lambda name: (_FIRST.index(name) if name in _FIRST else len(_FIRST), name))
    return "\n".join([_HEAD, *_objects(offered), *_errors(offered)])


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
