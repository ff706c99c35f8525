"""Editions of a version with a lookup, as files: what pages and the watcher read of them, and no graph."""

from dataclasses import replace

from serin.formats.bundle import write_manifest
from serin.formats.dataset import LookupDescription
from serin.formats.lookups import Lookups, write_lookups
from serin.store.artifacts import Release
from serin.store.store import Store

SPEC = "data: {joins: [{with: planes, source: lookup, lookup: {max_age: 1d}}]}\n"
LIVE = Release(model="flights", version=1)


def publish_edition(store: Store, edition: int, read: float) -> None:
    """Publishes an edition of version 1 whose table of planes was read at this time."""
    table = LookupDescription(
        name="planes", key="tail", columns={"seats": "INT64"}, file="lookups/planes.parquet"
    )
    with store.workspace() as work:
        (work / "spec.yaml").write_text(SPEC)
        write_lookups(work, Lookups(read=read, tables=(table,), rows={"planes": 20}))
        write_manifest(
            work, name="flights", model_version=1, spec_digest="", lineage={}, metrics={}, edition=edition
        )
        store.publish_bundle("flights", replace(LIVE, edition=edition).label, work)
