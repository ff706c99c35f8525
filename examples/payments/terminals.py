"""The clients of the example: terminals that send payments in the order of their times, and the clock that follows."""

from __future__ import annotations

import http.client
import json
import queue
import threading
import time
from collections import Counter
from typing import Any

import pandas as pd

KINDS = {
    "payment": "BYTES",
    "at": "INT64",
    "card": "BYTES",
    "merchant": "BYTES",
    "amount": "FP32",
    "channel": "BYTES",
}
LANES, WAITING = 4, 50
TIMEOUT_S = 30.0
Row = tuple[Any, ...]


class Terminals:
    """Sends payments within the block `with Terminals(...) as terminals:`, at most `rate` per second, from `resume` on.

    A card's payments go through the same connection, so each is answered before the next one is sent. When answers are
    slow, fewer are sent. `at` is the time of the newest payment that was sent: the clock of the simulation.
    """

    def __init__(self, address: str, model: str, payments: pd.DataFrame, rate: float) -> None:
        self._host, self._path, self.rate = address, f"/v2/models/{model}/infer", rate
        us = payments["at"].dt.as_unit("us").astype("int64").tolist()
        others = [payments[name].tolist() for name in KINDS if name != "at"]
        self._rows = list(zip(others[0], us, *others[1:], strict=True))
        self._lanes: list[queue.Queue[Row | None]] = [queue.Queue(WAITING) for _ in range(LANES)]
        self._threads = [
            threading.Thread(target=self._serve, args=(lane,), daemon=True) for lane in self._lanes
        ]
        self._sender = threading.Thread(target=self._send, daemon=True)
        self._go, self._ended = threading.Event(), threading.Event()
        self._counting, self._sending = threading.Lock(), threading.Lock()
        self.at = pd.Timestamp(us[0], unit="us", tz="UTC")
        self.sent = self.answered = 0
        self.failures: Counter[str] = Counter()

    def __enter__(self) -> Terminals:
        for thread in (*self._threads, self._sender):
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._go.set()
        self._sender.join()
        for lane in self._lanes:
            lane.put(None)
        for thread in self._threads:
            thread.join()

    @property
    def is_over(self) -> bool:
        """Whether all payments were sent."""
        return not self._sender.is_alive()

    def resume(self) -> None:
        self._go.set()

    def pause(self) -> None:
        """Sends no more payments, and returns when all that were sent are answered."""
        with self._sending:
            self._go.clear()
        for lane in self._lanes:
            lane.join()

    def _send(self) -> None:
        due = time.monotonic()
        for row in self._rows:
            if self._ended.wait(max(due - time.monotonic(), 0)):
                return
            due = max(due + 1 / self.rate, time.monotonic() - 1)
            while not self._put(row):
                self._go.wait()
                if self._ended.is_set():
                    return
                due = time.monotonic()

    def _put(self, row: Row) -> bool:
        """Whether the payment was given to its card's lane: not while payments pause."""
        with self._sending:
            if self._go.is_set():
                self._lanes[hash(row[2]) % LANES].put(row)
                self.at = pd.Timestamp(row[1], unit="us", tz="UTC")
                self.sent += 1
            return self._go.is_set()

    def _serve(self, lane: queue.Queue[Row | None]) -> None:
        wire = http.client.HTTPConnection(self._host, timeout=TIMEOUT_S)
        while (row := lane.get()) is not None:
            outcome = self._ask(wire, row)
            with self._counting:
                if outcome == "200":
                    self.answered += 1
                else:
                    self.failures[outcome] += 1
            lane.task_done()
        wire.close()

    def _ask(self, wire: http.client.HTTPConnection, row: Row) -> str:
        inputs = [
            {"name": name, "datatype": kind, "shape": [1, 1], "data": [value]}
            for (name, kind), value in zip(KINDS.items(), row, strict=True)
        ]
        try:
            wire.request("POST", self._path, json.dumps({"id": row[0], "inputs": inputs}))
            answer = wire.getresponse()
            answer.read()
        except (OSError, http.client.HTTPException) as error:
            wire.close()
            return type(error).__name__
        return str(answer.status)
