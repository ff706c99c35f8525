"""The history counts every request exactly once, forgets detail with age, and stays small."""

import random
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serin.formats.serving.request import Request
from serin.monitoring.history.read import counts_since, history_file, models_with_history, read_history
from serin.monitoring.history.sketch import (
    ERROR,
    Series,
    Sketch,
    Tally,
    bins_of,
    merge,
    pack,
    quantiles_ms,
    tally,
    unpack,
)
from serin.monitoring.history.store import DAY_S, KEPT_S, History
from tests.unit.monitoring.request_lines import GOOD, append, line

T = 1_800_000_000  # a whole hour
LIMIT_MS = 20.0


def _limit(model: str, release: str) -> float | None:
    return None if model == "elsewhere" else LIMIT_MS


def _sketch(us: np.ndarray) -> Sketch:
    return Sketch(*np.unique(bins_of(us), return_counts=True))


def _read_all(history: History, log: Path) -> int:
    count, more = 0, True
    while more:
        read, more = history.read_log(log, _limit)
        count += read
    return count


def _totals(home: Path, model: str = "flights") -> tuple[int, int, int]:
    found = counts_since(home, model, 0)
    return (
        sum(each.requests for each in found),
        sum(each.errors for each in found),
        sum(each.slow for each in found),
    )


@given(st.lists(st.floats(1.0, 3e9), min_size=1, max_size=200), st.sampled_from((0, 0.5, 0.95, 0.99, 1)))
def test_a_quantile_is_within_one_percent_of_a_latency_that_occurred(
    us: list[float], quantile: float
) -> None:
    (found,) = quantiles_ms(_sketch(np.array(us)), [quantile])
    exact = float(np.quantile(us, quantile, method="higher")) / 1000
    assert found == pytest.approx(exact, rel=ERROR * (1 + 1e-9))


@given(st.lists(st.floats(0.0, 1e12), max_size=100), st.lists(st.floats(0.0, 1e12), max_size=100))
def test_sketches_add_up_to_the_sketch_of_everything_and_survive_packing(
    some: list[float], others: list[float]
) -> None:
    whole = _sketch(np.array(some + others, dtype=float))
    added = merge([unpack(pack(_sketch(np.array(part, dtype=float)))) for part in (some, others)])
    assert (added.bins.tolist(), added.counts.tolist()) == (whole.bins.tolist(), whole.counts.tolist())


def _random_requests(number: int) -> list[Request]:
    draw = random.Random(3)
    return [
        GOOD._replace(
            t=T + draw.random() * 300,
            model=draw.choice(("flights", "elsewhere")),
            arm=draw.choice(("stable", "candidate")),
            release=draw.choice(("flights-v1", "flights-v2")),
            code=draw.choice((200, 200, 200, 400, 404, 500, 503, 0)),
            grpc=draw.choice((None, None, 0, 1, 3, 14)),
            us=draw.choice((None, 1_000.0, 19_999.0, 20_000.0, 20_001.0, 90_000.0)),
            attempts=draw.choice((1, 1, 2)),
            flags=draw.choice(("-", "-", "DC", "UF,DR", "UF")),
            ms=draw.choice((None, 3.0, 22.9, 23.0, 23.1, 5_000.0)),
            received_ms=draw.choice((None, 3.0, 3.0)),
        )
        for _ in range(number)
    ]


def _naive(requests: list[Request]) -> dict[tuple[Series, int], tuple[int, ...]]:
    found: dict[tuple[Series, int], list[int]] = {}
    for each in requests:
        answer_failed = each._replace(attempts=1).failed
        limit = _limit(each.model, each.release)
        gone = each.cancelled and each.us is None
        waited_us = each.waited_us if gone else each.us
        late = limit is not None and waited_us is not None and waited_us > limit * 1000
        key = Series(each.model, each.release, each.arm), int(each.t) // 60 * 60
        marks = (
            1,
            answer_failed,
            not answer_failed and each.attempts > 1,
            not answer_failed and late,
            each._replace(attempts=1).refused,
            gone and not answer_failed and not late,
            each.us is not None,
        )
        found[key] = [a + b for a, b in zip(found.get(key, [0] * 7), marks, strict=True)]
    return {key: tuple(sums) for key, sums in found.items()}


def test_a_batch_is_counted_as_one_request_at_a_time_would_be() -> None:
    requests = _random_requests(3_000)
    counted = {
        key: (each.requests, each.errors, each.saved, each.slow, each.refused, each.gone, each.latency.total)
        for key, each in tally(requests, _limit).items()
    }
    assert counted == _naive(requests)
    assert tally([], _limit) == {}


def test_the_history_follows_a_log_that_grows_and_is_rotated(tmp_path: Path) -> None:
    log, requests = tmp_path / "requests.jsonl", _random_requests(600)
    expected = sum(each.model == "flights" for each in requests)
    with_history = History(tmp_path)
    append(log, requests[:200])
    with log.open("a") as stream:
        stream.write(line(requests[200])[:40])  # a line that is being written
    assert _read_all(with_history, log) == 200
    log.write_text("".join(map(line, requests[:300])))
    log.rename(tmp_path / "requests.jsonl.1")
    append(log, requests[300:])
    assert _read_all(with_history, log) == 400
    assert _read_all(with_history, log) == 0
    with_history.close()
    assert _totals(tmp_path)[0] == expected
    assert models_with_history(tmp_path) == ["elsewhere", "flights"]


def test_a_reader_that_is_killed_again_and_again_counts_each_line_once(tmp_path: Path) -> None:
    log = tmp_path / "requests.jsonl"
    append(
        log,
        (GOOD._replace(t=T + number / 100, code=500 if number % 7 == 0 else 200) for number in range(7_000)),
    )
    code = f"""
import os, random, signal, sys
from pathlib import Path
from serin.monitoring.history import store
store._BATCH_BYTES = 20_000
history, left = store.History(Path({str(tmp_path)!r})), int(sys.argv[1])
merge_in = history._merge_in
def merging(*arguments):
    global left
    left -= 1
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    merge_in(*arguments)
history._merge_in = merging
while history.read_log(Path({str(log)!r}), lambda *_: 20.0)[1]:
    pass
"""
    for batches in (5, 17, 1, 1_000):
        done = subprocess.run([sys.executable, "-c", code, str(batches)], timeout=60)
        assert done.returncode == (0 if batches == 1_000 else -signal.SIGKILL)
    assert _totals(tmp_path) == (7_000, 1_000, 0)


def _fill(home: Path, model: str, *, days: int = 30) -> History:
    """One row for every minute of the last days, as if counted on time."""
    history = History(home)
    draw = np.random.default_rng(5)
    sketches = [_sketch(draw.lognormal(8.5, 0.4, 1_200)) for _ in range(50)]
    for day in range(days):
        counted = {
            (Series(model, f"{model}-v1", "stable"), T - (days - day) * DAY_S + minute * 60): Tally(
                requests=1_200, errors=1, saved=0, slow=12, refused=0, latency=sketches[minute % 50]
            )
            for minute in range(1_440)
        }
        with history._transaction():
            history._add(counted)
        for _ in range(8):
            history.tidy(T - (days - day - 1) * DAY_S)
    return history


@pytest.fixture(scope="module")
def month(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("month")
    _fill(home, "flights").close()
    return home


def test_old_rows_become_wider_and_nothing_is_lost(month: Path) -> None:
    rows = counts_since(month, "flights", 0)
    assert _totals(month) == (30 * 1_440 * 1_200, 30 * 1_440, 30 * 1_440 * 12)
    age_of = {width: [T - each.t for each in rows if each.width_s == width] for width in (60, 600, 3_600)}
    assert max(age_of[60]) <= 2 * DAY_S + 7 * 3_600
    assert 2 * DAY_S <= max(age_of[600]) <= 7 * DAY_S + 7 * 3_600
    assert max(age_of[3_600]) == 30 * DAY_S
    view = read_history(month, "flights", T - 30 * DAY_S, T, step_s=3_600)
    (series,) = view.series
    assert len(series.points) == 720
    assert {point.requests for point in series.points} == {72_000}
    exact = np.exp(8.5) / 1000
    assert all(point.p50_ms == pytest.approx(exact, rel=0.03) for point in series.points)


def test_the_history_of_100_models_over_30_days_takes_less_than_half_a_gigabyte(month: Path) -> None:
    size = sum(file.stat().st_size for file in history_file(month).path.parent.iterdir())
    print(f"{size / 1e6:.2f} MB for one model of 20 requests/s over 30 days")
    assert 100 * size < 500e6


def test_a_clock_that_is_wrong_for_a_moment_costs_an_hour_of_the_oldest_detail(tmp_path: Path) -> None:
    history = _fill(tmp_path, "flights", days=3)
    before = _totals(tmp_path)[0]
    history.tidy(T + 365 * DAY_S)
    history.tidy(T - 365 * DAY_S)
    history.close()
    assert before - _totals(tmp_path)[0] <= 3_600 / 60 * 1_200


def test_what_is_older_than_31_days_is_forgotten_with_its_series(tmp_path: Path) -> None:
    history = History(tmp_path)
    log = tmp_path / "requests.jsonl"
    append(log, [GOOD._replace(t=T), GOOD._replace(t=T + 40 * DAY_S, release="flights-v2")])
    _read_all(history, log)
    for _ in range(200):
        history.tidy(T + 40 * DAY_S)
    append(log, [GOOD._replace(t=T + 40 * DAY_S)])
    _read_all(history, log)
    history.close()
    assert [(each.release, each.t) for each in counts_since(tmp_path, "flights", 0)] == [
        ("flights-v1", T + 40 * DAY_S),
        ("flights-v2", T + 40 * DAY_S),
    ]
    assert KEPT_S > 30 * DAY_S


def test_a_damaged_history_is_put_aside_and_the_log_is_read_again(tmp_path: Path) -> None:
    log = tmp_path / "requests.jsonl"
    append(log, [GOOD._replace(t=T)])
    path = history_file(tmp_path).path
    path.parent.mkdir()
    path.write_bytes(b"no database" * 500)
    assert read_history(tmp_path, "flights", 0, T) is None
    history = History(tmp_path)
    assert _read_all(history, log) == 1
    history.close()
    assert list(path.parent.glob("history.broken-*"))


def test_a_home_without_a_history_has_none(tmp_path: Path) -> None:
    assert read_history(tmp_path, "flights", 0, T) is None
    assert counts_since(tmp_path, "flights", 0) == []
    assert list(tmp_path.iterdir()) == []
