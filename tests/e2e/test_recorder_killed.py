"""Load on releases that record none, a tenth and all of their requests while the watcher is killed: no request fails,
and every drawn row is recorded once or counted as dropped."""

from __future__ import annotations

import math
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from serin.formats.serving.spool import is_drawn
from serin.machine import environment
from serin.monitoring.capture.counters import read_captures
from serin.monitoring.capture.read import captured
from serin.store.artifacts import Release
from tests.e2e.recording_stack import Recorder, RecordingStack, Row, recording_stack
from tests.signals import hit, kill_9
from tests.unit.serving import bundles
from tests.unit.serving.bundles import MODEL

SHARES = {"none": 0.0, "tenth": 0.1, "all": 1.0}
NAMES = ("carrier", "temp", "distance", "night", "_answer_score", "_answer_pair", "_answer_word")
WITHIN_S = 120.0
PAUSE_S = 0.02  # between two requests of a client


def _spec(share: float) -> str:
    settings = f"serving: {{request_timeout: 20s}}\nmonitoring: {{capture: {{share: {share}}}}}\n"
    return settings if share else "serving: {request_timeout: 20s}\n"


@contextmanager
def watcher(stack: RecordingStack) -> Iterator[subprocess.Popen[bytes]]:
    """The real process. Killed at the end of the block, whatever it is doing."""
    variables = environment.child_environment(
        SERIN_HOME=str(stack.folder), SERIN_STORE=str(stack.folder / "store")
    )
    with (stack.folder / "watcher.log").open("ab") as log:
        child = subprocess.Popen(
            [sys.executable, "-m", "serin.stack.watch.watcher"], env=variables, stdout=log, stderr=log
        )
        try:
            yield child
        finally:
            kill_9(child.pid)
            child.wait()


class Load:
    """Clients that ask each release until the block ends; one that fails ends the test."""

    def __init__(self, stack: RecordingStack) -> None:
        self.clients = {name: stack.recorder(name) for name in SHARES}
        self._stop = threading.Event()
        self._failures: list[BaseException] = []
        self._threads = [
            threading.Thread(target=self._ask, args=(client,)) for client in self.clients.values()
        ]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def drawn(self, name: str) -> set[str]:
        """The ids of answered requests that the release records."""
        return {found for found, _ in self.clients[name].rows if is_drawn(found, SHARES[name])}

    def end(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        assert self._failures == []

    def _ask(self, client: Recorder) -> None:
        number = 0
        try:
            while not self._stop.is_set():
                columns = bundles.rows((1, 3, 20)[number % 3], seed=number)
                (client.grpc if number % 2 else client.binary)(columns, x_request_id=f"mine-{number}")
                number += 1
                self._stop.wait(PAUSE_S)
        except BaseException as error:  # noqa: BLE001 (reported by the test's own thread)
            self._failures.append(error)


def _until(what: str, happened: Callable[[], bool], child: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + WITHIN_S
    while not happened():
        assert child.poll() is None, log.read_text()
        assert time.monotonic() < end, f"{what} did not happen:\n{log.read_text()}"
        time.sleep(0.05)


def _recorded(stack: RecordingStack, release: Release) -> pa.Table:
    return captured(stack.folder, MODEL, versions=[release.version])


def _counted(stack: RecordingStack, release: Release) -> tuple[int, int]:
    view = read_captures(stack.folder, MODEL)
    counts = view.releases.get(release.name) if view else None
    return (counts.requests, counts.dropped) if counts else (0, 0)


def _all_counted(stack: RecordingStack, wanted: dict[Release, int]) -> bool:
    return all(sum(_counted(stack, release)) == count for release, count in wanted.items())


def test_rows_are_exact_at_any_share_although_the_watcher_is_killed() -> None:
    with recording_stack(**{name: _spec(share) for name, share in SHARES.items()}) as stack:
        log = stack.folder / "watcher.log"
        every = stack.by_name["all"]
        load = Load(stack)
        with load, watcher(stack) as first:
            _until("a first record", lambda: _counted(stack, every)[0] > 0, first, log)
            hit(first.pid)
            first.wait()
            before = _counted(stack, every)[0]
            with watcher(stack) as second:
                _until("a second record", lambda: _counted(stack, every)[0] > before, second, log)
                load.end()
                drawn = {name: load.drawn(name) for name in SHARES}
                wanted = {stack.by_name[name]: len(drawn[name]) for name in ("tenth", "all")}
                _until("all records", lambda: _all_counted(stack, wanted), second, log)
        for name, client in load.clients.items():
            _is_exact(stack, stack.by_name[name], client, drawn[name])
        assert 0 < len(drawn["tenth"]) < len(drawn["all"])
        assert not stack.spool(stack.by_name["none"]).exists()


def _is_exact(stack: RecordingStack, release: Release, client: Recorder, drawn: set[str]) -> None:
    rows = _recorded(stack, release).to_pylist()
    found = {(row["_id"], row["_row"]): row for row in rows}
    assert len(found) == len(rows), "recorded twice"
    assert found.keys() == {key for key in client.rows if key[0] in drawn}
    assert _counted(stack, release) == (len(drawn), 0)
    for key, row in found.items():
        expected = client.rows[key]
        assert {name: row[name] for name in NAMES} == dict(zip(NAMES, _values(expected), strict=True))
        assert (row["_client_id"], row["_arm"], row["_status"]) == (expected.client_id, "pinned", 200)
        assert row["_latency_ms"] > 0


def _values(row: Row) -> list[Any]:
    """A row as it was sent and answered, in the types of the records."""
    temp, distance, night, score = (
        np.frombuffer(data, dtype)[0].item()
        for data, dtype in zip((*row.sent[1:], row.got[0]), ("f4", "i8", "i1", "f4"), strict=True)
    )
    pair = np.frombuffer(row.got[1], "f4").tolist()
    temp = None if math.isnan(temp) else temp
    return [
        row.sent[0] or None,
        temp,
        distance,
        None if night == -1 else bool(night),
        score,
        pair,
        row.got[2],
    ]
