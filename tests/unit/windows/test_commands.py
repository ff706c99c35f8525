"""`serin events`: keys and files as people write them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from serin.errors import SpecError
from serin.formats.schema import DTYPE_OF_KIND, InputColumn, Kind
from serin.formats.windows import WindowPlan
from serin.pipeline.events import read_key
from tests.unit.windows.test_step import NOW, plan


def keyed(*kinds: Kind) -> WindowPlan:
    """A plan whose key has one column of each kind, of that name."""
    made = plan()
    inputs = [InputColumn(name=kind, kind=kind, dtype=DTYPE_OF_KIND[kind]) for kind in kinds]
    return replace(made, inputs=tuple(inputs), windows=(replace(made.windows[0], by=kinds),))


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        ("string", "c7", "c7"),
        ("string", "12", "12"),
        ("string", "a=b", "a=b"),
        ("string", "", None),
        ("int", "12", 12),
        ("bool", "true", 1),
        ("timestamp", str(NOW), NOW),
        ("timestamp", "1970-01-01T00:00:01Z", 1_000_000),
    ],
)
def test_a_key_is_read_as_its_column_has_it(kind: Kind, text: str, value: Any) -> None:
    assert read_key(keyed(kind), [f"{kind}={text}"]) == {kind: [value]}


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["int=twelve", "string=a"], "'twelve' cannot be used: it is not a int"),
        (["int=1.5", "string=a"], "is not a int"),
        ([f"int={2**63}", "string=a"], "is not a int"),
        (["int=1"], "name each key column once: int=VALUE, string=VALUE"),
        (["int=1", "string=a", "string=b"], "name each key column once"),
        (["int=1", "text=a"], "name each key column once"),
    ],
)
def test_a_key_that_cannot_be_one_is_refused(words: list[str], problem: str) -> None:
    with pytest.raises(SpecError, match=problem):
        read_key(keyed("int", "string"), words)
