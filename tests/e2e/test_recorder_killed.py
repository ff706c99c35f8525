"""Recorded requests of real releases while the watcher is killed, and labels for them: every row, and the live AUC."""

from __future__ import annotations

import http.client
import itertools
import math
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from serin import metrics
from serin.formats.serving.lots import is_drawn
from serin.formats.serving.ring import ring_files
from serin.machine import environment
from serin.monitoring.capture.counters import read_captures
from serin.monitoring.capture.read import captured
from serin.monitoring.quality.labels import Columns, TruthOf, add_labels
from serin.monitoring.quality.view import QualityView, read_quality
from serin.serving.envoy.gateway import PROCESS_NAME
from serin.spec.load import load_spec
from serin.store.artifacts import Release
from serin.store.store import Store
from tests.e2e.recording_stack import SCHEMA, Recorder, RecordingStack, Row, recording_stack
from tests.fakes.live_quality import spec
from tests.kit.decoding import built_decoder
from tests.kit.waiting import running, tail, until
from tests.signals import hit, kill_9
from tests.unit.serving import bundles
from tests.unit.serving.bundles import MODEL

SHARES = {"none": 0.0, "tenth": 0.1, "all": 1.0}
NAMES = ("carrier", "temp", "distance", "night", "_answer_score", "_answer_pair", "_answer_word")
PAUSE_S = 0.02  # between two requests of a client


def _spec(share: float) -> str:
    settings = f"serving: {{request_timeout: 20s}}\nmonitoring: {{capture: {{share: {share}}}}}\n"
    return settings if share else "serving: {request_timeout: 20s}\n"


@contextmanager
def watcher(stack: RecordingStack) -> Iterator[subprocess.Popen[bytes]]:
    """The real process. Killed at the end of the block, whatever it is doing."""
    built_decoder()
    variables = environment.child_environment(
        SERIN_HOME=str(stack.folder), SERIN_STORE=str(stack.folder / "store")
    )
    with (stack.folder / "watcher.log").open("ab") as log:
        child = subprocess.Popen(
            [sys.executable, "-m", "serin.watcher.watcher"], env=variables, stdout=log, stderr=log
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
            until(
                lambda: _counted(stack, every)[0] > 0, "a first record", alive=running(first), said=tail(log)
            )
            hit(first.pid)
            first.wait()
            before = _counted(stack, every)[0]
            with watcher(stack) as second:
                until(
                    lambda: _counted(stack, every)[0] > before,
                    "a second record",
                    alive=running(second),
                    said=tail(log),
                )
                load.end()
                drawn = {name: load.drawn(name) for name in SHARES}
                wanted = {stack.by_name[name]: len(drawn[name]) for name in ("tenth", "all")}
                until(
                    lambda: _all_counted(stack, wanted), "all records", alive=running(second), said=tail(log)
                )
        for name, client in load.clients.items():
            _is_exact(stack, stack.by_name[name], client, drawn[name])
        assert 0 < len(drawn["tenth"]) < len(drawn["all"])
        assert _counted(stack, stack.by_name["none"]) == (0, 0)


CLIENTS = 3


def test_what_was_answered_is_recorded_although_gateway_and_watcher_are_killed() -> None:
    with recording_stack(all=_spec(1.0)) as stack:
        clients = [stack.recorder("all") for _ in range(CLIENTS)]
        log, release = stack.folder / "watcher.log", stack.by_name["all"]
        threads = [threading.Thread(target=_ask_until_it_fails, args=(client,)) for client in clients]
        for thread in threads:
            thread.start()
        with watcher(stack) as first:
            until(lambda: _counted(stack, release)[0] > 0, "a record", alive=running(first), said=tail(log))
            hit(first.pid)
            first.wait()
        stack.host.kill(PROCESS_NAME)
        for thread in threads:
            thread.join()
        assert ring_files(stack.folder), "nobody has read the end"
        with watcher(stack) as second:
            until(lambda: not ring_files(stack.folder), "the rest", alive=running(second), said=tail(log))
        answered = {key: row for client in clients for key, row in client.rows.items()}
        rows = _recorded(stack, release).to_pylist()
        found = {(row["_id"], row["_row"]): row["_answer_score"] for row in rows}
        assert len(found) == len(rows), "recorded twice"
        for key, row in answered.items():
            assert found[key] == np.frombuffer(row.got[0], "f4")[0]
        unseen = {found for found, _ in found.keys() - answered.keys()}
        assert len(unseen) <= CLIENTS, "answers that were on their way"
        assert _counted(stack, release) == (len({id_ for id_, _ in found}), 0)


def _ask_until_it_fails(client: Recorder) -> None:
    with suppress(OSError, http.client.HTTPException):
        for number in itertools.count():
            client.binary(bundles.rows((1, 3, 20)[number % 3], seed=number))


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


REQUESTS, EACH = 40, 5


def test_live_auc_of_each_release_is_that_of_the_scores_its_clients_got() -> None:
    with recording_stack(one=spec(), two=spec()) as stack:
        clients = [stack.recorder(name) for name in ("one", "two")]
        truth = {}
        for client in clients:
            for number in range(REQUESTS):
                send = client.grpc if number % 2 else client.binary
                send(bundles.rows(EACH, seed=1000 * client.release.version + number))
            truth |= labels_of(client)
        shuffled = np.random.default_rng(1).permutation(sorted(truth))
        keys = [(found, int(row)) for found, row in shuffled][: int(0.8 * len(truth))]  # a fifth never comes
        add(stack, {key: 1 - truth[key] if place < 20 else truth[key] for place, key in enumerate(keys)})
        log = stack.folder / "watcher.log"
        with watcher(stack) as child:
            until(lambda: labelled(stack) == len(keys), "labels", alive=running(child), said=tail(log))
            add(stack, {key: truth[key] for key in keys[:20]})  # what was wrong at first
            until(
                lambda: seen(stack).received == len(keys) + 20,
                "corrections",
                alive=running(child),
                said=tail(log),
            )
        for client, release in zip(clients, seen(stack).releases, strict=True):
            own = [key for key in keys if key in client.rows]
            scores = np.array([score(client, key) for key in own], np.float32)
            assert release.recorded == REQUESTS * EACH
            assert release.metrics["auc"].value == metrics.auc([truth[key] for key in own], scores)
            assert 0 < release.estimate["auc"].value < 1


def labels_of(client: Recorder) -> dict[tuple[str, int], int]:
    random = np.random.default_rng(client.release.version)
    return {key: int(random.random() < score(client, key)) for key in client.rows}


def score(client: Recorder, key: tuple[str, int]) -> float:
    return float(np.frombuffer(client.rows[key].got[0], "f4")[0])


def add(stack: RecordingStack, truth: dict[tuple[str, int], int]) -> None:
    version = stack.by_name["one"].version
    bundle = Path(Store(str(stack.folder / "store")).bundle(MODEL, version).path)
    of = TruthOf(model=MODEL, data=load_spec(bundle / "spec.yaml").data, schema=SCHEMA)
    table = pa.table(
        {
            "_id": [found for found, _ in truth],
            "_row": [row for _, row in truth],
            "arr_delay": [60.0 if late else 0.0 for late in truth.values()],
        }
    )
    add_labels(stack.folder, of, table, Columns(), time.time())


def seen(stack: RecordingStack) -> QualityView:
    view = read_quality(stack.folder, MODEL)
    assert view is not None
    return view


def labelled(stack: RecordingStack) -> int:
    view = read_quality(stack.folder, MODEL)
    return 0 if view is None else sum(release.labelled for release in view.releases)
