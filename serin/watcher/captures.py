"""What the command does with recorded requests beyond reading them: deleting rows, and what is too old or has no model
any more."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from serin.expressions import ExpressionError, parse
from serin.formats.captures import captures_folder, versions_captured
from serin.host.wiring import request_log
from serin.monitoring.capture.counters import models_captured
from serin.monitoring.capture.forget import Deletion, forget
from serin.monitoring.capture.recorder import Recorder
from serin.monitoring.capture.retention import delete_version, expire
from serin.monitoring.capture.spool_files import complete_files, open_files
from serin.pipeline import labels
from serin.store.artifacts import Release
from serin.store.retention import Garbage
from serin.store.store import Store
from serin.watcher.capture_duty import capture_limits, capture_settings

_BUFFERED_S = 2.5  # backends write to the spool, and the gateway to its log, at least every second
_ORPHANED_S = 45.0  # until a file that a dead backend left open is taken over


def record_all(home: Path, model: str, *, sleep: Callable[[float], None] = time.sleep) -> None:
    """Records every request of `model` that was answered before this call. The watcher may do the same at the same
    time. Raises OSError when records cannot be written."""
    if not (home / "spool").is_dir():
        return
    sleep(_BUFFERED_S)
    recorder = Recorder(home, request_log(home), capture_settings(Store.open()), settle_s=0.0)
    waited = 0.0
    while True:
        outcome = recorder.record(time.time())
        if model in outcome.failed:
            raise outcome.failed[model]
        if waited >= _ORPHANED_S or not _waiting(home, model):
            return
        sleep(1.0)
        waited += 1.0


def forget_rows(home: Path, model: str, where: str, *, remove: bool) -> Deletion:
    """Deletes the recorded rows for which `where` is true, and their labels. Call `record_all` first.

    Raises ExpressionError also for a column that is masked in every version: its rows could not be found, which must
    not look as if there were none. A column that some versions mask is in `unread`.
    """
    masked = check_not_masked(model, where, versions_captured(home, model))
    found = forget(home, model, where, remove=remove, also=[lambda *rows: labels.forget(model, dict([rows]))])
    if remove:
        labels.count_again(model)
    return replace(found, unread=tuple(sorted({*found.unread, *masked})))


def check_not_masked(model: str, where: str, versions: Iterable[int]) -> list[str]:
    """Returns the columns of `where` that some of the versions mask. ExpressionError for one that all of them mask."""
    masked = _masked_in(model, parse(where).columns, versions)
    if hidden := [name for name, everywhere in masked.items() if everywhere]:
        raise ExpressionError(
            f"{where!r}: the values of {', '.join(map(repr, hidden))} are not recorded (monitoring.capture.mask), so "
            "no row can be found by them; use another column, _id or _client_id"
        )
    return list(masked)


def _masked_in(model: str, columns: Iterable[str], versions: Iterable[int]) -> dict[str, bool]:
    """Returns those of `columns` that a recorded version masks, each with whether all of them do."""
    settings = capture_settings(Store.open())
    known = [found for version in versions if (found := settings(Release(model=model, version=version)))]
    counts = {name: sum(name in found.mask for found in known) for name in columns}
    return {name: count == len(known) for name, count in counts.items() if count}


def delete_records(home: Path, model: str, versions: list[int], *, whole: bool) -> int:
    """Deletes the records of versions that were deleted, also from the spool; of the `whole` model when none is left.
    Returns their bytes."""
    size = 0
    for version in versions:
        for baseline in (False, True):
            release = Release(model=model, version=version, baseline=baseline)
            shutil.rmtree(home / "spool" / release.name, ignore_errors=True)
        size += delete_version(home, model, version)
    if whole:
        shutil.rmtree(captures_folder(home, model), ignore_errors=True)
    return size


def expired_records(home: Path, store: Store, *, remove: bool) -> list[Garbage]:
    """What the watcher would delete as well: records beyond `monitoring.capture.keep` and `max_size`, and all of models
    that are not in the store."""
    settings, known = capture_settings(store), set(store.models())
    found = []
    for model in models_captured(home):
        if model not in known:
            size = sum(path.stat().st_size for path in captures_folder(home, model).rglob("*.parquet"))
            if remove:
                shutil.rmtree(captures_folder(home, model), ignore_errors=True)
        else:
            limits = capture_limits(settings, model, versions_captured(home, model))
            size = expire(home, model, limits, time.time(), remove=remove)
        if size:
            found.append(Garbage(kind="records", name=model, bytes=size))
    return found


def _waiting(home: Path, model: str) -> bool:
    files = (entry.release.model for entry in complete_files(home))
    folders = (Release.parse(path.parents[1].name).model for path in open_files(home))
    return model in {*files, *folders}
