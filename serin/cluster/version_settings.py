"""What the spec of a version says about serving it: timeouts, schema, replicas. A version never changes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from serin.errors import NotFound
from serin.formats.bundle import REPOSITORY
from serin.formats.schema import Schema, read_schema
from serin.serving.envoy.routes import Timeouts
from serin.serving.external import External
from serin.serving.triton.repository import serving_settings
from serin.spec.stored import stored_capture, stored_objectives
from serin.store.artifacts import Release
from serin.store.store import Store
from serin.store.trust import find_trusted


def stored_timeouts(store: Store, external: External | None = None) -> Callable[[Release], Timeouts]:
    """Returns timeouts by the spec of a version, which never changes; for a server elsewhere, by its registration."""

    @functools.cache
    def exported(release: Release) -> Timeouts:
        bundle = store.bundle(release.model, release.version)
        found = Timeouts.from_spec(serving_settings(bundle), stored_objectives(Path(bundle.path)))
        share = stored_capture(Path(bundle.path), ["share"]).share
        found = replace(found, shares={release.name: share} if share else {})
        own = (Path(bundle.path) / REPOSITORY).is_dir()  # an imported repository checks its own strings
        return replace(found, max_text_bytes=None) if own else found

    def timeouts(release: Release) -> Timeouts:
        if external and external.has(release):
            return Timeouts(request_s=external.request_timeout_s(release.model))
        return exported(release)

    return timeouts


def model_timeouts(timeouts: Callable[[Release], Timeouts], releases: Sequence[Release]) -> Timeouts:
    """Returns the timeouts of the first release, with the recorded shares of them all."""
    shares: dict[str, float] = {}
    for release in releases:
        with suppress(NotFound):  # it still runs, and is no longer in the store
            shares |= timeouts(release).shares
    return replace(timeouts(releases[0]), shares=shares)


def stored_schema(store: Store) -> Callable[[Release], Schema]:
    """Returns the schemas of versions in the store."""
    return lambda release: read_schema(Path(store.bundle(release.model, release.version).path))


def check_trusted(store: Store, external: External | None = None) -> Callable[[Release], None]:
    """The check raises BundleUntrusted when signatures are required and no trusted key has signed the version. What
    servers elsewhere run is not known here."""

    def check(release: Release) -> None:
        if external is None or not external.has(release):
            find_trusted(store, release.model, release.version)

    return check


def stored_replicas(store: Store) -> Callable[[Release], int | None]:
    """Returns on how many hosts a version runs; None: on all."""

    @functools.cache
    def replicas(release: Release) -> int | None:
        wanted = serving_settings(store.bundle(release.model, release.version)).replicas
        return None if wanted == "all" else wanted

    return replicas
