"""A bundle as the model repository of one Triton process: written once, visible whole or not at all."""

from __future__ import annotations

import secrets
import shutil
from pathlib import Path

import yaml
from google.protobuf import text_format
from pydantic import ValidationError
from tritonclient.grpc import model_config_pb2

from serin.artifacts import Bundle
from serin.errors import BundleBroken
from serin.formats.bundle import MODEL, REPOSITORY, verify_bundle
from serin.formats.runtime import read_runtime
from serin.formats.schema import FILE as SCHEMA
from serin.formats.schema import read_schema
from serin.serving.model_config import SHAPE_FOLDER, write_config
from serin.spec.load import read_yaml
from serin.spec.stages import ServingSpec


def build_repository(bundle: Bundle, folder: Path) -> Path:
    """Makes `folder` the repository of `bundle` and gives it back. One that is there already is left as it is.

    folder/<model>/config.pbtxt
    folder/<model>/<version>/{model.py, model.onnx, schema.json}
    """
    if folder.is_dir():
        return folder
    source = Path(bundle.path)
    manifest = verify_bundle(source)
    if (manifest.name, manifest.model_version) != (bundle.model, bundle.version):
        raise BundleBroken(
            path=bundle.path, reason=f"it holds {manifest.name} version {manifest.model_version}"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = folder.with_name(f".{folder.name}.{secrets.token_hex(6)}")
    try:
        if (source / REPOSITORY).is_dir():
            _take_as_it_is(bundle, manifest.lineage["repository"]["entry"], scratch)
        else:
            _write_model(bundle, scratch)
        for file in scratch.rglob("*.*"):
            file.chmod(0o444)
        scratch.rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def _write_model(bundle: Bundle, scratch: Path) -> None:
    source, inside = Path(bundle.path), scratch / bundle.model / str(bundle.version)
    config = write_config(
        read_schema(source),
        bundle.model,
        bundle.version,
        serving=serving_settings(bundle),
        threads=read_runtime(source).threads,
    )
    inside.mkdir(parents=True)
    for file in (source / MODEL, source / SCHEMA, SHAPE_FOLDER / "1" / "model.py"):
        shutil.copyfile(file, inside / file.name)
    (scratch / bundle.model / "config.pbtxt").write_text(config)


def _take_as_it_is(bundle: Bundle, entry: str, scratch: Path) -> None:
    """A team's own repository. Only the model that clients ask gets the bundle's name and number; its newest folder of
    files is what is served."""
    shutil.copytree(Path(bundle.path) / REPOSITORY, scratch)
    asked, target = scratch / entry, scratch / bundle.model
    if asked != target:
        if target.exists():
            raise BundleBroken(path=bundle.path, reason=f"two of its models would be called {bundle.model!r}")
        asked.rename(target)
    numbers = sorted(
        (path for path in target.iterdir() if path.name.isdigit()), key=lambda path: int(path.name)
    )
    for older in numbers[:-1]:
        shutil.rmtree(older)
    if numbers:
        numbers[-1].rename(target / str(bundle.version))
    else:
        (target / str(bundle.version)).mkdir()  # an ensemble has no files of its own
    shutil.copyfile(
        Path(bundle.path) / SCHEMA, target / str(bundle.version) / SCHEMA
    )  # for those who watch it
    config = text_format.Parse((target / "config.pbtxt").read_text(), model_config_pb2.ModelConfig())
    config.name = bundle.model
    config.version_policy.Clear()
    config.version_policy.specific.versions.append(bundle.version)
    (target / "config.pbtxt").write_text(str(text_format.MessageToString(config)))


def serving_settings(bundle: Bundle) -> ServingSpec:
    """How the bundle's spec wants to be served; the defaults when it came without a spec."""
    path = Path(bundle.path) / "spec.yaml"
    if not path.exists():
        return ServingSpec()
    try:
        return ServingSpec.model_validate(
            dict(read_yaml(path.read_text(encoding="utf-8")).get("serving") or {})
        )
    except (OSError, yaml.YAMLError, ValueError, AttributeError, ValidationError) as error:
        raise BundleBroken(path=str(path), reason=f"its serving section cannot be read: {error}") from error
