"""Renders the page of errors from `serin/errors.py`: when each is raised, what its message says, what to do."""

from __future__ import annotations

import html
import inspect
import re
import string
from collections.abc import Iterator

from serin import errors

_HEAD = """# Errors

This page is generated from `serin/errors.py`. Every error that Serin raises on purpose is a `SerinError`. Its
message names the problem, where it is and what to do next; its `fields` hold the same values for programs. Errors
survive pickling, so they arrive unchanged from Dask and Prefect.

- **Exit code**: what the `serin` command ends with. 2 means that the spec or an argument must be corrected.
- **Retryable**: the same command may succeed when it is run again. Tasks retry these errors by themselves.

In a message below, a word in braces stands for a value.
"""
_TREE_LINE = re.compile(r"^[│ ]*(?:├──|└──)\s(\w+)(?:\s+(.+))?$")


def render() -> str:
    base = f"\n## SerinError\n\n{_when(errors.SerinError)}\n"
    return "\n".join([_HEAD, base, *_entries(errors.SerinError, 2)])


def _entries(kind: type[errors.SerinError], level: int) -> Iterator[str]:
    for child in kind.__subclasses__():
        if child.__module__ == errors.__name__:
            yield f"\n{'#' * min(level, 4)} {child.__name__}\n"
            yield _entry(child)
            yield from _entries(child, level + 1)


def _entry(kind: type[errors.SerinError]) -> str:
    parts = [_when(kind)]
    if "template" in vars(kind):
        parts.append(f"> {_message(kind.template)}")
    facts = [f"Exit code {kind.exit_code}"]
    if kind.exit_code == 2:
        facts.append("correct the spec or the argument, then run the command again")
    if kind.retryable:
        facts.append("retryable: run the same command again")
    parts.append("; ".join(facts) + ".")
    return "\n\n".join(part for part in parts if part) + "\n"


def _message(template: str) -> str:
    """The template with its fields in braces, without conversions and formats."""
    parts = string.Formatter().parse(template)
    text = "".join(literal + (f"{{{field}}}" if field is not None else "") for literal, field, *_ in parts)
    return html.escape(text, quote=False).replace("\n", "\n> ")


def _when(kind: type[errors.SerinError]) -> str:
    """The line of the tree in the module's docstring, then the class's own docstring."""
    tree = {
        match[1]: match[2] or ""
        for line in (errors.__doc__ or "").splitlines()
        if (match := _TREE_LINE.match(line))
    }
    said = re.sub(r"\s*\((?:exit code|retryable)[^)]*\)$", "", tree.get(kind.__name__, ""))
    own = inspect.cleandoc(kind.__dict__["__doc__"]) if kind.__dict__.get("__doc__") else ""
    sentence = said[:1].upper() + said[1:] + "." if said else ""
    return "\n\n".join(part for part in (sentence, own) if part)
