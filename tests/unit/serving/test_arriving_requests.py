"""How many requests a gateway says are still being received after its routes have changed."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from serin.serving.envoy import gateway as module
from serin.serving.envoy.api_types import RECEIVE_S
from serin.serving.envoy.gateway import Gateway


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def gateway_with(folder: Path, monkeypatch: pytest.MonkeyPatch, *readings: tuple[int, int]) -> Gateway:
    """`readings`: in this order, requests of clients that are not answered, and those at releases."""
    made = Gateway(folder, admin=folder / "a.sock", log=folder / "requests.jsonl")
    left: Iterator[int] = (number for reading in readings for number in reading)
    monkeypatch.setattr(made.admin, "stats", lambda _: {"one": "0", "all": str(next(left))})
    return made


def test_they_are_those_that_no_release_has_been_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = gateway_with(tmp_path, monkeypatch, (5, 2), (5, 4), (2, 2), (3, 2), (2, 2), (1, 2))
    assert [made.arriving_requests() for _ in range(3)] == [3, 1, 0]
    assert made.arriving_requests() == 0, (
        "those that came later have the new routes: nobody is asked any more"
    )


def test_after_the_longest_time_that_a_request_may_take_to_arrive_there_are_none(
    tmp_path: Path, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = gateway_with(tmp_path, monkeypatch, (5, 2), (5, 2))
    clock[0] += RECEIVE_S
    assert made.arriving_requests() == 3
    clock[0] += 0.1
    assert made.arriving_requests() == 0
