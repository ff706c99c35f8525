from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from benchmarks.race import Lap, Result, Role, Unequal, race


class FakeRunner:
    """Takes the seconds it was given, one after the other, and notes when its turn was."""

    def __init__(self, name: str, seconds: list[float], turns: list[str]) -> None:
        self._name, self._seconds, self._turns = name, iter(seconds), turns

    def run(self, request: Mapping[str, Any]) -> Lap:
        self._turns.append(self._name)
        return Lap(seconds=next(self._seconds), peak_bytes=10, answer=dict(request))


def runners(turns: list[str], **seconds: list[float]) -> dict[str, tuple[Role, FakeRunner]]:
    roles: dict[str, Role] = {"ours": "ours", "limit": "limit"}
    return {
        name: (roles.get(name, "peer"), FakeRunner(name, times, turns)) for name, times in seconds.items()
    }


def accept_all(name: str, request: Mapping[str, Any], lap: Lap) -> None:
    pass


def test_every_round_holds_each_contender_once_and_another_begins() -> None:
    turns: list[str] = []
    race(runners(turns, ours=[1.0] * 8, polars=[2.0] * 8, limit=[0.5] * 8), lambda *_: {}, accept_all)
    rounds = [turns[start : start + 3] for start in range(0, len(turns), 3)]
    assert len(rounds) == 8
    assert all(sorted(one) == ["limit", "ours", "polars"] for one in rounds)
    assert [one[0] for one in rounds[:4]] == ["ours", "polars", "limit", "ours"]


def test_the_first_round_warms_up_and_is_not_counted() -> None:
    results = race(runners([], ours=[99.0] + [1.0] * 7), lambda *_: {}, accept_all)
    assert results["ours"].seconds == [1.0] * 7


def test_a_rare_contender_is_compared_with_the_rounds_it_took_part_in() -> None:
    turns: list[str] = []
    ours = [9.0, 1.0, 50.0, 50.0, 2.0, 50.0, 50.0, 4.0]  # the warm-up, then rounds 1 to 7
    found = race(
        runners(turns, ours=ours, dask=[99.0, 3.0, 10.0, 16.0]), lambda *_: {}, accept_all, rare=("dask",)
    )
    assert turns.count("dask") == 4
    assert found["dask"].rounds == (1, 4, 7)
    assert found["dask"].seconds == [3.0, 10.0, 16.0]
    assert found["dask"].times_as_long_as(found["ours"]) == 4.0
    assert found["ours"].times_as_long_as(found["dask"]) == 0.25


def test_no_time_is_accepted_of_an_answer_that_is_not_equal() -> None:
    def accept(name: str, request: Mapping[str, Any], lap: Lap) -> None:
        if name == "polars":
            raise Unequal("polars, train: 3 values, ours has 4")

    with pytest.raises(Unequal, match="polars"):
        race(runners([], ours=[1.0] * 8, polars=[0.1] * 8), lambda *_: {}, accept)


def test_fewer_than_seven_repetitions_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 7"):
        race(runners([], ours=[1.0] * 8), lambda *_: {}, accept_all, repetitions=3)


def test_a_ratio_compares_the_same_round_so_that_a_slow_spell_cancels() -> None:
    slow_spell = [1.0, 1.0, 1.0, 4.0, 4.0, 4.0, 4.0]
    ours = Result(role="ours", laps=tuple(Lap(seconds=s, peak_bytes=0) for s in slow_spell))
    peer = Result(role="peer", laps=tuple(Lap(seconds=2 * s, peak_bytes=0) for s in slow_spell))
    assert peer.times_as_long_as(ours) == 2.0
