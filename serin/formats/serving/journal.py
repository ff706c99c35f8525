"""The journal of a model's rollouts: one JSON line per decision, on disk before anything acts on it.

One writer at a time (flock, given back by the kernel when it dies), any number of readers. A decision counts once
its line ends in a newline and parses; what is behind the last such line was never acted upon and is cut off by the
next writer.

A journal that has become large is compacted: rewritten beside itself with the lines that still matter, byte for byte,
and moved into place. A crash leaves the old one or the new one. The header counts how often that was done, so that a
reader that follows the journal knows that its place in it is gone.

An urgent decision does not wait for a disk that takes no more: it is kept in the `spare` file, which is in memory, and
counts from then on. It is moved into the journal as soon as the disk takes it.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final, Self

from serin.errors import FileBroken, JournalHeld, JournalUnknown
from serin.machine.durable import sync, write_whole
from serin.machine.locks import try_lock

logger = logging.getLogger(__name__)

NOT_PROMISED = (
    "not promised for processes whose own latency level wanders by 5% or more for minutes: "
    "rollout.second_opinion helps, docs/how-to/roll-out.md has the figures"
)
"""Where the promise of `false_rollback` ends, for the report, the console and `serin check`."""

FORMAT: Final = "serin.journal"
VERSION: Final = 2  # 1: evidence under other names

_TAIL_BYTES: Final = 64 << 10
_COMPACT_BYTES: Final = 4 << 20

Keep = Callable[[Sequence["Decision"]], Collection[int]]  # the numbers of the decisions that still matter


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One line. `evidence` is what was seen, `state` what a controller needs to resume exactly; both JSON objects."""

    t: float  # seconds
    rollout: str
    phase: str
    step: int | None  # index of the step while traffic is shifted
    weight: float  # percent of traffic the candidate has from now on
    verdict: str | None
    reason: str
    by: str
    evidence: dict[str, Any] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)
    command: str | None = None  # the command that was obeyed by this decision
    seq: int = 0  # counts the decisions from 1, also those that compaction has left out; given by append

    @classmethod
    def of_row(cls, row: Mapping[str, Any]) -> Self:
        """The decision that a JSON object holds; keys of later versions are left out. TypeError: it holds none."""
        return cls(**{part.name: row[part.name] for part in fields(cls) if part.name in row})


class Journal:
    """A journal open for writing. Opening takes the lock and cuts off a torn end."""

    def __init__(self, path: Path, *, spare: Path | None = None, compact_bytes: int = _COMPACT_BYTES) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self._spare = path, spare
        self._compact_bytes = self._compact_at = compact_bytes
        self._file = _open_locked(path)
        try:
            self._scratch.unlink(missing_ok=True)  # of a compaction that was killed
            self._end, last = self._mend()
        except BaseException:
            os.close(self._file)
            raise
        self._seq = last.seq if last else 0
        self._waiting = [] if spare is None else _spare_decisions(spare, after=self._seq)
        self._seq = self._waiting[-1].seq if self._waiting else self._seq

    def append(self, decision: Decision, *, urgent: bool = False) -> Decision:
        """`decision` with its number, once it is on disk. After an error nothing of it remains.

        An urgent one counts also where the disk does not take it: it waits, and `flush` writes it.
        """
        numbered = replace(decision, seq=self._seq + 1)
        self._waiting.append(numbered)
        try:
            self.flush()
        except OSError:
            if not urgent:
                self._waiting.pop()
                raise
            with suppress(OSError):  # where memory is full as well, this process alone knows them
                if self._spare is not None:
                    self._spare.parent.mkdir(parents=True, exist_ok=True)
                    write_whole(self._spare, b"".join(map(_line, self._waiting)))
        except BaseException:
            self._waiting.pop()
            raise
        self._seq = numbered.seq
        return numbered

    @property
    def waiting(self) -> int:
        """How many decisions are not on disk yet."""
        return len(self._waiting)

    def flush(self) -> None:
        """Writes the decisions that wait. Raises OSError while the disk does not take them."""
        if self._waiting:
            self._write(b"".join(map(_line, self._waiting)))
            self._waiting = []
            with suppress(OSError):  # what the journal has is not read from there
                if self._spare is not None:
                    self._spare.unlink()

    def compact(self, keep: Keep) -> bool:
        """Leaves out what `keep` does not name, if the journal is large and has doubled since it was last compacted.

        True when that was done. After an error the journal is as it was.
        """
        if self._end < self._compact_at:
            return False
        self._compact_at = 2 * self._end  # also when it fails: not again with each decision
        lines = self.path.read_bytes()[: self._end].splitlines(keepends=True)
        known = [(line, decision) for line in lines[1:] if (decision := _decision(line)) is not None]
        kept = {*keep([decision for _, decision in known]), self._seq}
        header = {"format": FORMAT, "version": VERSION, "compacted": (_compacted(lines[0]) or 0) + 1}
        rows = [json.dumps(header).encode() + b"\n", *(line for line, found in known if found.seq in kept)]
        self._replace(b"".join(rows))
        self._compact_at = max(self._compact_bytes, 2 * self._end)
        return True

    def last(self) -> Decision | None:
        return last_decision(self.path, self._spare)

    def all(self) -> list[Decision]:
        return [*read_decisions(self.path), *self._waiting]

    def close(self) -> None:
        os.close(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _scratch(self) -> Path:
        return self.path.with_name(f".{self.path.name}.compact")

    def _replace(self, data: bytes) -> None:
        """The journal's file is another one from now on, locked before anyone can open it."""
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        file = os.open(self._scratch, flags, 0o644)
        try:
            if not try_lock(file):
                raise JournalHeld(path=self.path)
            _write_at(file, data, 0)
            os.fsync(file)
            self._scratch.replace(self.path)
        except BaseException:
            os.close(file)
            self._scratch.unlink(missing_ok=True)
            raise
        old, self._file, self._end = self._file, file, len(data)
        os.close(old)
        sync(self.path.parent)

    def _write_again(self) -> None:
        """The file was removed while it was open: what this process holds of it gets its name again."""
        if self.path.exists():
            problem = "another file took its place while a controller had it open"
            advice = "move that file away, or restart the controller (`serin down` and `serin up`) to use it"
            raise FileBroken(path=self.path, problem=problem, advice=advice)
        logger.warning(f"{self.path} was removed while it was in use; it is written again")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._replace(os.pread(self._file, self._end, 0))

    def _mend(self) -> tuple[int, Decision | None]:
        """End of the last whole line, and its decision."""
        data = self.path.read_bytes()
        end, last, place = 0, None, 0
        for line in data.splitlines(keepends=True):
            place += len(line)
            if end == 0:
                if line.endswith(b"\n") and _is_header(self.path, line):
                    end = place
            elif (decision := _decision(line)) is not None:
                end, last = place, decision
        if end == 0:
            self._end = 0
            self._write(json.dumps({"format": FORMAT, "version": VERSION}).encode() + b"\n")
            sync(self.path.parent)
            return self._end, None
        if end < len(data):
            torn = torn_file(self.path)
            logger.warning(
                f"{self.path}: {len(data) - end} bytes at its end are not a decision; moved to {torn}"
            )
            with suppress(OSError):
                write_whole(torn, data[end:])
            os.ftruncate(self._file, end)
            os.fsync(self._file)
        return end, last

    def _write(self, line: bytes) -> None:
        """At the end of what counts. After an error the file ends there again, as far as that can be done."""
        found = os.fstat(self._file)
        if found.st_nlink == 0:
            self._write_again()
        elif found.st_size < self._end:
            lost = self._end - found.st_size
            logger.warning(f"{self.path}: {lost} bytes at its end were removed by another process")
            self._end, line = found.st_size, b"\n" + line
        try:
            end = _write_at(self._file, line, self._end)
            os.fsync(self._file)
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(self._file, self._end)
            raise OSError(error.errno, error.strerror, str(self.path)) from error
        if os.fstat(self._file).st_size > end:  # what a failed write left there
            os.ftruncate(self._file, end)
        self._end = end


def torn_file(path: Path) -> Path:
    """Where the bytes at a journal's end that are not a decision are moved when it is opened."""
    return path.with_name(f"{path.name}.torn")


def torn_bytes(path: Path) -> int:
    """Returns how many bytes behind the last whole line of a journal nobody can read; 0 where all is well."""
    with suppress(OSError):
        return torn_file(path).stat().st_size
    try:
        size, lines = _tail(path)
    except OSError:
        return 0
    if size > _TAIL_BYTES and len(lines) == 1 and lines[0].endswith(b"\n"):
        return 0  # one very long line
    read = [_decision(line) is not None or _compacted(line) is not None for line in lines]
    return sum(len(line) for place, line in enumerate(lines) if not any(read[place:]))


def _open_locked(path: Path) -> int:
    """The file that has the journal's name once the lock is had: a compaction may have replaced it in between."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            if not try_lock(file):
                raise JournalHeld(path=path)
            if os.path.samestat(path.stat(), os.fstat(file)):
                return file
        except BaseException:
            os.close(file)
            raise
        os.close(file)


def _write_at(file: int, data: bytes, place: int) -> int:
    """The place behind what was written."""
    rest = memoryview(data)
    while rest:
        written = os.pwrite(file, rest, place)
        place, rest = place + written, rest[written:]
    return place


def read_decisions(path: Path, spare: Path | None = None) -> list[Decision]:
    """Every decision that counts, oldest first. A journal that is not there is an empty one."""
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    if lines and lines[0].endswith(b"\n"):
        _is_header(path, lines[0])
    found = [decision for line in lines[1:] if (decision := _decision(line)) is not None]
    return [*found, *_spare_decisions(spare, after=found[-1].seq if found else 0)]


def last_decision(path: Path, spare: Path | None = None) -> Decision | None:
    """The newest decision that counts. Reads the end of the file only, as long as it holds one."""
    found = _last_on_disk(path)
    waiting = _spare_decisions(spare, after=found.seq if found else 0)
    return waiting[-1] if waiting else found


def _spare_decisions(spare: Path | None, *, after: int) -> list[Decision]:
    """Urgent decisions that are not in the journal yet; one that is may still be here after a crash."""
    try:
        lines = spare.read_bytes().splitlines(keepends=True) if spare else []
    except OSError:  # there is none
        return []
    found = (decision for line in lines if (decision := _decision(line)) is not None)
    return [decision for decision in found if decision.seq > after]


def _line(decision: Decision) -> bytes:
    return json.dumps(asdict(decision), separators=(",", ":")).encode() + b"\n"


def _tail(path: Path) -> tuple[int, list[bytes]]:
    """Returns the size of a journal and the lines of its last bytes; the first may be cut."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - _TAIL_BYTES, 0))
        return size, file.read().splitlines(keepends=True)


def _last_on_disk(path: Path) -> Decision | None:
    try:
        size, lines = _tail(path)
    except FileNotFoundError:
        return None
    whole = lines if size <= _TAIL_BYTES else lines[1:]  # the first may have been cut by the seek
    for line in reversed(whole):
        if (decision := _decision(line)) is not None:
            return decision
    return None if size <= _TAIL_BYTES else next(reversed(read_decisions(path)), None)


class JournalReader:
    """One rollout's decisions, asked for again and again while they are made: each time only what is new is read."""

    def __init__(self, path: Path, rollout: str, spare: Path | None = None) -> None:
        self._path, self._rollout, self._spare = path, rollout, spare
        self._mark = f'"rollout":{json.dumps(rollout)},'.encode()
        self._place, self._compacted, self._known = 0, 0, list[Decision]()

    def decisions(self) -> list[Decision]:
        """All of them, oldest first. A journal that is not there is an empty one."""
        try:
            with self._path.open("rb") as file:
                compacted = _compacted(file.readline())
                # a line that could not be kept was taken back
                shorter = file.seek(0, os.SEEK_END) < self._place
                if shorter or compacted not in (None, self._compacted):
                    self._place, self._known = 0, []
                self._compacted = self._compacted if compacted is None else compacted
                file.seek(self._place)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data.rfind(b"\n") + 1
        self._place += whole
        for line in data[:whole].splitlines(keepends=True):
            decision = _decision(line) if self._mark in line else None  # most lines may be of other rollouts
            if decision is not None and decision.rollout == self._rollout:
                self._known.append(decision)
        waiting = _spare_decisions(self._spare, after=self._known[-1].seq if self._known else 0)
        return [*self._known, *(decision for decision in waiting if decision.rollout == self._rollout)]


def _is_header(path: Path, line: bytes) -> bool:
    """False for a first line that is not JSON (torn); JournalUnknown for another program's file or another version."""
    try:
        header = json.loads(line)
    except ValueError:
        return False
    if not isinstance(header, dict) or (header.get("format"), header.get("version")) != (FORMAT, VERSION):
        raise JournalUnknown(path=path, found=line[:80].decode(errors="replace").strip())
    return True


def _compacted(header: bytes) -> int | None:
    """How often the journal was compacted; None for a header that is torn or damaged."""
    try:
        return int(json.loads(header).get("compacted", 0))
    except (ValueError, TypeError, AttributeError):
        return None


def _decision(line: bytes) -> Decision | None:
    """None for a line that is torn or damaged."""
    if not line.endswith(b"\n"):
        return None
    try:
        return Decision.of_row(json.loads(line))
    except (ValueError, TypeError):
        return None
