from __future__ import annotations

import pytest

from serin.serving.triton import probe
from serin.serving.triton.probe import answers
from serin.store.artifacts import Release
from tests.unit.serving.bundles import SCHEMA

V1 = Release(model="delays", version=1)


@pytest.mark.parametrize(
    ("asked", "alive"),
    [
        ([True], True),
        ([False, True], True),
        ([False, False, True], True),
        ([False, False, False, True], False),
        ([TimeoutError(), True], True),
        ([TimeoutError(), TimeoutError(), True], False),
        ([TimeoutError(), False, True], True),
        ([ConnectionRefusedError(), True], False),
    ],
)
def test_busy_is_not_dead_and_a_row_that_failed_once_is_asked_again(
    asked: list[bool | OSError], alive: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = list(asked)

    def ask(*_: object) -> bool:
        found = left.pop(0)
        if isinstance(found, OSError):
            raise found
        return found

    monkeypatch.setattr(probe, "_asked", ask)
    assert answers("127.0.0.1:1", V1, SCHEMA) is alive
