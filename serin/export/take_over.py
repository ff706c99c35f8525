"""Imports a bundle from elsewhere as a version: verified first, under the next number, with its origin."""

from __future__ import annotations

import shutil
from pathlib import Path

import onnx

from serin.export.convert.fuse import name_model
from serin.export.session import open_session
from serin.formats.bundle import MANIFEST, read_golden, verify_bundle, write_manifest
from serin.formats.signature import sign_if_configured
from serin.spec.names import valid_model_name
from serin.store.artifacts import Bundle, Release
from serin.store.store import Store


def import_bundle(folder: Path, store: Store, *, name: str | None = None) -> Bundle:
    """Imports a bundle. Raises BundleBroken when it does not match its manifest, or its graph or golden rows are
    unreadable."""
    manifest = verify_bundle(folder)
    model = valid_model_name(name or manifest.name)
    graphs = {path.name: onnx.load_model_from_string(path.read_bytes()) for path in folder.glob("*.onnx")}
    for graph in graphs.values():
        open_session(graph)
    read_golden(folder)
    release = Release(model=model, version=store.reserve_version(model))
    with store.workspace() as work:
        for relative in manifest.files:
            target = work / relative
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(folder / relative, target)
        for file, graph in graphs.items():
            properties = {entry.key: entry.value for entry in graph.metadata_props}
            name_model(graph, {**properties, "name": release.model, "version": str(release.version)})
            (work / file).write_bytes(graph.SerializeToString(deterministic=True))
        (work / MANIFEST).unlink(missing_ok=True)
        write_manifest(
            work,
            name=release.model,
            model_version=release.version,
            spec_digest=manifest.spec_digest,
            lineage={
                **manifest.lineage,
                "imported": {
                    "release": f"{manifest.name}-v{manifest.model_version}",
                    "manifest": manifest.digest,
                },
            },
            metrics=manifest.metrics,
        )
        sign_if_configured(store, release.model, release.version, work)
        return store.publish_bundle(release.model, release.version, work)
