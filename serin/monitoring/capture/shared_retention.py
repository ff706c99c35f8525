"""Deletes old records of all hosts from the store that they share, within the same limits as those of one host."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection

from serin.formats.captures import hour_began
from serin.formats.shared_captures import RECORDS, SharedFile
from serin.monitoring.capture.shared_read import SharedRecords
from serin.spec.monitoring import CaptureSpec

_HOUR_S, _DAY_S = 3600.0, 86_400.0


def expire_shared(
    records: SharedRecords, model: str, limits: CaptureSpec, now: float | None, *, remove: bool = True
) -> int:
    """Deletes hours that are older than `limits.days`, then the oldest ones of all hosts until the rest fits into
    `limits.max_gb`. Returns the bytes. Several hosts may do it at the same time. `now`: None when the clock cannot be
    trusted; then nothing is too old."""
    hours: dict[str, list[SharedFile]] = defaultdict(list)
    for file in records.listing(model):
        hours[file.hour].append(file)
    total = sum(file.size for files in hours.values() for file in files)
    oldest = float("-inf") if now is None else now - limits.days * _DAY_S
    gone = 0
    for hour, files in sorted(hours.items()):
        if hour_began(hour) + _HOUR_S > oldest and total <= limits.max_gb * 1e9:
            break
        size = sum(file.size for file in files)
        total, gone = total - size, gone + size
        for file in files if remove else ():
            records.files.remove(file.key)
    return gone


def delete_shared(records: SharedRecords, model: str, versions: Collection[int], *, whole: bool) -> int:
    """Deletes the records of versions, or of the `whole` model, from the store. Returns their bytes."""
    going = [file for file in records.listing(model) if whole or file.version in versions]
    for file in going:
        records.files.remove(file.key)
    if whole:
        for key in records.files.keys(f"{RECORDS}{model}/"):
            records.files.remove(key)
    records.drop_outdated(model, [])
    return sum(file.size for file in going)
