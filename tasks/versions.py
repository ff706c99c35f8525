"""Published versions and their specs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from serin.errors import NotFound
from serin.spec.pipeline import PipelineSpec
from serin.store.artifacts import Release
from serin.store.packages import REFERENCE, package_of, stored_spec
from serin.store.store import Store


def find_version(model: str, version: int | str | None = None) -> tuple[Release, PipelineSpec]:
    """Returns a version by number or alias, or the newest, with the spec it was made from."""
    store = Store.open()
    if version is None:
        versions = store.versions(model)
        if not versions:
            raise NotFound(kind="model", name=model, known=store.models())
        version = versions[-1]
    bundle = store.bundle(model, version, hold=True)
    return bundle.release, stored_spec(Path(bundle.path))


def sent_version(release: Release) -> str | dict[str, Any]:
    """What opens the spec of a version again, on any worker: its package, or for one that was made without the spec
    itself."""
    bundle = Path(Store.open().bundle(release.model, release.label, hold=True).path)
    if (package := package_of(bundle)) is not None:
        return f"{REFERENCE}{package}"
    return stored_spec(bundle).model_dump(mode="json", by_alias=True)


def live_models() -> list[str]:
    """Returns every model that has a live version."""
    store = Store.open()
    return [model for model in store.models() if "live" in store.aliases(model)]
