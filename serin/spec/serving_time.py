"""What is known when a request is made: the rules of `data.target.known_at_serving`, and why a column is not known."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from serin.errors import nearest
from serin.expressions import parse

if TYPE_CHECKING:
    from serin.spec.data import DataSpec


def known_problems(data: DataSpec) -> Iterator[tuple[str, str]]:
    """What is wrong with `data.target.known_at_serving`, as (key, problem and how to fix it)."""
    key = "data.target.known_at_serving"
    known = data.target.known_at_serving
    for name in known:
        if name not in data.answers:
            yield key, f"the target does not read {name!r}; take it out{nearest(name, data.answers)}"
        elif name in data.derived:
            inputs = ", ".join(data.reads(name))
            yield (
                key,
                f"{name!r} is derived; name those of the columns it is made of that clients know: {inputs}",
            )
        elif reason := _said_unknown(data, name):
            yield key, f"{name!r}: {reason}"
    for text in data.target.each.values() if known else ():
        made_of = data.made_of(parse(text).columns) - data.derived.keys()
        if made_of <= set(known):
            yield (
                key,
                f"clients who know all that {text!r} reads know the answer; leave out what they do not know",
            )


def why_unknown(data: DataSpec, column: str) -> str:
    """Why no request can hold a column whose source is `training_only`, and what can be done about it."""
    if column in data.hidden_answers:
        return _why_of_target(data, column)
    if reason := _said_unknown(data, column):
        return f"{column!r} is not known when a request is made: {reason}"
    inner = next(name for name in data.reads(column) if data.source_of(name) == "training_only")
    return f"{column!r} is derived from {inner!r}, and {why_unknown(data, inner)}"


def _why_of_target(data: DataSpec, column: str) -> str:
    text = f"{column!r} makes the target, and a feature that knows the answer is refused: leave it out"
    if column in data.derived:
        return f"{text}, or derive another column from what clients know"
    others = data.answers - data.derived.keys() - {column, *data.target.known_at_serving}
    if not others:
        return text
    known = ", ".join([*data.target.known_at_serving, column])
    return f"{text}, or, when clients know it before the answer, add data.target.known_at_serving: [{known}]"


def _said_unknown(data: DataSpec, column: str) -> str | None:
    """Which key of the spec says that a column is not known, and how to change that."""
    if column in data.training_only:
        return "data.training_only names it; take it out there when clients know it, or leave it out here"
    for index, join in enumerate(data.joins):
        if column in join.columns.values() and join.source == "training_only":
            change = "request when clients send it, or to lookup when the model shall look it up"
            return (
                f"data.joins[{index}] has source: training_only; set that to {change}, or leave it out here"
            )
    for index, window in enumerate(data.windows):
        if column in window.make and window.source == "training_only":
            change = "request when clients send it"
            return (
                f"data.windows[{index}] has source: training_only; set that to {change}, or leave it out here"
            )
    return None
