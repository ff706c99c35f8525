"""A bundle as the model repository of one Triton process: written once, visible whole or not at all."""

from __future__ import annotations

import secrets
import shutil
from pathlib import Path

import yaml
from pydantic import ValidationError

from serin.artifacts import Bundle
from serin.errors import BundleBroken
from serin.formats.bundle import MODEL, verify_bundle
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
    config = write_config(
        read_schema(source),
        bundle.model,
        bundle.version,
        serving=serving_settings(bundle),
        threads=read_runtime(source).threads,
    )
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = folder.with_name(f".{folder.name}.{secrets.token_hex(6)}")
    inside = scratch / bundle.model / str(bundle.version)
    try:
        inside.mkdir(parents=True)
        for file in (source / MODEL, source / SCHEMA, SHAPE_FOLDER / "1" / "model.py"):
            shutil.copyfile(file, inside / file.name)
        (scratch / bundle.model / "config.pbtxt").write_text(config)
        for file in scratch.rglob("*.*"):
            file.chmod(0o444)
        scratch.rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


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
