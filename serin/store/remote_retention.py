"""What `serin gc` may remove of an object store: by age alone, since nobody can see what processes on other hosts use.

A marker is renewed when it is read, at most once a day (file_list.py), so what was used within `keep_days` stays. A
marker is removed first and only as it was found; a reader that is in the middle finds nothing then. Files without a
marker are what an upload that was cut short left.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from serin.errors import ObjectChanged
from serin.store.file_list import RENEWED_S, Published, marker_key
from serin.store.objects import Entry, Files
from serin.store.retention import DAY_S, Garbage, Policy, collect_on_this_host
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
    for kind, name, place in _unneeded(store, files, policy, ages):
        if ages[marker_key(place)] > limit_s and (gone := _take(files, place, limit_s, remove=remove)):
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
    return found + collect_on_this_host(
        store, home, policy, remove=remove, specs=lambda: _specs(store, files)
    )


def _unneeded(
    store: Store, files: Files, policy: Policy, ages: Mapping[str, float]
) -> Iterator[tuple[str, str, str]]:
    """Kind, name and place of what no version that is kept needs, however young."""
    kept_datasets: set[str] = set()
    for model in store.models():
        versions = store.versions(model)
        kept = set(versions[-policy.keep_versions :]) | set(store.aliases(model).values())
        for version in versions:
            place = f"models/{model}/versions/{version}"
            if version in kept:
                lineage = json.loads(_read(files, place, "manifest.json") or b"{}").get("lineage", {})
                kept_datasets.add(str(lineage.get("dataset")))
            elif marker_key(place) in ages:
                yield "version", f"{model}-v{version}", place
    for place in _marked(ages, "datasets/"):
        description = json.loads(_read(files, place, "dataset.json") or b"{}")
        if str(description.get("digest")) not in kept_datasets:
            yield "dataset", place.removeprefix("datasets/"), place
    for place in _marked(ages, "checkpoints/"):
        yield "checkpoint", place.removeprefix("checkpoints/"), place


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


def _read(files: Files, place: str, name: str) -> bytes | None:
    attempt = _attempt_of(files, place)
    found = None if attempt is None else files.read(f"{place}/{attempt}/{name}")
    return None if found is None else found.content


def _marked(ages: Mapping[str, float], prefix: str) -> list[str]:
    base = f"published/{prefix}"
    return sorted(
        key.removeprefix("published/").removesuffix(".json") for key in ages if key.startswith(base)
    )


def _specs(store: Store, files: Files) -> list[str]:
    """The specs of all versions."""
    places = (f"models/{model}/versions/{n}" for model in store.models() for n in store.versions(model))
    return [found.decode() for place in places if (found := _read(files, place, "spec.yaml")) is not None]


def _remove(files: Files, entries: Iterable[Entry]) -> None:
    for entry in entries:
        files.remove(entry.key)
