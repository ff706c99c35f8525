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
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

from serin.errors import EventRefused, StateUnavailable
from serin.formats.windows import WindowPlan
from serin.serving.windows.pushed import read_pushed
from serin.serving.windows.requests import rewrite_grpc, rewrite_http
from serin.windows.events import OnlineWindows
from serin.windows.ring import RingUnreadable
from serin.windows.state import State

logger = logging.getLogger(__name__)

JSON_BYTES: Final = "inference-header-content-length"
_EVENTS: Final = re.compile(r"/v2/models/([a-z][a-z0-9-]{0,62})/events")
_INFERENCE: Final = ("/http", "/grpc")
_BOUNDS_S: Final = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.5)
_SWEEP_S: Final = 60.0
_PUSHED_AT_ONCE: Final = 10  # events, so that requests do not wait for a push


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer: `json_bytes` of a body with binary tensors behind its JSON."""

    status: int
    body: bytes
    json_bytes: int | None = None


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
        """Answers one request of the gateway; a push of events while others are answered, too."""
        began = time.perf_counter()
        found = self._answer(path, headers, body)
        if path in _INFERENCE:
            took_s = time.perf_counter() - began
            self._took[bisect_left(_BOUNDS_S, took_s)] += 1
            self._took_s += took_s
        return found

    def _answer(
        self, path: str, headers: Mapping[str, str], body: bytes
    ) -> Answer | Coroutine[Any, Any, Answer]:
        if path == "/status":
            return Answer(200, json.dumps(self.status()).encode())
        pushed = _EVENTS.fullmatch(path)
        model = pushed[1] if pushed else headers.get("x-serin-model", "")
        plan = self._plan(model)
        if plan is None:
            return Answer(404, b"no model of this name has windows that are computed here")
        try:
            if pushed and headers.get(":method") == "GET":
                return Answer(200, json.dumps(_described(plan)).encode())
            if pushed:
                return self._pushed(model, read_pushed(body, plan), None)
            if path == "/history":  # of the owner of the stack: the gateway has no route to it
                given = json.loads(body)
                return self._pushed(model, given["rows"], given["arrival"])
            if path == "/forget":
                return Answer(200, json.dumps({"keys": self._forget(model, body)}).encode())
            if path == "/grpc":
                return Answer(200, rewrite_grpc(body, plan, lambda rows: self._compute(model, plan, rows)))
            told = headers.get(JSON_BYTES)
            found, size = rewrite_http(
                body, None if told is None else int(told), plan, lambda rows: self._compute(model, plan, rows)
            )
            return Answer(200, found, size)
        except EventRefused as error:
            self._count(model)["refused"] += 1
            return Answer(400, str(error).encode())
        except (StateUnavailable, RingUnreadable) as error:
            self._count(model)["unavailable"] += 1
            return Answer(503, str(error).encode())

    async def _pushed(
        self, model: str, rows: Mapping[str, list[Any]], arrival: Sequence[int] | None
    ) -> Answer:
        """Counts events, a few at a time. `arrival`: when each became known; None: now."""
        windows, total = self._windows(model), Counter[str]()
        for first in range(0, len(rows[windows.plan.time]), _PUSHED_AT_ONCE):
            part = {name: values[first : first + _PUSHED_AT_ONCE] for name, values in rows.items()}
            count = len(part[windows.plan.time])
            known = [self._clock_us()] * count if arrival is None else arrival[first : first + count]
            try:
                found = windows.answer(part, known).outcomes
            except EventRefused as error:
                return Answer(400, str(error).encode())
            except (StateUnavailable, RingUnreadable) as error:
                return Answer(503, str(error).encode())
            total += found
            self._count(model).update(found)
            await asyncio.sleep(0)
        return Answer(200, json.dumps(total).encode())

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

    def _compute(self, model: str, plan: WindowPlan, rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
        count = len(rows[plan.time])
        try:
            answered = self._windows(model).answer(rows, [self._clock_us()] * count)
        except (StateUnavailable, RingUnreadable) as error:
            if plan.unavailable == "refuse":
                raise
            logger.warning("%s: answered without windows: %s", model, error)
            self._count(model).update({"nulls": count, "lost": count})
            return {name: [None] * count for name in plan.made}
        self._count(model).update(answered.outcomes)
        return answered.columns

    def _forget(self, model: str, body: bytes) -> int:
        return self._windows(model).forget(json.loads(body))

    def _count(self, model: str) -> Counter[str]:
        return self.counts.setdefault(model, Counter())

    def _opened(self) -> State:
        if self._state is None:
            self._state = self._open()
        return self._state

    def _plan(self, model: str) -> WindowPlan | None:
        """The plan of a model as its file has it now."""
        path = self._plans / f"{model}.json"
        try:
            changed = path.stat().st_mtime_ns
        except FileNotFoundError:
            return None
        known = self._known.get(model)
        if known is None or known[0] != changed:
            plan = WindowPlan.load(path.read_bytes())
            self._known[model] = changed, OnlineWindows(model, plan, _Late(self._opened))
        return self._known[model][1].plan

    def _windows(self, model: str) -> OnlineWindows:
        return self._known[model][1]


def _described(plan: WindowPlan) -> dict[str, Any]:
    """What clients send with an event, and what they do not send because it is added."""
    return {"inputs": [column.to_json() for column in plan.inputs], "adds": list(plan.made)}


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
