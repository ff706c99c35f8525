"""The last step of an export: the files that every bundle has, its manifest, and one rename into the store."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from serin.export.gate.gate import library_versions
from serin.export.registry import track_bundle
from serin.formats.bundle import write_manifest
from serin.formats.champion import ChampionReport
from serin.formats.gate import GATE, GateReport
from serin.formats.schema import Schema, write_schema
from serin.machine.documents import write_facts
from serin.machine.stopping import check_stopped
from serin.spec.pipeline import PipelineSpec
from serin.store.artifacts import Bundle, Checkpoint, Release
from serin.store.store import Store
from serin.store.trust import sign_if_configured

logger = logging.getLogger(__name__)


def publish_version(
    spec: PipelineSpec,
    release: Release,
    checkpoint: Checkpoint,
    *,
    store: Store,
    lineage: Mapping[str, Any],
    schema: Schema,
    report: GateReport,
    champion: ChampionReport,
    card: str,
    fill: Callable[[Path], None],
) -> Bundle:
    """Publishes a version, whole or not at all. `fill` writes the graphs, the golden rows and what else the kind of
    model needs into a folder."""
    with store.workspace() as work:
        fill(work)
        (work / "spec.yaml").write_text(spec.to_yaml(), encoding="utf-8")
        write_schema(work, schema)
        write_facts(work / "metrics.json", {"format": "serin.metrics", **checkpoint.metrics})
        write_facts(work / GATE, report.to_json(library_versions()))
        write_facts(work / "champion.json", champion.to_json())
        (work / "card.md").write_text(card, encoding="utf-8")
        bundle = seal_bundle(
            store, release, work, spec_digest=spec.digest(), lineage=lineage, metrics=checkpoint.metrics
        )
    logger.info(f"published {release.name}")
    track_bundle(bundle, checkpoint)
    return bundle


def seal_bundle(
    store: Store,
    release: Release,
    work: Path,
    *,
    spec_digest: str,
    lineage: Mapping[str, Any],
    metrics: Mapping[str, float],
) -> Bundle:
    """Writes the manifest of the files in `work`, signs it where that is configured, and moves them into the store."""
    write_manifest(
        work,
        name=release.model,
        model_version=release.version,
        edition=release.edition,
        spec_digest=spec_digest,
        lineage=lineage,
        metrics=metrics,
    )
    check_stopped()
    sign_if_configured(store, release.model, release.label, work)
    return store.publish_bundle(release.model, release.label, work)
