"""A load generator with a closed or an open loop.

Closed loop: each client sends its next request when the last one is answered. Open loop: requests arrive at a given
rate, whether or not earlier ones were answered. In a closed loop a slow server is called less often, so its latencies
look better than independent users would see. The open loop counts a request's latency from the time it was meant to be
sent: while the server pauses, or every connection is in use, requests wait, and that wait is part of what a user would
see.
"""

from __future__ import annotations

import asyncio
import math
import selectors
from array import array
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from serin.formats.schema import Schema
from serin.formats.wire import Array
from serin.serving.client.address import Address
from serin.serving.client.client import request_columns
from serin.serving.client.tensors import HEADER_BYTES, Tensor, encode, http_body
from serin.serving.tuning.load_connections import CLOSED, REFUSED, Connection, Target

GOOD = frozenset({"200", "OK"})  # of HTTP and of gRPC
UNANSWERED = "unanswered"  # not complete when the generator stopped

_DIFFERENT_REQUESTS = 256
_ROUNDING_S = 1e-6
_AGAIN_S = 0.01  # avoids a busy loop against a closed port


@dataclass(frozen=True, slots=True, kw_only=True)
class Closed:
    """A fixed number of clients, each with its own connection."""

    clients: int = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Open:
    """Evenly spaced requests over as many connections as needed, at most `connections`; beyond that they wait."""

    requests_per_s: float
    connections: int = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadResult:
    """The requests after the warm-up. `outcomes` counts statuses, and names for missing answers.

    `latencies` are those of successful requests, in seconds.
    """

    seconds: float
    outcomes: dict[str, int]
    latencies: Sequence[float]

    @property
    def requests(self) -> int:
        return sum(self.outcomes.values())

    @property
    def failed(self) -> int:
        return self.requests - len(self.latencies)

    @property
    def errors(self) -> dict[str, int]:
        return {kind: count for kind, count in self.outcomes.items() if kind not in GOOD}

    @property
    def requests_per_s(self) -> float:
        """Successful requests per second."""
        return len(self.latencies) / self.seconds

    def quantile_ms(self, share: float) -> float:
        """Returns a quantile of the latencies; NaN when nothing was answered."""
        return quantile_ms(self.latencies, share)


def quantile_ms(latencies: Sequence[float], share: float) -> float:
    """Returns the latency within which this share of the requests was answered; NaN when there were none."""
    if not latencies:
        return math.nan
    return 1000 * float(np.quantile(latencies, share, method="inverted_cdf"))


def model_target(
    url: str, model: str, rows: Mapping[str, Array], schema: Schema, *, rows_per_request: int = 1
) -> Target:
    """Returns requests with binary tensors, made from `rows` (wire form), `rows_per_request` of them in each."""
    address, requests = Address.parse(url), []
    for tensors in request_tensors(rows, schema, rows_per_request):
        body, head_bytes = http_body(tensors)
        headers = {HEADER_BYTES: str(head_bytes)}
        requests.append(http_request(address, f"/v2/models/{model}/infer", body, headers))
    return Target(address=address, requests=tuple(requests))


def request_tensors(rows: Mapping[str, Array], schema: Schema, rows_per_request: int) -> list[list[Tensor]]:
    """Returns the tensors of different requests, each with so many of the rows."""
    columns = request_columns(rows, schema)
    count = len(next(iter(columns.values())))
    starts = range(0, max(count - rows_per_request, 0) + 1, rows_per_request)[:_DIFFERENT_REQUESTS]
    return [
        encode({name: values[start : start + rows_per_request] for name, values in columns.items()}, schema)
        for start in starts
    ]


def http_request(address: Address, path: str, body: bytes, headers: Mapping[str, str]) -> bytes:
    lines = [f"POST {path} HTTP/1.1", f"host: {address}", f"content-length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


def run_load(
    target: Target,
    pace: Closed | Open,
    *,
    seconds: float,
    warm_up_s: float = 0.0,
    stop: Callable[[], bool] = lambda: False,
) -> LoadResult:
    """Sends requests for `seconds` after the warm-up, or until `stop` returns true; waits for requests in flight."""
    with asyncio.Runner(loop_factory=_precise_loop if isinstance(pace, Open) else None) as runner:
        return runner.run(_Run(target, pace, seconds, warm_up_s, stop).result())


def _precise_loop() -> asyncio.AbstractEventLoop:
    """Returns a loop on select(): epoll wakes up to a millisecond late, which would count as latency of the server."""
    return asyncio.SelectorEventLoop(selectors.SelectSelector())


@dataclass(slots=True)
class _Tally:
    measured_from: float
    last: float
    outcomes: Counter[str] = field(default_factory=Counter)
    latencies: array[float] = field(default_factory=lambda: array("d"))

    def add(self, kind: str, since: float, now: float) -> None:
        if since < self.measured_from - _ROUNDING_S:
            return
        self.last = now
        self.outcomes[kind] += 1
        if kind in GOOD:
            self.latencies.append(now - since)


class _Run:
    def __init__(
        self,
        target: Target,
        pace: Closed | Open,
        seconds: float,
        warm_up_s: float,
        stop: Callable[[], bool],
    ) -> None:
        self._target, self._pace, self._stop = target, pace, stop
        self._seconds, self._warm_up_s = seconds, warm_up_s
        self._connections: list[Connection] = []
        self._sent = 0
        self._under_way: dict[Connection, float] = {}
        self._producing = True

    async def result(self) -> LoadResult:
        self._loop = asyncio.get_running_loop()
        self._over = self._loop.create_future()
        begin = self._loop.time()
        self._end = begin + self._warm_up_s + self._seconds
        self._tally = _Tally(measured_from=begin + self._warm_up_s, last=begin + self._warm_up_s)
        if isinstance(self._pace, Closed):
            for _ in range(self._pace.clients):
                self._ask_again(self._connect())
        else:
            self._idle: list[Connection] = []
            self._waiting: deque[float] = deque()
            self._begin, self._every_s = begin, 1 / self._pace.requests_per_s
            self._offered, self._wanted = 0, round((self._end - begin) * self._pace.requests_per_s)
            self._tick()
        longest_s = self._end - begin + self._target.timeout_s + 5
        await asyncio.wait([self._over], timeout=longest_s)
        now = self._loop.time()
        left = [*self._under_way.values(), *getattr(self, "_waiting", ())]
        for since in left:
            self._tally.add(UNANSWERED, since, now)
        for connection in self._connections:
            await connection.close()
        measured_s = max(self._tally.last, min(now, self._end)) - self._tally.measured_from
        return LoadResult(
            seconds=max(measured_s, 1e-9),
            outcomes=dict(self._tally.outcomes),
            latencies=self._tally.latencies,
        )

    def _connect(self) -> Connection:
        self._connections.append(self._target.connect(self._target))
        return self._connections[-1]

    def _send(self, connection: Connection, since: float, then: Callable[[Connection], None]) -> None:
        number = self._sent % len(self._target.requests)
        self._sent += 1
        self._under_way[connection] = since
        connection.send(number, partial(self._answered, connection, since, then))

    def _answered(
        self, connection: Connection, since: float, then: Callable[[Connection], None], kind: str
    ) -> None:
        del self._under_way[connection]
        self._tally.add(kind, since, self._loop.time())
        if kind in (REFUSED, CLOSED):
            self._loop.call_later(_AGAIN_S, then, connection)
        else:
            then(connection)

    def _finish(self) -> None:
        self._producing = False
        if not self._under_way and not self._over.done():
            self._over.set_result(None)

    # closed loop

    def _ask_again(self, connection: Connection) -> None:
        now = self._loop.time()
        if now >= self._end or self._stop():
            self._finish()
        else:
            self._send(connection, now, self._ask_again)

    # open loop

    def _tick(self) -> None:
        now = self._loop.time()
        while self._offered < self._wanted and (at := self._begin + self._offered * self._every_s) <= now:
            self._offered += 1
            self._offer(at)
        if self._offered < self._wanted and not self._stop():
            self._loop.call_at(self._begin + self._offered * self._every_s, self._tick)
        else:
            self._producing = False
            self._rest()

    def _offer(self, since: float) -> None:
        assert isinstance(self._pace, Open)
        if self._idle:
            self._send(self._idle.pop(), since, self._free)
        elif len(self._connections) < self._pace.connections:
            self._send(self._connect(), since, self._free)
        else:
            self._waiting.append(since)

    def _free(self, connection: Connection) -> None:
        if self._waiting:
            self._send(connection, self._waiting.popleft(), self._free)
        else:
            self._idle.append(connection)
            self._rest()

    def _rest(self) -> None:
        if not self._producing and not self._waiting:
            self._finish()
