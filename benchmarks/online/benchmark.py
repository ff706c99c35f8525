"""The online benchmark: what windows over past events add to a request, with a million keys and beside pushed events.

Requests with and without windows take turns at the same rate. The limit is the model whose clients send the columns.
"""

from __future__ import annotations

import http.client
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from benchmarks.child import ContenderFailed
from benchmarks.machine import machine
from benchmarks.online.stack import EVENTS_A_KEY, PLAIN, WINDOWED, Running, bytes_a_key, running
from benchmarks.race import MIN_REPETITIONS
from benchmarks.report import Report
from serin.serving.tuning.load import Closed, LoadResult, Open, run_load
from serin.windows.state import MemoryState
from tests.unit.windows.test_same_bits import check_history

REQUESTS_PER_S: Final = 200.0
KEYS: Final = 1_000_000
_WARM_UP_S: Final = 0.5
_CLIENTS: Final = 8
_MOST_PER_S: Final = 3000
_PUSHED_AT_ONCE: Final = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Lap:
    p50_ms: float
    p99_ms: float
    requests_per_s: float  # in a closed loop


@dataclass(frozen=True, slots=True, kw_only=True)
class Push:
    """Events that were pushed while requests came at REQUESTS_PER_S. `memory_mb`: what the step took more at most."""

    events: int
    events_per_s: float
    requests: int
    failed: int
    p50_ms: float
    p99_ms: float
    memory_mb: float


def measure(*, full: bool, say: Callable[[str], None]) -> Report:
    rounds, lap_s, pushed = (25, 10.0, 1_000_000) if full else (MIN_REPETITIONS, 3.0, 50_000)
    histories = 600 if full else 100
    unequal = _unequal(histories)
    laps: dict[str, list[Lap]] = {PLAIN: [], WINDOWED: []}
    with (
        tempfile.TemporaryDirectory(prefix="serin-bench-") as scratch,
        running(Path(scratch), KEYS, say) as stack,
    ):
        for turn in range(rounds + 1):
            for model in (PLAIN, WINDOWED) if turn % 2 else (WINDOWED, PLAIN):
                lap = _lap(stack, model, lap_s)
                if turn:
                    laps[model].append(lap)
            say(f"round {turn} of {rounds}")
        size = bytes_a_key(stack.home)
        say(f"pushing {pushed:,} events beside {REQUESTS_PER_S:g} requests/s")
        push = _push(stack, pushed)
    added = {
        figure: statistics.median(
            getattr(a, figure) - getattr(b, figure) for a, b in zip(laps[WINDOWED], laps[PLAIN], strict=True)
        )
        for figure in ("p50_ms", "p99_ms")
    }
    line = {
        "p99_added_ms": added["p99_ms"], "p50_added_ms": added["p50_ms"], "unequal": float(unequal),
        "requests_per_s": _median(laps[WINDOWED], "requests_per_s"), "bytes_per_key": size,
        "push_failed": float(push.failed), "push_p99_ms": push.p99_ms, "push_events_per_s": push.events_per_s,
        "push_memory_mb": push.memory_mb,
    }  # fmt: skip
    return Report(
        benchmark="online",
        mode="full" if full else "quick",
        environment=machine(),
        cases={},
        tables=_table(laps, push, size),
        figures={
            **{name: [asdict(lap) for lap in each] for name, each in laps.items()},
            "push": asdict(push),
        },
        line=line,
        notes=[
            f"{histories} random histories were replayed event by event and compared with the ETL, bit by bit"
        ],
    )


def _unequal(histories: int) -> int:
    found = 0
    for seed in range(histories):
        try:
            check_history(seed, [MemoryState()])
        except AssertionError:
            found += 1
    return found


def _lap(stack: Running, model: str, seconds: float) -> Lap:
    count = int((seconds + _WARM_UP_S) * REQUESTS_PER_S) + 100
    paced = _checked(
        run_load(
            stack.target(model, count),
            Open(requests_per_s=REQUESTS_PER_S),
            seconds=seconds,
            warm_up_s=_WARM_UP_S,
        )
    )
    closed = _checked(
        run_load(stack.target(model, _MOST_PER_S), Closed(clients=_CLIENTS), seconds=1.0, warm_up_s=0.0)
    )
    return Lap(
        p50_ms=paced.quantile_ms(0.5), p99_ms=paced.quantile_ms(0.99), requests_per_s=closed.requests_per_s
    )


def _checked(result: LoadResult) -> LoadResult:
    if result.failed:
        raise ContenderFailed(f"{result.failed} requests failed: {result.errors}")
    return result


def _push(stack: Running, events: int) -> Push:
    before_mb, most_mb, spent, problem = stack.memory_mb(), 0.0, 0.0, list[str]()
    done = threading.Event()

    def push() -> None:
        nonlocal most_mb, spent
        wire = http.client.HTTPConnection(str(stack.address), timeout=60)
        began = time.monotonic()
        try:
            for _ in range(0, events, _PUSHED_AT_ONCE):
                body = json.dumps({"events": stack.events(_PUSHED_AT_ONCE)})
                wire.request("POST", f"/v2/models/{WINDOWED}/events", body)
                answer = wire.getresponse()
                text = answer.read()
                if answer.status != 200:
                    problem.append(f"{answer.status} {text[:200]!r}")
                    return
                most_mb = max(most_mb, stack.memory_mb())
        except OSError as error:
            problem.append(repr(error))
        finally:
            spent = time.monotonic() - began
            wire.close()
            done.set()

    pushing = threading.Thread(target=push)
    pushing.start()
    results: list[LoadResult] = []
    while not done.is_set():
        target = stack.target(WINDOWED, int(3 * REQUESTS_PER_S) + 100)
        results.append(run_load(target, Open(requests_per_s=REQUESTS_PER_S), seconds=3.0, stop=done.is_set))
    pushing.join()
    if problem:
        raise ContenderFailed(f"a push failed: {problem[0]}")
    latencies = [each for result in results for each in result.latencies]
    together = LoadResult(seconds=spent, outcomes={"200": len(latencies)}, latencies=latencies)
    return Push(
        events=events,
        events_per_s=events / spent,
        requests=sum(result.requests for result in results),
        failed=sum(result.failed for result in results),
        p50_ms=together.quantile_ms(0.5),
        p99_ms=together.quantile_ms(0.99),
        memory_mb=most_mb - before_mb,
    )


def _median(laps: list[Lap], figure: str) -> float:
    return statistics.median(getattr(lap, figure) for lap in laps)


def _table(laps: dict[str, list[Lap]], push: Push, size: float) -> list[str]:
    lines = [
        f"online, {KEYS:,} keys of {EVENTS_A_KEY} events (p50, p99 at {REQUESTS_PER_S:g} requests/s)",
        f"  {'':<26}{'requests':>12}{'p50':>12}{'p99':>12}",
    ]
    for name, each in ((PLAIN, laps[PLAIN]), (WINDOWED, laps[WINDOWED])):
        speed, p50, p99 = (_median(each, figure) for figure in ("requests_per_s", "p50_ms", "p99_ms"))
        lines.append(f"  {name:<26}{speed:>10,.0f}/s{p50:>9.2f} ms{p99:>9.2f} ms")
    lines.append(f"  {size:.0f} bytes for each key on the disk")
    lines.append(
        f"  {push.events:,} events pushed at {push.events_per_s:,.0f}/s beside {push.requests:,} requests: "
        f"{push.failed} failed, p50 {push.p50_ms:.2f} ms, p99 {push.p99_ms:.2f} ms, "
        f"{push.memory_mb:.0f} MB more memory"
    )
    return [*lines, ""]
