"""What `serin gc` may remove of an object store: by age alone, since nobody can see what processes on other hosts use.

A marker is renewed when it is read, at most once a day (file_list.py), so what was used within `keep_days` stays. A
marker is removed first and only as it was found; a reader that is in the middle finds nothing then. Files without a
marker are what an upload that was cut short left.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from serin.errors import ObjectChanged
from serin.store.file_list import RENEWED_S, Published, marker_key
from serin.store.objects import Entry, Files
from serin.store.retention import DAY_S, Garbage, Policy, collect_on_this_host, unneeded
from serin.store.store import Store

_ATTEMPT = re.compile(
    r"((?:datasets/|models/[^/]+/versions/|checkpoints/)[^/]+(?:/[^/]+)*?)/([0-9a-f]{16})/.+"
)


def collect_remote_garbage(store: Store, home: Path, policy: Policy, *, remove: bool) -> list[Garbage]:
    """What the policy lets go, in the store and of this host; gone already if `remove`."""
    files = store.shared_files()
    limit_s = policy.keep_days * DAY_S + RENEWED_S
    ages = {entry.key: entry.age_s for entry in files.entries("published/")}
    attempts = _attempts(files)
    found = []
    keys = (key.removeprefix("published/").removesuffix(".json") for key in sorted(ages))
    checkpoints = (
        ("checkpoint", key.partition("/")[2], key) for key in keys if key.startswith("checkpoints/")
    )
    for kind, name, place in (*unneeded(store, policy), *checkpoints):
        if kind == "package":
            found += _take_package(files, name, limit_s, remove=remove)
            continue
        old = ages.get(marker_key(place), 0.0) > limit_s
        if old and (gone := _take(files, place, limit_s, remove=remove)):
            entries = attempts.pop((place, gone.attempt), [])
            found.append(Garbage(kind=kind, name=name, bytes=sum(entry.size for entry in entries)))
            _remove(files, entries if remove else ())
    for (place, attempt), entries in sorted(attempts.items()):
        if min(entry.age_s for entry in entries) > limit_s and attempt != _attempt_of(files, place):
            size = sum(entry.size for entry in entries)
            found.append(Garbage(kind="unfinished upload", name=place, bytes=size))
            _remove(files, entries if remove else ())
    if remove:
        files.abandon_uploads(limit_s)
    return found + collect_on_this_host(store, home, policy, remove=remove)


def _take(files: Files, place: str, limit_s: float, *, remove: bool) -> Published | None:
    """Removes the marker, unless somebody has read it in the meantime: no store can remove on a condition, so the
    removal is announced by a write that has one."""
    key = marker_key(place)
    found = files.read(key)
    if found is None or found.age_s <= limit_s:
        return None
    if remove:
        try:
            files.replace(key, found.content + b"\n", found.tag)
        except ObjectChanged:
            return None
        files.remove(key)
    return Published.from_bytes(found.content, path=key)


def _take_package(files: Files, name: str, limit_s: float, *, remove: bool) -> list[Garbage]:
    """A package has no marker elsewhere: its manifest is the youngest of its files, and goes first."""
    entries = sorted(
        files.entries(f"packages/{name}/"), key=lambda entry: not entry.key.endswith("/package.json")
    )
    if min((entry.age_s for entry in entries), default=0.0) <= limit_s:
        return []
    _remove(files, entries if remove else ())
    return [Garbage(kind="package", name=name, bytes=sum(entry.size for entry in entries))]


def _attempts(files: Files) -> dict[tuple[str, str], list[Entry]]:
    """All files in the store by place and attempt."""
    grouped: dict[tuple[str, str], list[Entry]] = defaultdict(list)
    for prefix in ("datasets/", "models/", "checkpoints/"):
        for entry in files.entries(prefix):
            if match := _ATTEMPT.fullmatch(entry.key):
                grouped[match[1], match[2]].append(entry)
    return grouped


def _attempt_of(files: Files, place: str) -> str | None:
    found = files.read(marker_key(place))
    return None if found is None else Published.from_bytes(found.content, path=place).attempt


def _remove(files: Files, entries: Iterable[Entry]) -> None:
    for entry in entries:
        files.remove(entry.key)
