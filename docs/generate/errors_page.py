"""Renders the page of errors from `serin/errors.py`: when each is raised, what its message says, what to do."""

from __future__ import annotations

import ast
import html
import inspect
import re
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
    return "\n".join([_HEAD, *_entries(errors.SerinError, 2)])


def _entries(kind: type[errors.SerinError], level: int) -> Iterator[str]:
    messages = _messages()
    for child in kind.__subclasses__():
        if child.__module__ != errors.__name__:
            continue
        yield f"\n{'#' * min(level, 4)} {child.__name__}\n"
        yield _entry(child, messages.get(child.__name__))
        yield from _entries(child, level + 1)


def _entry(kind: type[errors.SerinError], message: str | None) -> str:
    parts = [_when(kind)]
    if message:
        quoted = html.escape(message, quote=False).replace("\n", "\n> ")
        parts.append(f"> {quoted}")
    facts = [f"Exit code {kind.exit_code}"]
    if kind.exit_code == 2:
        facts.append("correct the spec or the argument, then run the command again")
    if kind.retryable:
        facts.append("retryable: run the same command again")
    parts.append("; ".join(facts) + ".")
    return "\n\n".join(part for part in parts if part) + "\n"


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


def _messages() -> dict[str, str]:
    """The text that each class gives to its base, by name: read from the source, so that it cannot go stale."""
    tree = ast.parse(inspect.getsource(errors))
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    return {node.name: text for node in classes if (text := _message(node))}


def _message(node: ast.ClassDef) -> str | None:
    for call in ast.walk(node):
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "super().__init__" and call.args:
            return _template(call.args[0], node)
    return None


def _template(value: ast.expr, scope: ast.ClassDef) -> str | None:
    if isinstance(value, ast.Constant):
        return str(value.value)
    if isinstance(value, ast.JoinedStr):
        return "".join(_piece(part) for part in value.values)
    if isinstance(value, ast.Name):
        assigned = [node for node in ast.walk(scope) if isinstance(node, ast.Assign)]
        found = [node.value for node in assigned if ast.unparse(node.targets[0]) == value.id]
        return _template(found[0], scope) if len(found) == 1 else None
    return None


def _piece(part: ast.expr) -> str:
    if isinstance(part, ast.FormattedValue):
        names = [node.id for node in ast.walk(part.value) if isinstance(node, ast.Name)]
        return "{" + (names[-1] if names else "...") + "}"
    return str(part.value) if isinstance(part, ast.Constant) else ""
