"""Cuts this host's request log into blocks of evidence and uploads them, each second exactly once.

The file <home>/agent/evidence.json holds how far the log was cut, and the object that was cut last. It is written
before the object is uploaded: an agent that dies in between uploads the same object again, and one that dies before has
cut nothing. As long as an object is not uploaded, nothing more is cut.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from serin.errors import ObjectExists
from serin.formats.cluster.desired_state import DesiredState, EvidenceArm
from serin.formats.cluster.evidence import HostEvidence, ModelEvidence, key_of
from serin.formats.serving.request_log import Offset, find_offset, read_requests
from serin.machine.durable import write_whole
from serin.machine.typed_json import Document, json2value
from serin.rollout.decide.blocks import Block, counts2json
from serin.rollout.decide.cutting import Arm, Mark, cut_requests
from serin.rollout.decide.plan import Plan
from serin.store.objects import Objects

log = logging.getLogger(__name__)

_KEEP_S: Final = 3600.0
_REMOVE_AT_ONCE: Final = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Course(Document):
    """How far the log was cut for one rollout."""

    rollout: str
    since_epoch: int
    offset: Offset
    mark: Mark = field(default_factory=Mark)
    bad_lines: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress(Document, form="serin.agent_evidence"):
    """`seq`: of the newest object that was cut; `pending`: its content while it is not known to be uploaded."""

    seq: int = 0
    pending: str | None = None
    courses: Mapping[str, Course] = field(default_factory=dict)  # by model


def cut_evidence(
    progress: Progress,
    desired: DesiredState,
    *,
    host: str,
    in_force: int,
    request_log: Path,
    now: float,
) -> Progress:
    """Returns the progress with the next object pending; unchanged where no rollout gathers evidence.

    How far a rollout was cut is kept until the model has another one: it may gather evidence again.
    """
    if not desired.arms:
        return progress
    courses: dict[str, Course] = {}
    models: dict[str, ModelEvidence] = {}
    resumed = {model: arm.resume[host] for model, arm in desired.arms.items() if host in arm.resume}
    if not progress.seq:  # numbers that were counted are not used again
        progress = replace(progress, seq=max((seq for seq, _ in resumed.values()), default=0))
    for model, arm in desired.arms.items():
        before = progress.courses.get(model)
        if before is None or before.rollout != arm.rollout:
            before = _begin(arm, resumed.get(model, (0, {}))[1], request_log)
        courses[model], models[model] = _cut(before, arm, request_log, now)
    complete_to = min(course.mark.complete_to for course in courses.values())
    found = HostEvidence(
        host=host, seq=progress.seq + 1, complete_to=complete_to, desired_seq=in_force, models=models
    )
    return Progress(seq=found.seq, pending=found.dump().decode(), courses={**progress.courses, **courses})


def _begin(arm: EvidenceArm, course: Mapping[str, Any], request_log: Path) -> Course:
    """Returns where a log is cut from for a rollout that this host knows nothing of: `course` as another process of it
    left it, else the beginning of the evidence."""
    if course:
        return json2value(Course, course)
    offset = find_offset(request_log, arm.since_t)
    return Course(rollout=arm.rollout, since_epoch=arm.since_epoch, offset=offset)


def _cut(before: Course, arm: EvidenceArm, request_log: Path, now: float) -> tuple[Course, ModelEvidence]:
    newest_epoch = max(arm.shares, default=arm.since_epoch)
    releases = Arm(
        candidate=arm.candidate,
        stable=arm.stable,
        epoch=newest_epoch,
        share=arm.shares.get(newest_epoch, 0.0),
        since=arm.since_epoch,
    )
    plan = Plan.from_json(arm.plan)
    course = replace(before, since_epoch=arm.since_epoch)
    blocks: dict[int, Block] = {}
    earlier: Any = None
    more = True
    while more:
        batch = read_requests(request_log, course.offset)
        more = batch.more
        mark, cut = cut_requests(
            course.mark, batch.requests, arm=releases, shares=arm.shares, plan=plan, now=None if more else now
        )
        for second, block in cut.blocks.items():
            blocks[second] = blocks[second] + block if second in blocks else block
        if cut.before is not None:
            earlier = cut.before if earlier is None else earlier + cut.before
        course = replace(course, offset=batch.offset, mark=mark, bad_lines=course.bad_lines + batch.bad_lines)
    evidence = ModelEvidence(
        rollout=arm.rollout,
        since_epoch=arm.since_epoch,
        newest=course.mark.newest,
        blocks=tuple((second, block.to_json()) for second, block in sorted(blocks.items())),
        before=None if earlier is None else counts2json(earlier),
        bad_lines=course.bad_lines - before.bad_lines,
        course=course.to_json(),
    )
    return course, evidence


class EvidenceUpload:
    """Uploads what is cut, and removes objects that nobody needs any more."""

    def __init__(
        self, file: Path, *, host: str, request_log: Path, clock: Callable[[], float] = time.time
    ) -> None:
        self._file, self._host, self._log, self._clock = file, host, request_log, clock
        self._progress = self._read()
        self._uploaded: deque[tuple[float, str]] = deque()  # the oldest first
        self._listed = False

    @property
    def seq(self) -> int:
        """The number of the newest object that is in the store."""
        return self._progress.seq - (self._progress.pending is not None)

    def step(self, objects: Objects, desired: DesiredState, in_force: int) -> None:
        """Uploads what was left pending, then what is new. Raises StoreUnreachable; nothing is lost then."""
        self._find_earlier(objects)
        if self._progress.pending is not None:
            self._upload(objects)
        then = cut_evidence(
            self._progress,
            desired,
            host=self._host,
            in_force=in_force,
            request_log=self._log,
            now=self._clock(),
        )
        if then is not self._progress:
            self._keep(then)
        if then.pending is not None:
            self._upload(objects)
        self._remove_old(objects)

    def _upload(self, objects: Objects) -> None:
        progress = self._progress
        assert progress.pending is not None, "called with something to upload"
        key = key_of(self._host, progress.seq)
        try:
            objects.create(key, progress.pending.encode())
        except ObjectExists:
            self._meet(objects, key, progress.pending)
        else:
            self._sent(key)

    def _sent(self, key: str) -> None:
        self._keep(replace(self._progress, pending=None))
        self._uploaded.append((self._clock(), key))

    def _meet(self, objects: Objects, key: str, content: str) -> None:
        """Finds out whether an object that exists is the one to be uploaded: an answer may have been lost."""
        found = objects.read(key)
        if found is not None and found.content == content.encode():
            self._sent(key)
            return
        # This home does not know what an earlier one of this host has uploaded.
        taken = max(map(_seq, objects.keys(evidence_prefix(self._host))), default=self._progress.seq)
        log.warning("%s was written by another home of this host; continuing after %d", key, taken)
        moved = replace(HostEvidence.load(content.encode()), seq=taken + 1)
        self._keep(replace(self._progress, seq=moved.seq, pending=moved.dump().decode()))
        self._upload(objects)

    def _find_earlier(self, objects: Objects) -> None:
        """Finds, once, what earlier processes of this host have uploaded: numbers are never used again."""
        if self._listed:
            return
        earlier = objects.keys(evidence_prefix(self._host))
        self._uploaded.extend((self._clock(), key) for key in earlier)
        newest = max(map(_seq, earlier), default=0)
        if self._progress.pending is None and newest > self._progress.seq:
            self._keep(replace(self._progress, seq=newest))
        self._listed = True

    def _remove_old(self, objects: Objects) -> None:
        """Removes some objects that are older than an hour. Those of an earlier process count from when it is seen."""
        for _ in range(_REMOVE_AT_ONCE):
            if not self._uploaded or self._uploaded[0][0] > self._clock() - _KEEP_S:
                return
            objects.remove(self._uploaded[0][1])
            self._uploaded.popleft()

    def _keep(self, progress: Progress) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self._file, progress.dump())
        self._progress = progress

    def _read(self) -> Progress:
        try:
            return Progress.load(self._file.read_bytes())
        except FileNotFoundError:
            return Progress()
        except (OSError, ValueError) as error:
            log.warning("%s cannot be read (%s); evidence begins again", self._file, error)
            return Progress()


def evidence_prefix(host: str) -> str:
    return key_of(host, 0).rpartition("/")[0] + "/"


def _seq(key: str) -> int:
    return int(key.rpartition("/")[2].removesuffix(".json"))
