"""Scores tables without a server: what `serin predict --batch` and `serin score` share, and scoring on a schedule.

A target of scheduled scoring is a folder that grows by one run at a time:

    OUT/run-00002/part-00000.parquet ...    the rows of a run with their scores
    OUT/run-00002/_SUCCESS                  the watermark: the files that were scored, with their marks, and the release
    OUT/run-00002/_RECORDED                 its rows are among the recorded requests

A run appears with its watermark in one rename. Until then it is in `.run-00002.partial`, which readers of Parquet leave
out and the next call completes. So a process may end at any point: no row is lost, and none is there twice.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from serin.errors import NotFound, PredictionFailed, ScoringRefused, StageStopped
from serin.formats.bundle import CORE
from serin.formats.schema import read_schema
from serin.machine import environment
from serin.machine.documents import parse_json
from serin.machine.durable import write_whole
from serin.machine.hardware import core_count, inventory
from serin.machine.leases import lease
from serin.machine.locks import locked
from serin.machine.typed_json import Document
from serin.store.artifacts import Bundle, Release
from serin.store.store import Store
from serin.store.trust import find_trusted

if TYPE_CHECKING:
    from serin.monitoring.capture.bulk import BulkRecords
    from serin.scoring.parts import Parts
    from serin.scoring.predict import Place

logger = logging.getLogger(__name__)

BulkDevice = Literal["auto", "cpu", "gpu"]
_GPU_BYTES = 4 * 2**30  # of a network with its batches; leased beside others
_SUCCESS, _RECORDED, _LOCK = "_SUCCESS", "_RECORDED", ".lock"
_GLOB: Final = "*?["
_NAMED = 3  # files that a refusal names


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredRun(Document, form="serin.scored"):
    """The watermark of a run. `files`: with the mark by which a change is seen. `columns`: of the result, with their
    types. `t`: seconds since 1970."""

    release: str
    t: float
    rows: int
    files: dict[str, str]
    columns: dict[str, str] = field(default_factory=dict)


def score_new(
    name: str,
    rows: str,
    out: str,
    *,
    since: str | None = None,
    late: bool = False,
    scheduler: str | None = None,
    device: BulkDevice = "cpu",
    workers: int | None = None,
    stop: threading.Event | None = None,
) -> ScoredRun | None:
    """Scores the files at `rows` that no earlier run has scored into the folder `out`; None when there are none.

    `name`: MODEL[:VERSION], the live version by default. `rows`: a folder, a glob or a URL; a partition is a file, or a
    folder of files under a glob. `since`: only files whose name behind the fixed part of `rows` is at least this text,
    such as `date=2026-01-31`. `late`: also files that come before one that was scored. `stop`: when it is set, the run
    does not appear and StageStopped is raised; the next one continues it.

    ScoringRefused for files that have changed since they were scored, for late ones, for columns of another type than
    before, and for targets that cannot be written in this way. Then nothing has changed.
    """
    folder = _target(out)
    with _locked(folder):
        runs = read_runs(folder)
        if runs:
            _record(folder, max(runs), runs[max(runs)])
        new = _new_files(rows, runs.values(), since=since, late=late)
        if not new:
            return None
        bundle = open_bundle(name)
        number = max(runs, default=0) + 1
        done = _score(
            bundle,
            new,
            folder / _name(number),
            runs,
            scheduler=scheduler,
            device=device,
            workers=workers or core_count(),
            stop=stop or threading.Event(),
        )
        _record(folder, number, done)
    return done


def read_runs(folder: Path) -> dict[int, ScoredRun]:
    """The watermarks of the runs in a target, by number, oldest first."""
    found = {}
    for path in sorted(folder.glob(f"run-*/{_SUCCESS}")):
        advice = (
            "restore it, or score into another folder: without it the rows of a run could be scored twice"
        )
        found[int(path.parent.name.removeprefix("run-"))] = parse_json(
            str(path), path.read_bytes(), ScoredRun.from_json, advice=advice
        )
    return found


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    entered = False
    try:
        with locked(folder / _LOCK, wait_s=0):
            entered = True
            yield
    except TimeoutError as error:
        if entered:
            raise
        raise ScoringRefused(target=str(folder), reason="another run writes it") from error


def _target(out: str) -> Path:
    """The folder of a target. Others are refused by name."""
    if out.partition("://")[0] in ("delta", "postgresql", "mysql", "sqlite") or out.endswith(
        (".db", ".sqlite")
    ):
        reason = "Delta tables and databases cannot be targets; score into a folder of Parquet files"
        raise ScoringRefused(target=out, reason=reason)
    if "://" in out:
        reason = "a run must appear in one step, which a folder of a disk can and an object store cannot"
        raise ScoringRefused(target=out, reason=f"{reason}; `serin predict --batch` writes there")
    folder = Path(out).absolute()
    if folder.is_file() or folder.suffix in (".parquet", ".csv", ".jsonl"):
        raise ScoringRefused(
            target=out, reason="it is a file; name a folder, which gets a folder for each run"
        )
    if (folder / "_delta_log").exists():
        reason = "it is a Delta table, which cannot be a target; score into a folder of Parquet files"
        raise ScoringRefused(target=out, reason=reason)
    return folder


def _name(number: int) -> str:
    return f"run-{number:05d}"


def _new_files(rows: str, runs: Iterable[ScoredRun], *, since: str | None, late: bool) -> dict[str, str]:
    """The files that no run has scored, in the order of their names. ScoringRefused where that is not plain."""
    from serin.scoring.parts import find_marked

    found, scored = find_marked(rows), dict[str, str]()
    for run in runs:
        scored |= run.files
    behind = len(rows[: min((rows.find(sign) for sign in _GLOB if sign in rows), default=len(rows))])
    changed = [path for path, mark in found.items() if scored.get(path, mark) != mark]
    if changed:
        reason = f"{_some(changed)} changed after being scored; score such rows under another name"
        raise ScoringRefused(target=rows, reason=reason)
    new = {path: mark for path, mark in found.items() if path not in scored}
    if since is not None:
        new = {path: mark for path, mark in new.items() if path[behind:].lstrip("/") >= since}
    last = max(scored, default="")
    before = [path for path in new if path < last]
    if before and not late:
        told = f"{_some(before)} came late: {last} was scored already"
        reason = f"{told}. --late scores late files, --since leaves them out"
        raise ScoringRefused(target=rows, reason=reason)
    return new


def _some(paths: list[str]) -> str:
    more = f" and {len(paths) - _NAMED} more" if len(paths) > _NAMED else ""
    return ", ".join(paths[:_NAMED]) + more


def _score(
    bundle: Bundle,
    files: Mapping[str, str],
    run: Path,
    before: Mapping[int, ScoredRun],
    *,
    scheduler: str | None,
    device: BulkDevice,
    workers: int,
    stop: threading.Event,
) -> ScoredRun:
    from serin.scoring.bulk import score_into_folder
    from serin.scoring.parts import pieces_of

    pieces, done = pieces_of(files), list[ScoredRun]()
    known = before[max(before)].columns if before else None

    def watermark(parts: Parts, rows: int) -> bytes:
        if stop.is_set():
            raise StageStopped(stage="score")
        found = {number: _columns(parts, number) for number in range(len(pieces))}
        for number, columns in found.items():
            _check_columns(pieces[number].path, columns, known or found[0])
        done.append(
            ScoredRun(
                release=bundle.release.name,
                t=time.time(),
                rows=rows,
                files=dict(files),
                columns=found.get(0, {}),
            )
        )
        return done[0].dump()

    try:
        with placed(bundle, device, scheduler) as place:
            score_into_folder(
                Path(bundle.path),
                pieces,
                run,
                workers=workers,
                scheduler=scheduler,
                place=place,
                digest=bundle.digest,
                check=watermark,
            )
    except OSError as error:
        reason = f"{run} cannot be written: {error}; nothing of this run is there"
        raise ScoringRefused(target=str(run.parent), reason=reason) from error
    return done[0]


def _columns(parts: Parts, number: int) -> dict[str, str]:
    return {each.name: str(each.type) for each in parts.schema(number)}


def _check_columns(path: str, columns: Mapping[str, str], known: Mapping[str, str]) -> None:
    """Raises ScoringRefused for rows that a reader of the target could not read together with those before."""
    if columns == known:
        return
    wrong = [
        f"{name} is {columns.get(name, 'missing')}, before {known.get(name, 'missing')}"
        for name in {**known, **columns}
        if columns.get(name) != known.get(name)
    ]
    what = "; ".join(wrong) or "the columns are in another order"
    reason = f"the columns have changed with {path}: {what}. Score into another folder, or change the file"
    raise ScoringRefused(target=path, reason=reason)


def _record(folder: Path, number: int, done: ScoredRun) -> None:
    """Puts the rows of a run among the recorded requests, once: ids are made of the run and the row, and those that an
    earlier attempt has recorded are left out."""
    from serin.scoring.parts import read_parts

    run = folder / _name(number)
    if (run / _RECORDED).exists():
        return
    release = Release.parse(done.release)
    try:
        bundle = Store.open().bundle(release.model, release.label)
    except NotFound:
        logger.warning(f"{done.release} is gone; the rows of {run} are not recorded")
        return
    name = f"bulk-{hashlib.sha256(str(run).encode()).hexdigest()[:12]}"
    records = records_of(bundle, run=name)
    if records is not None:
        for part, table in enumerate(read_parts(str(run))):
            records.add(table, part)
        records.finish()
    write_whole(run / _RECORDED, b"")


def records_of(bundle: Bundle, run: str | None = None) -> BulkRecords | None:
    """The records of a run of bulk scoring; None when the version's spec records nothing. `run`: a name that is the
    same when the run is repeated."""
    from serin.monitoring.capture.bulk import BulkRecords
    from serin.monitoring.capture.read import captured_tables
    from serin.spec.stored import stored_capture

    settings, home = stored_capture(Path(bundle.path)), environment.home()
    if not settings.share:
        return None
    known: set[str] = set()
    if run is not None:
        for table in captured_tables(home, bundle.model, versions=[bundle.version], columns=["_id"]):
            known |= {
                each for each in table.column("_id").unique().to_pylist() if each and each.startswith(run)
            }
    schema = read_schema(Path(bundle.path))
    return BulkRecords(home, bundle.release, schema, settings, run=run, known=known)


@contextmanager
def placed(bundle: Bundle, device: BulkDevice, scheduler: str | None) -> Iterator[Place]:
    """Holds a share of a GPU while rows are scored there. `auto`: a GPU for a version that was exported for one."""
    if device == "cpu" or (device == "auto" and scheduler is not None):
        yield "cpu"
        return
    reason = _no_gpu(bundle, scheduler)
    if reason and device == "gpu":
        raise PredictionFailed(model=bundle.model, status="refused", reason=f"--device gpu: {reason}")
    if reason:
        yield "cpu"
        return
    room = min(_GPU_BYTES, max(each.memory_bytes for each in inventory()) // 2)
    with (
        lease(1, home=environment.home(), purpose="bulk scoring", shared=True, memory_bytes=room) as held,
        environment.showing_devices(held.ids),
    ):
        yield "cuda"


def _no_gpu(bundle: Bundle, scheduler: str | None) -> str:
    """Returns why a version is not scored on a GPU of this machine; empty when it can be."""
    if scheduler is not None:
        return "a Dask scheduler's workers score on their CPUs; leave out --scheduler"
    if not inventory():
        return "there is no GPU here"
    from serin.scoring.session import has_device

    if not has_device("cuda"):
        return "ONNX Runtime has no CUDA provider; pip install 'serin[gpu]'"
    if not (Path(bundle.path) / CORE).is_file():
        return "the version was not exported for a GPU; set export.target: gpu"
    return ""


def open_bundle(name: str) -> Bundle:
    """Returns what MODEL[:VERSION] names; the live version, else the newest, when it names none: a model need not be
    served to be scored in bulk. BundleUntrusted when signatures are required and no trusted key has signed it."""
    store = Store.open()
    found = store.release(name, prefer="live")
    return find_trusted(store, found.model, found.label)
