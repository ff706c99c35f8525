"""Imports a bundle from elsewhere, or a team's own Triton model repository, as a version: verified first, under the
next number, with its origin."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from serin.errors import ExportFailed
from serin.export.convert.fuse import name_model
from serin.export.publish import seal_bundle
from serin.formats.bundle import (
    GOLDEN,
    MANIFEST,
    REPOSITORY,
    check_has_graph,
    read_golden,
    verify_bundle,
)
from serin.formats.champion import ChampionReport
from serin.formats.schema import FILE as SCHEMA
from serin.formats.schema import Schema, read_schema
from serin.machine.documents import write_facts
from serin.scoring.session import open_session
from serin.spec.names import valid_model_name
from serin.store.artifacts import Bundle, Release
from serin.store.store import Store

_CONFIG = "config.pbtxt"
_CODE = (".py", ".so", ".pyc")
_TRITON = {"BYTES": "TYPE_STRING", "FP32": "TYPE_FP32", "INT64": "TYPE_INT64", "INT8": "TYPE_INT8"}


def import_bundle(folder: Path, store: Store, *, name: str | None = None) -> Bundle:
    """Imports a bundle. Raises BundleBroken when it does not match its manifest, or its graph or golden rows are
    unreadable."""
    manifest = verify_bundle(folder)
    check_has_graph(manifest, "an import")
    model = valid_model_name(name or manifest.name)
    graphs = {path.name: onnx.load_model_from_string(path.read_bytes()) for path in folder.glob("*.onnx")}
    for file in graphs:
        open_session(folder / file)
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
        origin = {"release": manifest.release.name, "manifest": manifest.digest}
        lineage = {**manifest.lineage, "imported": origin}
        digest, metrics = manifest.spec_digest, manifest.metrics
        return seal_bundle(store, release, work, spec_digest=digest, lineage=lineage, metrics=metrics)


# It must contain what no export could derive: `schema.json` (what clients send and get) and `golden.parquet` (request
# rows with the expected answers) beside the models' folders. None of it is run here. A release of it takes no traffic
# before it has answered its golden rows, and its code runs where Triton runs it.
def is_repository(folder: Path) -> bool:
    """Returns whether the folder has models' folders with Triton's configurations, and is not a bundle."""
    return not (folder / MANIFEST).exists() and any(folder.glob(f"*/{_CONFIG}"))


def import_repository(
    folder: Path, store: Store, *, name: str, entry: str | None = None, with_code: bool = False
) -> Bundle:
    """Imports a repository. `entry`: the model that clients call; by default `name`, the only ensemble or the only
    model."""
    configs = {path.parent.name: _read_config(path) for path in sorted(folder.glob(f"*/{_CONFIG}"))}
    asked = _entry(configs, valid_model_name(name), entry)
    schema = read_schema(folder)
    _check_schema(schema, configs[asked], asked)
    golden = read_golden(folder, schema)
    if not len(golden):
        raise ExportFailed(
            what="the repository", reason=f"{folder / GOLDEN} has no rows, so it cannot be verified"
        )
    files = [path for model in configs for path in sorted((folder / model).rglob("*")) if path.is_file()]
    code = [path for path in files if path.suffix in _CODE]
    if code and not with_code:
        first = code[0].relative_to(folder)
        reason = f"it contains code that Triton will run ({first}); pass --with-code if you trust it"
        raise ExportFailed(what="the repository", reason=reason)
    release = Release(model=name, version=store.reserve_version(name))
    with store.workspace() as work:
        for path in files:
            target = work / REPOSITORY / path.relative_to(folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
        for file in (SCHEMA, GOLDEN):
            shutil.copyfile(folder / file, work / file)
        champion = ChampionReport(verdict="not compared", reason="a model repository runs in Triton only")
        write_facts(work / "champion.json", champion.to_json())
        origin = {"entry": asked, "models": sorted(configs), "code": bool(code)}
        return seal_bundle(store, release, work, spec_digest="", lineage={"repository": origin}, metrics={})


def _read_config(path: Path) -> Any:
    try:
        return text_format.Parse(path.read_text(encoding="utf-8"), model_config_pb2.ModelConfig())
    except (OSError, ValueError, text_format.ParseError) as error:
        raise ExportFailed(what="the repository", reason=f"{path}: {error}") from error


def _entry(configs: Mapping[str, Any], name: str, entry: str | None) -> str:
    ensembles = [model for model, config in configs.items() if config.HasField("ensemble_scheduling")]
    for found in ([entry] if entry else [], [name], ensembles, list(configs)):
        known = [model for model in found if model in configs]
        if len(known) == 1:
            return known[0]
        if found == [entry]:
            break
    reason = f"which of {sorted(configs)} do clients call? name it with --entry"
    raise ExportFailed(what="the repository", reason=reason)


def _check_schema(schema: Schema, config: Any, entry: str) -> None:
    """Checks that schema.json agrees with the configuration of the entry model."""
    for what, ours, theirs in (
        ("input", schema.inputs, config.input),
        ("output", schema.outputs, config.output),
    ):
        promised = {tensor.name: _TRITON[tensor.dtype] for tensor in ours}
        found = {tensor.name: model_config_pb2.DataType.Name(tensor.data_type) for tensor in theirs}
        for name in promised.keys() | found.keys():
            if promised.get(name) != found.get(name):
                reason = (
                    f"{what} {name!r} is {promised.get(name, 'absent')} in schema.json and "
                    f"{found.get(name, 'absent')} in {entry}/{_CONFIG}"
                )
                raise ExportFailed(what="the repository", reason=reason)
