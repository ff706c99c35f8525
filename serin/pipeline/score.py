"""Scores tables without a server: what `serin predict --batch` and `serin score` share, and scoring on a schedule.

A run of the schedule scores the rows that no run before it has scored. Its parts are files first, then they become part
of the target together with the run's watermark, in one step (scoring/targets). Until then the next call completes or
replaces them. So a process may end at any point: no row is lost, and none is there twice.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from serin.errors import NotFound, PredictionFailed, ScoringRefused, StageStopped
from serin.formats.bundle import CORE
from serin.formats.schema import read_schema
from serin.machine import environment
from serin.machine.durable import write_whole
from serin.machine.hardware import Device, core_count, inventory
from serin.machine.leases import lease
from serin.machine.locks import locked
from serin.scoring.targets.folder import FolderTarget, open_folder
from serin.scoring.targets.target import (
    RECORDED,
    ScoredRun,
    Target,
    finished_run,
    run_folders,
    run_name,
    run_number,
)
from serin.spec.scores import Entry, ResultDelta, ResultTable, read_source, read_target
from serin.store.artifacts import Bundle, Release
from serin.store.receipt import Receipt, measure
from serin.store.stage_keys import note
from serin.store.stage_results import receipt_file
from serin.store.store import Store
from serin.store.trust import find_trusted

if TYPE_CHECKING:
    from serin.monitoring.capture.bulk import BulkRecords
    from serin.pipeline.new_rows import NewRows
    from serin.scoring.parts import Parts
    from serin.scoring.predict import Place

logger = logging.getLogger(__name__)

BulkDevice = Literal["auto", "cpu", "gpu"]
_GPU_BYTES = 4 * 2**30  # of a network with its batches; leased beside others
_LOCK, _ROWS, _GONE = ".lock", ".rows", ".gone"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A run that is in the target, and what it cost."""

    run: ScoredRun
    receipt: Receipt

    def to_json(self) -> dict[str, Any]:
        return {**self.run.to_json(), "receipt": self.receipt.to_json()}


def score_new(
    name: str,
    rows: Entry,
    out: Entry,
    *,
    since: str | None = None,
    late: bool = False,
    scheduler: str | None = None,
    device: BulkDevice = "cpu",
    workers: int | None = None,
    run: str | None = None,
    stop: threading.Event | None = None,
) -> Scored | None:
    """Scores the rows that no earlier run has scored into the target `out`; None when there are none.

    `rows`: an entry as in `data.tables`. `out`: a folder, {delta: PATH} or {table: NAME, connection: env:URI}. `since`
    and `late`: see docs/how-to/schedule.md. `run`: of the orchestrator. `stop`: when it is set, the run does not appear
    and StageStopped is raised; the next one continues it. ScoringRefused where rows or target do not fit; then nothing
    has changed.
    """
    from serin.pipeline.new_rows import check_unchanged, find_new

    source, target = read_source(rows), open_target(out)
    with _locked(target):
        runs = target.read_runs()
        _finish(target, runs)
        new = find_new(source, runs, since=since, late=late, scratch=target.folder / _ROWS)
        if new is None:
            return None
        _refuse_own(target, new)
        bundle, number = open_bundle(name), max(runs, default=0) + 1
        last = runs[max(runs)].columns if runs else None
        with placed(bundle, device, scheduler) as place, measure("score", place.devices) as measured:
            measured.rows, done = _score(
                bundle,
                new,
                target,
                number,
                last,
                partial(check_unchanged, source, new),
                scheduler=scheduler,
                place=place.place,
                workers=workers or core_count(),
                stop=stop or threading.Event(),
            )
            target.commit(number, done)
        assert measured.receipt is not None
        _keep_receipt(target, number, measured.receipt, run)
        _finish(target, {**runs, number: done})
    return Scored(run=done, receipt=measured.receipt)


def _refuse_own(target: Target, new: NewRows) -> None:
    rows = f"{target.folder / _ROWS}/"  # of a query
    if any(each.path.startswith(f"{target.name}/") and not each.path.startswith(rows) for each in new.pieces):
        raise ScoringRefused(target=target.name, reason="its own files are among the rows to be scored")


def open_target(out: Entry) -> Target:
    """The target that an entry names; nothing is read or written. Runs of tables are made in the home."""
    found = read_target(out)
    if isinstance(found, str):
        return open_folder(found)
    key = hashlib.sha256(found.model_dump_json().encode()).hexdigest()[:16]
    folder = environment.home() / "scores" / key
    if isinstance(found, ResultDelta):
        from serin.scoring.targets.delta import open_delta

        return open_delta(found.delta, folder)
    assert isinstance(found, ResultTable)
    from serin.scoring.targets.sql import SqlTarget

    return SqlTarget(found, folder)


@contextmanager
def _locked(target: Target) -> Iterator[None]:
    entered = False
    try:
        target.folder.mkdir(parents=True, exist_ok=True)
        with locked(target.folder / _LOCK, wait_s=0):
            entered = True
            yield
    except TimeoutError as error:
        if entered:
            raise
        raise ScoringRefused(target=target.name, reason="another run writes it") from error
    except OSError as error:
        if entered:
            raise
        raise ScoringRefused(target=target.name, reason=f"it cannot be written: {error}") from error


def _finished(target: Target, number: int, bundle: Bundle, new: NewRows) -> ScoredRun | None:
    """The run with this number when its files are there, of the same rows and version, and only its commit is missing.
    Other files of that number are removed."""
    found = finished_run(target.folder, number)
    if found is None:
        return None
    if found == new.watermark(bundle.release.name, found.t, found.rows, found.columns):
        return found
    _remove(target.folder / run_name(number))
    return None


def _remove(folder: Path) -> None:
    """Removes a run's files, or a file; a kill on the way leaves none that look whole."""
    if not folder.is_dir():
        folder.unlink()
        return
    gone = folder.with_name(_GONE)
    shutil.rmtree(gone, ignore_errors=True)
    folder.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def _finish(target: Target, runs: Mapping[int, ScoredRun]) -> None:
    """Records the rows of the runs that are in the target, where that is missing, and removes the files that are not
    needed: not those of rows that could not be recorded."""
    last, folder = max(runs, default=0), target.folder
    for number, run in run_folders(folder).items():
        if number <= last and _is_recorded(run, number, runs) and not isinstance(target, FolderTarget):
            _remove(run)
    shutil.rmtree(folder / _ROWS, ignore_errors=True)
    for path in folder.glob(".run-*"):
        if run_number(path.name[1:].partition(".")[0]) in range(1, last + 1):
            _remove(path)


def _is_recorded(run: Path, number: int, runs: Mapping[int, ScoredRun]) -> bool:
    """Whether nothing of these files is left to be recorded. Another home may have committed a run of that number."""
    if (run / RECORDED).exists() or finished_run(run.parent, number) != runs.get(number):
        return True
    return _record(run, runs[number])


def _keep_receipt(target: Target, number: int, receipt: Receipt, run: str | None) -> None:
    """Beside those of other stages; `serin runs show` finds it by the orchestrator's run."""
    home = environment.home()
    key = hashlib.sha256(target.name.encode()).hexdigest()[:16]
    file = receipt_file(home, "score", f"{key}-{number:05d}")
    file.parent.mkdir(parents=True, exist_ok=True)
    receipt.write(file)
    if run is not None:
        why = f"run {number} of {target.name}"
        note(home, run, "score", ran=True, why=why, receipt=str(file.relative_to(home)))


def _score(
    bundle: Bundle,
    new: NewRows,
    target: Target,
    number: int,
    known: Mapping[str, str] | None,
    check: Callable[[], None],
    *,
    scheduler: str | None,
    place: Place,
    workers: int,
    stop: threading.Event,
) -> tuple[int, ScoredRun]:
    """Makes the files of a run. `known`: the columns of the run before. `check`: refuses rows that have changed.
    Returns with it the number of rows that no earlier attempt has scored."""
    from serin.scoring.bulk import score_into_folder

    if (found := _finished(target, number, bundle, new)) is not None:
        return 0, found
    done = list[tuple[int, ScoredRun]]()

    def watermark(parts: Parts, rows: int, before: int) -> bytes:
        if stop.is_set():
            raise StageStopped(stage="score")
        found = [parts.schema(number) for number in range(len(new.pieces))]
        schemas = [{each.name: str(each.type) for each in schema} for schema in found]
        for piece, columns in zip(new.pieces, schemas, strict=True):
            _check_columns(piece.path, columns, known or schemas[0])
        check()
        run = new.watermark(bundle.release.name, time.time(), rows, schemas[0])
        done.append((rows - before, run))
        return run.dump()

    try:
        score_into_folder(
            Path(bundle.path),
            new.pieces,
            target.folder / run_name(number),
            workers=workers,
            scheduler=scheduler,
            place=place,
            digest=bundle.digest,
            check=watermark,
        )
    except OSError as error:
        reason = f"{target.folder} cannot be written: {error}; nothing of this run is there"
        raise ScoringRefused(target=target.name, reason=reason) from error
    return done[0]


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


def _record(run: Path, done: ScoredRun) -> bool:
    """Puts the rows of a run among the recorded requests, once: ids are made of the run and the row, and those that an
    earlier attempt has recorded are left out. Returns whether it is done with; else a later run tries again."""
    from serin.scoring.parts import read_parts

    release = Release.parse(done.release)
    try:
        bundle = Store.open().bundle(release.model, release.label)
    except NotFound:
        logger.warning(f"{done.release} is gone; the rows of {run} are not recorded")
        return True
    name = f"bulk-{hashlib.sha256(f'{run} {done.t}'.encode()).hexdigest()[:12]}"
    records = records_of(bundle, run=name)
    if records is not None:
        for part, table in enumerate(read_parts(str(run))):
            records.add(table, part)
        if not records.finish():
            return False
    write_whole(run / RECORDED, b"")
    return True


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


@dataclass(frozen=True, slots=True)
class Held:
    """Where rows are scored, with the devices that are held for it."""

    place: Place
    devices: Sequence[Device] = ()


@contextmanager
def placed(bundle: Bundle, device: BulkDevice, scheduler: str | None) -> Iterator[Held]:
    """Holds a share of a GPU while rows are scored there. `auto`: a GPU for a version that was exported for one."""
    if device == "cpu" or (device == "auto" and scheduler is not None):
        yield Held("cpu")
        return
    reason = _no_gpu(bundle, scheduler)
    if reason and device == "gpu":
        raise PredictionFailed(model=bundle.model, status="refused", reason=f"--device gpu: {reason}")
    if reason:
        yield Held("cpu")
        return
    room = min(_GPU_BYTES, max(each.memory_bytes for each in inventory()) // 2)
    with (
        lease(1, home=environment.home(), purpose="bulk scoring", shared=True, memory_bytes=room) as held,
        environment.showing_devices(held.ids),
    ):
        yield Held("cuda", held.devices)


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
