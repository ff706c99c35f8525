"""The step before a model: a process that the gateway asks for the windows of a request (docs/adr/0049).

It listens on a unix socket that only its owner can open. Plans of models are files, which it reads again when they
change.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import threading
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

from serin.errors import EventRefused, StateUnavailable
from serin.formats.windows import WindowPlan
from serin.serving.windows.pushed import read_pushed
from serin.serving.windows.requests import Request, read_grpc, read_http
from serin.serving.windows.server import Answer
from serin.windows.events import OnlineWindows
from serin.windows.ring import RingUnreadable
from serin.windows.state import State

logger = logging.getLogger(__name__)

JSON_BYTES: Final = "inference-header-content-length"
_EVENTS: Final = re.compile(r"/v2/models/([a-z][a-z0-9-]{0,62})/events")
_LENGTH: Final = re.compile(r"[0-9]{1,9}")
_INFERENCE: Final = ("/http", "/grpc")
_BOUNDS_S: Final = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.5)
_SWEEP_S: Final = 60.0
_AT_ONCE: Final = 10  # events, so that requests do not wait for one with many, or for a push
_OWNERS: Final = ("/history", "/forget")
"""Of the owner of the stack: the gateway has no route to them. They bring the plan, which need not be served."""
_REFUSALS: Final = (EventRefused, StateUnavailable, RingUnreadable)
MOST_BYTES: Final = 2 << 20  # that a client may send: JSON is read whole while other requests wait


class Step:
    """`plans`: a folder with <model>.json. `open_state`: opens what keeps the events, or raises StateUnavailable."""

    def __init__(
        self, plans: Path, open_state: Callable[[], State], clock_us: Callable[[], int] | None = None
    ) -> None:
        self._plans, self._open = plans, open_state
        self._state: State | None = None
        self._clock_us = clock_us or (lambda: time.time_ns() // 1000)
        self._known: dict[str, tuple[int, OnlineWindows]] = {}
        self.counts: dict[str, Counter[str]] = {}
        self._took = [0] * (len(_BOUNDS_S) + 1)
        self._took_s = 0.0

    def answer(
        self, path: str, headers: Mapping[str, str], body: bytes
    ) -> Answer | Coroutine[Any, Any, Answer]:
        """Answers one request of the gateway; one with many events later, while others are answered."""
        began = time.perf_counter()
        found = self._answer(path, headers, body)
        if path not in _INFERENCE:
            return found
        if isinstance(found, Coroutine):
            return self._timed(found, began)
        self._note_taken(began)
        return found

    async def _timed(self, answering: Coroutine[Any, Any, Answer], began: float) -> Answer:
        found = await answering
        self._note_taken(began)
        return found

    def _note_taken(self, began: float) -> None:
        took_s = time.perf_counter() - began
        self._took[bisect_left(_BOUNDS_S, took_s)] += 1
        self._took_s += took_s

    def _answer(
        self, path: str, headers: Mapping[str, str], body: bytes
    ) -> Answer | Coroutine[Any, Any, Answer]:
        if path == "/status":
            return Answer(200, json.dumps(self.status()).encode())
        pushed = _EVENTS.fullmatch(path)
        model = pushed[1] if pushed else headers.get("x-serin-model", "")
        if path in _OWNERS:
            return self._answer_owner(model, path, json.loads(body))
        windows = self._windows(model)
        if windows is None:
            return Answer(404, b"no model of this name has windows that are computed here")
        try:
            if len(body) > MOST_BYTES:
                raise EventRefused(
                    row=0, reason=f"a request has at most {MOST_BYTES >> 20} MiB; send fewer rows"
                )
            if pushed and headers.get(":method") == "GET":
                # What clients send with an event, and what they do not send because it is added.
                inputs = [column.to_json() for column in windows.plan.inputs]
                return Answer(200, json.dumps({"inputs": inputs, "adds": list(windows.plan.made)}).encode())
            if pushed:
                return self._later(model, self._push(model, windows, body))
            return self._add_windows(model, windows, path, headers, body)
        except _REFUSALS as error:
            return self._refused(model, error)

    def _answer_owner(
        self, model: str, path: str, given: Mapping[str, Any]
    ) -> Answer | Coroutine[Any, Any, Answer]:
        windows = OnlineWindows(model, WindowPlan.from_json(given["plan"]), _Late(self._opened))
        if path == "/history":
            return self._later(model, self._count_events(model, windows, given["rows"], given["arrival"]))
        try:
            return Answer(200, json.dumps({"keys": windows.forget(given["rows"])}).encode())
        except _REFUSALS as error:
            return self._refused(model, error)

    def _add_windows(
        self, model: str, windows: OnlineWindows, path: str, headers: Mapping[str, str], body: bytes
    ) -> Answer | Coroutine[Any, Any, Answer]:
        if path == "/grpc":
            request = read_grpc(body, windows.plan)
        else:
            told = headers.get(JSON_BYTES)
            if told is not None and not _LENGTH.fullmatch(told):
                raise EventRefused(row=0, reason=f"the header {JSON_BYTES} is not a number of bytes")
            request = read_http(body, None if told is None else int(told), windows.plan)
        if len(request.rows[windows.plan.time]) > _AT_ONCE:
            return self._later(model, self._add_many(model, windows, request))
        return Answer(200, *request.write(self._compute(model, windows, request.rows)))

    async def _add_many(self, model: str, windows: OnlineWindows, request: Request) -> Answer:
        found: dict[str, list[Any]] = {name: [] for name in windows.plan.made}
        windows.check_times(request.rows, [self._clock_us()] * len(request.rows[windows.plan.time]))
        for part, _ in _parts(request.rows):
            for name, values in self._compute(model, windows, part).items():
                found[name] += values
            await asyncio.sleep(0)
        return Answer(200, *request.write(found))

    async def _push(self, model: str, windows: OnlineWindows, body: bytes) -> Answer:
        return await self._count_events(model, windows, await read_pushed(body, windows.plan), None)

    async def _count_events(
        self,
        model: str,
        windows: OnlineWindows,
        rows: Mapping[str, list[Any]],
        arrival: Sequence[int] | None,
    ) -> Answer:
        """`arrival`: when each became known; None: now."""
        known = [self._clock_us()] * len(rows[windows.plan.time]) if arrival is None else arrival
        windows.check_times(rows, known)
        total = Counter[str]()
        for part, places in _parts(rows):
            found = windows.answer(part, known[places]).outcomes
            total += found
            self._count(model).update(found)
            await asyncio.sleep(0)
        return Answer(200, json.dumps(total).encode())

    async def _later(self, model: str, answering: Coroutine[Any, Any, Answer]) -> Answer:
        try:
            return await answering
        except _REFUSALS as error:
            return self._refused(model, error)

    def _refused(self, model: str, error: Exception) -> Answer:
        bad = isinstance(error, EventRefused)
        self._count(model)["refused" if bad else "unavailable"] += 1
        return Answer(400 if bad else 503, str(error).encode())

    def status(self) -> dict[str, Any]:
        try:
            keys, size = self._opened().size()
            state: dict[str, Any] = {"keys": keys, "bytes": size}
        except StateUnavailable as error:
            state = {"problem": str(error)}
        models = {model: dict(counts) for model, counts in self.counts.items()}
        bounds = [*map(str, _BOUNDS_S), "+Inf"]
        took = {"sum_s": self._took_s, "buckets": dict(zip(bounds, accumulate(self._took), strict=True))}
        return {"models": models, "took": took, **state}

    def warm(self) -> None:
        """Opens what keeps the events, so that the first request does not wait for that."""
        with suppress(StateUnavailable):  # it is tried again with each request
            self._opened()

    def drop_expired(self) -> int:
        return self._opened().drop_expired(self._clock_us())

    def close(self) -> None:
        if self._state is not None:
            self._state.close()

    def _compute(
        self, model: str, windows: OnlineWindows, rows: dict[str, list[Any]]
    ) -> dict[str, list[Any]]:
        count = len(rows[windows.plan.time])
        try:
            answered = windows.answer(rows, [self._clock_us()] * count)
        except (StateUnavailable, RingUnreadable) as error:
            if windows.plan.unavailable == "refuse":
                raise
            logger.warning("%s: answered without windows: %s", model, error)
            self._count(model).update({"nulls": count, "lost": count})
            return {name: [None] * count for name in windows.plan.made}
        self._count(model).update(answered.outcomes)
        return answered.columns

    def _count(self, model: str) -> Counter[str]:
        return self.counts.setdefault(model, Counter())

    def _opened(self) -> State:
        if self._state is None:
            self._state = self._open()
        return self._state

    def _windows(self, model: str) -> OnlineWindows | None:
        """The windows of a model as the file of its plan has them now."""
        path = self._plans / f"{model}.json"
        try:
            changed = path.stat().st_mtime_ns
        except FileNotFoundError:
            return None
        known = self._known.get(model)
        if known is None or known[0] != changed:
            plan = WindowPlan.load(path.read_bytes())
            self._known[model] = known = changed, OnlineWindows(model, plan, _Late(self._opened))
        return known[1]


def _parts(rows: Mapping[str, list[Any]]) -> Iterator[tuple[dict[str, list[Any]], slice]]:
    """A few rows at a time, and which they are."""
    for first in range(0, len(next(iter(rows.values()))), _AT_ONCE):
        places = slice(first, first + _AT_ONCE)
        yield {name: values[places] for name, values in rows.items()}, places


class _Late:
    """A state that is opened when it is needed, so that one that is away keeps nothing from starting."""

    def __init__(self, opened: Callable[[], State]) -> None:
        self._opened = opened

    def __getattr__(self, name: str) -> Any:
        return getattr(self._opened(), name)


def sweep(step: Step, stop: threading.Event) -> None:
    """Drops expired events from time to time, until `stop` is set."""
    while not stop.wait(_SWEEP_S):
        try:
            step.drop_expired()
        except StateUnavailable as error:
            logger.warning("expired events stay: %s", error)
