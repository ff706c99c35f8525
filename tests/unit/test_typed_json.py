from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import pytest

from serin.machine.typed_json import Document, Row, Stored


@dataclass(frozen=True, slots=True)
class Counts(Row):
    requests: int = 0
    errors: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    name: str
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Example(Document, form="serin.example", version=3, omit=("note",)):
    kind: Literal["a", "b"]
    total: Counts
    parts: tuple[Part, ...] = ()
    seconds: Mapping[int, Counts] = field(default_factory=dict)
    letters: Annotated[tuple[str, ...], Stored(tuple, "".join)] = ()
    note: str | None = None
    rest: Mapping[str, Any] = field(default_factory=dict)


FULL = Example(
    kind="b",
    total=Counts(3, 1),
    parts=(Part(name="ü", share=float("inf")), Part(name="", share=0.5)),
    seconds={11: Counts(1, 0), 2: Counts()},
    letters=("x", "y"),
    note="why",
    rest={"pair": (1, None)},
)
DOCUMENT = {
    "format": "serin.example",
    "version": 3,
    "kind": "b",
    "total": [3, 1],
    "parts": [{"name": "ü", "share": float("inf")}, {"name": "", "share": 0.5}],
    "seconds": {"11": [1, 0], "2": [0, 0]},
    "letters": "xy",
    "note": "why",
    "rest": {"pair": [1, None]},
}


def test_a_document_has_its_fields_in_their_order_and_comes_back_as_it_was_written() -> None:
    assert FULL.dump() == json.dumps(DOCUMENT).encode()
    assert FULL.to_json() == json.loads(FULL.dump())
    again = Example.load(FULL.dump())
    assert (again.total, again.parts, again.seconds) == (FULL.total, FULL.parts, FULL.seconds)
    assert again.dump() == FULL.dump()


def test_what_is_absent_has_its_default_and_what_is_empty_may_be_left_out() -> None:
    small = {"format": "serin.example", "version": 3, "kind": "a", "total": [0, 0]}
    assert Example.from_json(small) == Example(kind="a", total=Counts())
    assert "note" not in Example(kind="a", total=Counts()).to_json()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "not a serin.example document of version 3"),
        ({"format": "serin.other"}, "not a serin.example document"),
        ({"kind": "c"}, "kind: Input should be 'a' or 'b', not 'c'"),
        ({"total": [1]}, "total: zip"),
        ({"total": None}, "TypeError"),
        ({"total": [1, "many"]}, "total: errors: Input should be a valid integer.*, not 'many'"),
        ({"parts": [{"name": "p"}]}, "parts: 0: share: Field required"),
        ({"parts": [{"name": "p", "share": 1, "size": 2}]}, "parts: 0: size: Unexpected"),
        ({"seconds": {"1": [1, 2, 3]}}, "seconds: 1: zip"),
        ({"colour": "red"}, "colour: Unexpected"),
    ],
)
def test_a_document_that_is_not_right_is_refused_with_the_place(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Example.from_json({**DOCUMENT, **change})


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b'"text"', b"\xff", b"[" * 200_000])
def test_what_is_no_document_is_refused(content: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        Example.load(content)
