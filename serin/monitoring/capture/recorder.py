"""Moves requests from the gateway's rings to the records: each once, whenever it is killed, with bounded memory.

The rows of a batch of entries and the position behind them in each ring are committed in one step
(`formats.captures.commit`); then the ring's bytes are given back to the gateway. After a crash, entries before a
committed position are not recorded again. Models are committed one by one: what one of them cannot write holds its
entries in the ring, and is dropped and counted when that is nearly full.
"""

from __future__ import annotations

import logging
import resource
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from serin.errors import NameInvalid, RingBroken, SerinError
from serin.formats.captures import commit, last_number, read_document, write_document, writing
from serin.formats.schema import Schema
from serin.formats.serving.recorded import Decode
from serin.formats.serving.ring import PLAIN, Entries, Ring, ring_files
from serin.machine.in_memory import memory_folder
from serin.machine.locks import locked
from serin.monitoring.capture.columns import block_rows
from serin.monitoring.capture.counters import Counters, models_captured
from serin.monitoring.capture.read import alike
from serin.spec.monitoring import CaptureSpec
from serin.store.artifacts import Release

log = logging.getLogger(__name__)

K = TypeVar("K")

BATCH_BYTES: Final = 16 << 20  # of all rings, decoded and committed at once
_CROWDED: Final = 0.75  # the share of a ring from which on nothing is held for a model that cannot be written
_LOCK: Final = "recorder.lock"  # only one process reads the rings at a time
_RETRY_S: Final = 20.0
_COMPRESSED: Final = "the answer is compressed in another way, or too large"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a release's bundle says about its requests and their records."""

    schema: Schema
    settings: CaptureSpec


Plans = Callable[[Release], Plan | None]
"""The plan of a release; None when its version no longer exists."""


@dataclass(slots=True)
class Outcome:
    """`requests`: recorded by one call. `failed`: models whose records cannot be written now, and why."""

    requests: int = 0
    failed: dict[str, Exception] = field(default_factory=dict)


class _Read(NamedTuple):
    """Entries of one release that were read from a ring at once."""

    ring: Ring
    entries: Entries
    release: Release


def _grouped(reads: Sequence[_Read], key: Callable[[_Read], K]) -> dict[K, list[_Read]]:
    found: dict[K, list[_Read]] = {}
    for read in reads:
        found.setdefault(key(read), []).append(read)
    return found


def _chosen(reads: Sequence[_Read], chosen: Callable[[_Read], npt.NDArray[np.bool_]]) -> list[_Read]:
    """Of each read the entries that are chosen, where there are any."""
    found = [read._replace(entries=read.entries.where(chosen(read))) for read in reads]
    return [read for read in found if len(read.entries)]


class Recorder:
    """`decode`: the compiled decoder."""

    def __init__(
        self,
        home: Path,
        plans: Plans,
        decode: Decode,
        *,
        batch_bytes: int = BATCH_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        # A core dump would write requests to a disk as they came.
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        self._home, self._plans, self._decode = home, plans, decode
        self._batch_bytes, self._clock = batch_bytes, clock
        self._rings: dict[Path, Ring] = {}
        self._failed: dict[str, tuple[float, Exception]] = {}
        self._given_up: dict[str, Counter[tuple[str, str]]] = {}  # by model: of a ring and a release
        self._said: set[str] = set()

    def fill(self) -> float:
        """The largest share of a ring that waits."""
        self._open()
        return max((ring.fill for ring in self._rings.values()), default=0.0)

    def record(self, now: float) -> Outcome:
        """Records what is in the rings now. What cannot be written stays there and is tried again later."""
        memory, outcome = memory_folder(self._home), Outcome()
        if memory is None or not memory.is_dir():
            return outcome
        with locked(memory / _LOCK, mode=0o600):
            self._retry()
            self._open()
            places = {ring.name: ring.tail for ring in self._rings.values()}
            ends = {ring.name: ring.head for ring in self._rings.values()}
            held: dict[str, int] = {}
            while batch := self._batch(places, ends):
                self._record_batch(batch, outcome, held, now)
                for ring in self._rings.values():
                    ring.release(held.get(ring.name, places[ring.name]))
            for ring in list(self._rings.values()):
                ring.release(held.get(ring.name, places[ring.name]))  # also behind a filler
                self._finish(ring)
        outcome.failed = {model: error for model, (_, error) in self._failed.items()}
        return outcome

    def close(self) -> None:
        for path in list(self._rings):
            self._rings.pop(path).close()

    def _open(self) -> None:
        found = ring_files(self._home)
        for path in self._rings.keys() - set(found):
            self._rings.pop(path).close()
        for path in found:
            if path not in self._rings:
                with suppress(FileNotFoundError):
                    try:
                        self._rings[path] = Ring(path)
                    except RingBroken as error:
                        self._say(str(error))

    def _batch(self, places: dict[str, int], ends: Mapping[str, int]) -> list[_Read]:
        """The next entries of all rings. `places`: how far each was read, brought up to date. `ends`: how far they are
        to be read at least."""
        found: list[_Read] = []
        room = self._batch_bytes
        for ring in self._rings.values():
            while room > 0 and places[ring.name] < ends[ring.name]:
                before = places[ring.name]
                try:
                    entries, places[ring.name] = ring.read(before, room)
                except RingBroken as error:
                    log.warning("%s", error)
                    places[ring.name] = ring.head
                    break
                room -= places[ring.name] - before
                found += [
                    _Read(ring, each, release)
                    for each in entries
                    if (release := self._release(each.release)) is not None
                ]
        return found

    def _release(self, name: str) -> Release | None:
        try:
            return Release.parse(name)
        except NameInvalid as error:
            self._say(f"recorded requests are dropped: {error}")
            return None

    def _record_batch(self, batch: list[_Read], outcome: Outcome, held: dict[str, int], now: float) -> None:
        for model, reads in _grouped(batch, lambda read: read.release.model).items():
            if model not in self._failed:
                try:
                    outcome.requests += self._record(model, reads, now)
                    continue
                except (OSError, SerinError, pa.ArrowException) as error:
                    self._failed[model] = self._clock(), error
            self._hold(model, reads, held)

    def _hold(self, model: str, reads: list[_Read], held: dict[str, int]) -> None:
        """Keeps entries in their rings, unless that would cost those of other models."""
        for ring, entries, release in reads:
            if ring.fill < _CROWDED:
                start = int(entries.start[0])
                held[ring.name] = min(held.get(ring.name, start), start)
            else:
                lost = self._given_up.setdefault(model, Counter())
                lost[ring.name, release.name] += int(np.maximum(entries.lost, 1).sum())

    def _retry(self) -> None:
        """Finds out, without reading anything, whether the records of models that failed can be written again."""
        for model, (t, _) in list(self._failed.items()):
            if self._clock() - t >= _RETRY_S:
                try:
                    with writing(self._home, model) as folder:
                        write_document(folder, read_document(self._home, model))
                    del self._failed[model]
                except (OSError, SerinError) as error:
                    self._failed[model] = self._clock(), error

    def _record(self, model: str, reads: list[_Read], now: float) -> int:
        with writing(self._home, model) as folder:
            document = read_document(self._home, model)
            document["last"] = last_number(self._home, model)
            counters = Counters.of(document)
            before = counters.requests
            done = {ring: counters.writer(ring.name).position for ring in {read.ring for read in reads}}
            fresh = _chosen(reads, lambda read: read.entries.end > done[read.ring])
            if fresh:
                rows = self._rows(fresh, counters, now)
                for (ring, release), lost in self._given_up.get(model, Counter[tuple[str, str]]()).items():
                    counters.release(release).dropped += lost
                    counters.writer(ring).lost += lost
                counters.limit_writers()
                commit(folder, counters.into(document), rows)
                self._given_up.pop(model, None)
        return counters.requests - before

    def _rows(self, reads: Sequence[_Read], counters: Counters, now: float) -> list[tuple[int, pa.Table]]:
        """The rows of each version. The counters are brought up to date."""
        tables: dict[int, list[pa.Table]] = {}
        for ring, group in _grouped(reads, lambda read: read.ring).items():
            writer, last = counters.writer(ring.name), max(group, key=lambda read: int(read.entries.end[-1]))
            writer.position, writer.release = int(last.entries.end[-1]), last.release.name
            writer.lost += sum(int(read.entries.lost.sum()) for read in group)
            writer.requests += sum(int((read.entries.lost == 0).sum()) for read in group)
        for release, group in _grouped(reads, lambda read: read.release).items():
            counts = counters.release(release.name)
            counts.share = float(group[-1].entries.share[-1])
            counts.dropped += sum(int(read.entries.lost.sum()) for read in group)
            requests = _chosen(group, lambda read: read.entries.lost == 0)
            table = self._table(release, requests, counters, now) if requests else None
            if table is not None:
                tables.setdefault(release.version, []).append(table)
        return [(version, alike(some)) for version, some in tables.items()]

    def _table(self, release: Release, reads: list[_Read], counters: Counters, now: float) -> pa.Table | None:
        """The rows of entries of one release, in the order of their arrival; None when none can be recorded."""
        counts, plan = counters.release(release.name), self._plans(release)
        if plan is None:
            counts.dropped += sum(len(read.entries) for read in reads)
            return None
        faults: Counter[str] = Counter()
        found, copies = [], []
        for ring, entries, _ in reads:
            addresses = entries.place + ring.address
            for at in np.flatnonzero(entries.encoding != PLAIN).tolist():
                if (copy := ring.inflated(int(entries.place[at]))) is not None:
                    copies.append(np.frombuffer(copy, np.uint8))  # until they are decoded
                    addresses[at] = copies[-1].ctypes.data
                else:
                    addresses[at] = 0
            faults[_COMPRESSED] += int((addresses == 0).sum())
            found.append(addresses[addresses != 0])
        hidden = {*plan.settings.mask, *plan.settings.drop}
        block = self._decode(plan.schema, hidden, np.concatenate(found))
        faults.update(block.faults)
        for reason, count in (+faults).items():
            counts.dropped += count
            counts.damaged += count
            self._say(f"requests of {release.name} cannot be recorded: {reason}")
        if not block.requests:
            return None
        counts.requests += block.requests
        counts.rows += block.rows
        return block_rows(release.name, plan.schema, block, drop=plan.settings.drop, now=now)

    def _finish(self, ring: Ring) -> None:
        """Removes a ring that is drained and whose writer has ended. Requests that it has counted and that are neither
        in the records nor counted as lost are counted for the release of its last entry."""
        if not ring.is_abandoned() or ring.tail < ring.head:
            return
        if any(name == ring.name for lost in self._given_up.values() for name, _ in lost):
            return  # its lost requests are not in the counters yet
        try:
            known = {
                model: writer
                for model in models_captured(self._home)
                if (writer := Counters.of(read_document(self._home, model)).writers.get(ring.name))
            }
            lost = ring.drawn - sum(writer.requests + writer.lost for writer in known.values())
            if lost > 0 and known:
                self._count_lost(max(known, key=lambda model: known[model].position), ring.name, lost)
        except (OSError, SerinError) as error:
            self._say(f"{ring.path} stays: {error}")
            return
        if lost > 0:
            log.warning("%d requests were answered and not recorded: their gateway was ended", lost)
        ring.path.unlink(missing_ok=True)
        self._rings.pop(ring.path).close()

    def _count_lost(self, model: str, ring: str, lost: int) -> None:
        with writing(self._home, model) as folder:
            document = read_document(self._home, model)
            counters = Counters.of(document)
            writer = counters.writer(ring)
            writer.lost += lost
            counters.release(writer.release).dropped += lost
            write_document(folder, counters.into(document))

    def _say(self, problem: str) -> None:
        if problem not in self._said:
            self._said.add(problem)
            log.warning("%s", problem)
