"""Burn rates, budgets, blame and latencies, decided from numbers alone."""

from typing import Any

import pytest

from serin.formats.serving.request import Request
from serin.monitoring.latency import summarise
from serin.monitoring.objectives.burn import (
    PAIRS,
    PERIOD_S,
    WINDOWS,
    Objective,
    Pair,
    Row,
    Share,
    blame,
    budget_left,
    burning_since,
    firing_pair,
    objective_alert,
)
from serin.monitoring.rollbacks import Rollback, refusal
from serin.store.artifacts import Release

AVAILABLE = Objective(name="availability", target=0.999)
FAST = Objective(name="latency", target=0.99, limit_ms=20.0)
FIRST, SECOND, THIRD = PAIRS
MINUTE, HOUR = 60, 3_600
T = 1_800_000_000.0


def windows_of(minutes: list[Share]) -> dict[int, Share]:
    """The windows at the end of the last minute; each minute has one share."""
    return {
        window: Share(
            sum(each.requests for each in minutes[-window // MINUTE :]),
            sum(each.bad for each in minutes[-window // MINUTE :]),
        )
        for window in WINDOWS
    }


def first_alert(before: int, wave: list[Share], good: Share) -> tuple[int, Pair] | None:
    """The minute of the wave in which a pair fires."""
    minutes = [good] * before
    for minute, share in enumerate(wave):
        minutes.append(share)
        if pair := firing_pair(AVAILABLE, windows_of(minutes)):
            return minute + 1, pair
    return None


def test_a_wave_of_2_percent_is_a_page_within_the_hour_and_not_at_once() -> None:
    found = first_alert(3 * 24 * 60, [Share(1_000, 20)] * 60, Share(1_000, 0))
    assert found == (44, FIRST)  # 14.4 times 0.1% of an hour: 72% of it


def test_a_wave_of_half_the_budget_is_never_an_alert() -> None:
    """0.05% of requests fail, for three days."""
    assert first_alert(60, [Share(10_000, 5)] * (8 * 60), Share(10_000, 0)) is None
    assert firing_pair(AVAILABLE, windows_of([Share(10_000, 5)] * (3 * 24 * 60))) is None


def test_a_slow_burn_is_a_page_of_the_second_pair_and_a_slower_one_a_ticket() -> None:
    slow = first_alert(3 * 24 * 60, [Share(1_000, 8)] * (6 * 60), Share(1_000, 0))
    assert slow is not None
    assert (slow[1], slow[0]) == (SECOND, 6 * 60 * 6 // 8)
    slower = [Share(1_000, 0)] * (36 * 60) + [Share(1_000, 2)] * (36 * 60)
    assert firing_pair(AVAILABLE, windows_of(slower[:-1])) is None
    assert firing_pair(AVAILABLE, windows_of(slower)) == THIRD


def test_a_burst_that_is_over_is_no_alert_and_ends_one() -> None:
    minutes = [Share(1_000, 0)] * 60 + [Share(1_000, 300)] * 4
    assert firing_pair(AVAILABLE, windows_of(minutes)) == FIRST
    assert firing_pair(AVAILABLE, windows_of([*minutes, *[Share(1_000, 0)] * 4])) == FIRST
    after = windows_of([*minutes, *[Share(1_000, 0)] * 5])
    assert firing_pair(AVAILABLE, after) is None or firing_pair(AVAILABLE, after) == SECOND


@pytest.mark.parametrize(
    ("shares", "fires"),
    [
        ([Share(3, 1)], False),  # one failure at night
        ([Share(1, 1)] * 2, False),
        ([Share(1, 0)] * 55 + [Share(1, 1)] * 5, False),
        ([Share(1, 0)] * 50 + [Share(1, 1)] * 10, True),  # an outage at a request per minute
        ([Share(0, 0)] * 55 + [Share(100, 100)] * 5, True),
        ([], False),
    ],
)
def test_little_traffic_needs_ten_bad_requests(shares: list[Share], fires: bool) -> None:
    assert (firing_pair(AVAILABLE, windows_of(shares)) is not None) is fires


def test_the_first_failures_of_a_new_model_are_not_taken_for_those_of_three_days() -> None:
    windows = windows_of([Share(100, 0)] * 60 + [Share(100, 2)] * 10)
    assert firing_pair(AVAILABLE, windows) == THIRD
    assert firing_pair(AVAILABLE, windows, age_s=70 * 60) is None
    assert firing_pair(AVAILABLE, windows_of([Share(100, 100)] * 3), age_s=180) == FIRST


def test_the_budget_is_a_share_of_the_requests_of_30_days() -> None:
    assert budget_left(AVAILABLE, Share(1_000_000, 250)) == pytest.approx(0.75)
    assert budget_left(AVAILABLE, Share(1_000_000, 3_000)) == pytest.approx(-2.0)
    assert budget_left(FAST, Share(1_000, 10)) == pytest.approx(0.0)
    assert budget_left(FAST, Share()) is None


def test_a_short_outage_of_a_new_model_does_not_use_up_a_month() -> None:
    outage = Share(9_000, 300)
    assert budget_left(AVAILABLE, outage, age_s=1_500) == pytest.approx(1 - 1_500 / PERIOD_S * 1_000 / 30)
    assert budget_left(AVAILABLE, outage, age_s=2 * PERIOD_S) == budget_left(AVAILABLE, outage)


def test_a_burn_began_where_the_most_is_beyond_the_threshold() -> None:
    rows = [(T + 60 * n, Share(1_000, 0 if n < 30 else 25)) for n in range(60)]
    assert burning_since(AVAILABLE, rows, 14.4) == T + 60 * 30
    assert burning_since(AVAILABLE, [(t, Share(1_000, 1)) for t, _ in rows], 14.4) is None


def minute_rows(version: int, first: int, last: int, *, bad: int = 0, requests: int = 600) -> list[Row]:
    return [
        Row(t=T + MINUTE * minute, version=str(version), share=Share(requests, bad))
        for minute in range(first, last)
    ]


@pytest.mark.parametrize(
    ("rows", "guilty", "words"),
    [
        # minute 0: promotion of version 2; judged at minute 60
        (minute_rows(1, -360, 0) + minute_rows(2, 0, 60, bad=18), True, "3.00%; version 1: 0.00%"),
        (
            minute_rows(1, -360, 0) + minute_rows(2, -120, 0, requests=6) + minute_rows(2, 0, 60, bad=18),
            True,
            "since the release of version 2 too many requests fail",
        ),
        (minute_rows(1, -360, 0, bad=1) + minute_rows(2, 0, 60, bad=18), False, "broke the promise too"),
        (minute_rows(1, -360, 0, requests=0) + minute_rows(2, 0, 60, bad=18), False, "only 0 requests"),
        (minute_rows(1, -360, 0) + minute_rows(2, 0, 60), False, "alone does not burn"),
        (minute_rows(1, -360, 60, bad=18) + minute_rows(2, 0, 60), False, "alone does not burn"),
    ],
)
def test_a_release_is_to_blame_when_it_burns_and_the_one_before_did_not(
    rows: list[Row], guilty: bool, words: str
) -> None:
    rows.sort(key=lambda row: row.t)
    verdict = blame(AVAILABLE, rows, live="2", previous="1", promoted=T, now=T + 60 * MINUTE)
    assert verdict.guilty is guilty
    assert words in verdict.why


def test_a_burn_that_begins_hours_after_the_release_is_not_its_fault() -> None:
    rows = minute_rows(1, -360, 0) + minute_rows(2, 0, 300) + minute_rows(2, 300, 345, bad=30)
    verdict = blame(AVAILABLE, rows, live="2", previous="1", promoted=T, now=T + 345 * MINUTE)
    assert (verdict.guilty, verdict.why) == (
        False,
        "the burn began more than an hour after the release of version 2",
    )


def rollback(**changes: Any) -> Rollback:
    fields = {
        "t": T, "from_version": 3, "to_version": 2, "by": "objectives", "why": "", "command": "a", "accepted": True,
        "outcome": "rolling back",
    }  # fmt: skip
    return Rollback(**(fields | changes))


def release(version: int, edition: int = 1) -> Release:
    return Release(model="flights", version=version, edition=edition)


@pytest.mark.parametrize(
    ("changes", "made", "words"),
    [
        ({}, (), None),
        ({"live": release(3, 2), "previous": release(3)}, (rollback(),), None),
        ({"live": release(3), "previous": release(3, 2)}, (), "because of a rollback"),
        ({"previous": None}, (), "no version was live before"),
        ({"live": None}, (), "no version was live before"),
        ({"rollout_runs": True}, (), "decides itself"),
        ({"live": release(2), "previous": release(3)}, (rollback(),), "because of a rollback"),
        ({}, (rollback(),), "a second time is for a person"),
        ({}, (rollback(accepted=False),), None),
        ({}, (rollback(accepted=False, outcome=None),), "a second time is for a person"),
        ({"live": release(4)}, (rollback(),), None),
    ],
)
def test_no_version_is_rolled_back_twice_and_no_two_take_turns(
    changes: dict[str, Any], made: tuple[Rollback, ...], words: str | None
) -> None:
    found = refusal(made, **({"live": release(3), "previous": release(2), "rollout_runs": False} | changes))
    assert found is None if words is None else words in str(found)


def test_an_alert_says_what_is_wrong_and_what_is_allowed() -> None:
    shares = {300: Share(3_000, 60), HOUR: Share(36_000, 600)}
    alert = objective_alert(
        AVAILABLE,
        FIRST,
        shares,
        model="flights",
        release="flights-v2",
        since=T,
        left=0.4,
        more="no rollback: x",
    )
    assert alert.text == (
        "2.00% of 3000 requests in the last 5 min and 1.67% of 36000 in the last 1 h fail; 0.10% are allowed. "
        "The error budget burns at 20.0 and 16.7 times the rate that it can bear for 30 days (limit 14.4). "
        "40% of the budget of 30 days is left. No rollback: x."
    )
    assert (alert.key, alert.severity) == ("flights/objective/availability", "page")
    slow = objective_alert(
        FAST,
        THIRD,
        {21_600: Share(1, 1), 259_200: Share(1, 1)},
        model="m",
        release="m-v1",
        since=T,
        left=-1.0,
    )
    assert "take longer than 20 ms" in slow.text
    assert "used up" in slow.text


def request(t: float = 100.0, ms: float | None = 5.0, **changes: Any) -> Request:
    us = None if ms is None else ms * 1000
    return Request(t, "flights", 3, "stable", "flights-v1", 200, None, us, 1, "-", "a")._replace(**changes)


def test_quantiles_are_those_of_the_requests() -> None:
    (found,) = summarise([request(ms=float(ms)) for ms in range(1, 101)], 10.0)
    assert (found.p50_ms, found.p95_ms, found.p99_ms) == (51.0, 96.0, 100.0)


def test_each_release_and_arm_is_summed_up_by_itself() -> None:
    requests = [
        *(request(t) for t in (91.0, 95.0, 100.0)),
        request(arm="candidate", release="flights-v2", code=503),
        request(arm="candidate", release="flights-v2"),
        request(arm="pinned", release="flights-v2"),
        request(model="taxis", release="taxis-v1"),
    ]
    found = {
        (each.release, each.arm): (each.requests, each.error_share) for each in summarise(requests, 10.0)
    }
    assert found == {
        ("flights-v1", "stable"): (3, 0.0),
        ("flights-v2", "candidate"): (2, 0.5),
        ("flights-v2", "pinned"): (1, 0.0),
        ("taxis-v1", "stable"): (1, 0.0),
    }


def test_only_the_window_counts() -> None:
    requests = [request(float(t)) for t in range(100)]
    (newest,) = summarise(requests, 10.0)
    (older,) = summarise(requests, 10.0, until=49.0)
    assert (newest.requests, newest.requests_per_s, older.requests) == (10, 1.0, 10)
    assert summarise(requests, 10.0, until=500.0) == ()
    assert summarise([], 10.0) == ()


def test_a_request_that_was_given_up_counts_but_has_no_latency() -> None:
    (found,) = summarise([request(ms=None, code=0, flags="DC")], 10.0)
    assert (found.requests, found.p99_ms, found.error_share) == (1, None, 0.0)
