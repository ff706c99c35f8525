"""A published model version on disk: the manifest that binds its files, and the golden rows with their answers.

A bundle is data, never code: no pickle, no links, no reference to a file outside; the one exception is a team's own
Triton repository, which is taken only when told to. Nothing of a bundle may be used before `verify_bundle` has let it
pass.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from serin.errors import BundleBroken, NameInvalid, ServedElsewhere
from serin.formats.schema import ELEMENTS, OutputTensor, Schema, read_schema
from serin.formats.trained import file_sha256
from serin.formats.wire import Array, to_wire
from serin.machine.documents import write_facts
from serin.machine.typed_json import Document
from serin.store.artifacts import Release
from serin.store.published import BUNDLE_FORMAT, BUNDLE_VERSION, SERVER

MANIFEST, MODEL, GOLDEN = "manifest.json", "model.onnx", "golden.parquet"
FRONT, CORE = "front.onnx", "core.onnx"  # for a GPU: the same model in two, strings and features apart
PLAN = "model.plan"  # the core as a TensorRT engine
TREES = "trees.ubj"  # the core as XGBoost's own file, for who runs trees on a GPU
REPOSITORY = "repository"  # instead of a graph: a team's own Triton models, each in its folder
_DEPTH, _REPOSITORY_DEPTH = 3, 8  # folders and name of a file

_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestFile:
    sha256: str
    size: int

    def __post_init__(self) -> None:
        if self.size < 0 or not _SHA256.fullmatch(self.sha256):
            raise ValueError("no sha256 and size")


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest(Document, form=BUNDLE_FORMAT, version=BUNDLE_VERSION, omit=("edition",)):
    """The identity, origin and content of a bundle. `digest` is the sha256 of the manifest's own file. `edition`: of
    its lookups, from 2 on; None: it has those of its export."""

    name: str
    model_version: int
    spec_digest: str
    lineage: dict[str, Any]
    metrics: dict[str, float]
    files: dict[str, ManifestFile]
    edition: int | None = None
    digest: str = field(compare=False, default="")

    @property
    def release(self) -> Release:
        return Release(model=self.name, version=self.model_version, edition=self.edition or 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Golden:
    """Rows with known answers. `inputs` are in wire form, `outputs` as the model gives them ([rows, ...])."""

    inputs: dict[str, Array]
    outputs: dict[str, Array]
    row: Array  # the row's id in the main table

    def __len__(self) -> int:
        return len(self.row)


def write_manifest(
    folder: Path,
    *,
    name: str,
    model_version: int,
    spec_digest: str,
    lineage: Mapping[str, Any],
    metrics: Mapping[str, float],
    edition: int = 1,
) -> Manifest:
    """Seal `folder`: every file in it becomes part of the bundle."""
    _check_release(folder, name, model_version, edition)
    files = {
        relative: ManifestFile(sha256=file_sha256(path), size=path.stat().st_size)
        for relative, path in sorted(_regular_files(folder))
        if relative != MANIFEST
    }
    manifest = Manifest(
        name=name,
        model_version=model_version,
        spec_digest=spec_digest,
        lineage=dict(lineage),
        metrics=dict(metrics),
        files=files,
        edition=None if edition == 1 else edition,
    )
    document = manifest.to_json()
    del document["digest"]
    write_facts(folder / MANIFEST, document)
    return read_manifest(folder)


def read_manifest(folder: Path) -> Manifest:
    """What the manifest says. Says nothing about the files: `verify_bundle` does."""
    path = folder / MANIFEST
    try:
        if path.is_symlink():
            raise ValueError("it is a link")
        raw = path.read_bytes()
        document = json.loads(raw)
        manifest = replace(Manifest.from_json(document), digest=hashlib.sha256(raw).hexdigest())
        for name in manifest.files:
            _valid_path(name)
    except (OSError, ValueError) as error:
        raise BundleBroken(path=str(path), reason=f"{type(error).__name__}: {error}") from error
    _check_release(folder, manifest.name, manifest.model_version, manifest.edition or 1)
    return manifest


def verify_bundle(folder: Path, *, digest: str | None = None) -> Manifest:
    """The manifest, once every file is there with its size and sha256, nothing else is, and nothing points outside.
    `digest`: that of the manifest whose signature, model and version were checked before."""
    manifest = read_manifest(folder)
    if digest is not None and manifest.digest != digest:
        raise BundleBroken(path=str(folder), reason="its manifest was changed while it was loaded")
    present = dict(_regular_files(folder))
    del present[MANIFEST]
    for relative in manifest.files.keys() - present.keys():
        raise BundleBroken(path=str(folder), reason=f"{relative} is missing")
    for relative in present.keys() - manifest.files.keys():
        raise BundleBroken(path=str(folder), reason=f"{relative} is not in the manifest")
    for relative, path in present.items():
        entry = manifest.files[relative]
        if path.stat().st_size != entry.size or file_sha256(path) != entry.sha256:
            raise BundleBroken(path=str(folder), reason=f"{relative} was changed after it was sealed")
        if path.suffix == ".onnx":
            beside = PurePosixPath(relative).parent
            _check_references(
                path,
                {
                    PurePosixPath(name).name: file.size
                    for name, file in manifest.files.items()
                    if PurePosixPath(name).parent == beside
                },
            )
    return manifest


def check_has_graph(manifest: Manifest, what: str) -> None:
    """ServedElsewhere for a version of a server that Serin does not run: `what` needs its graph."""
    if SERVER in manifest.files:
        raise ServedElsewhere(what=what, model=manifest.name, version=manifest.model_version)


def _check_references(path: Path, sizes: Mapping[str, int]) -> None:
    """BundleBroken when an ONNX file is none, or has weights that are not inside one of the files beside it."""
    import onnx  # here, because most readers of a bundle need only its schema
    from google.protobuf.message import DecodeError

    from serin.formats.external_data import external_tensors, place_of

    try:
        model = onnx.load_model_from_string(path.read_bytes())
    except DecodeError as error:
        raise BundleBroken(path=str(path), reason="it is not an ONNX model") from error
    for tensor in external_tensors(model):
        place = place_of(tensor)
        location = place.get("location", "")
        if location not in sizes or len(place) < len(tensor.external_data):
            reason = (
                f"tensor {tensor.name!r} refers to {location!r}, which is not a file of the bundle beside it"
            )
            raise BundleBroken(path=str(path), reason=reason)
        numbers = [place.get(key, "") for key in ("offset", "length")]
        if not all(number.isdecimal() for number in numbers) or sum(map(int, numbers)) > sizes[location]:
            reason = f"tensor {tensor.name!r} refers to bytes that {location!r} does not have"
            raise BundleBroken(path=str(path), reason=reason)


def read_golden(folder: Path, schema: Schema | None = None) -> Golden:
    """The golden rows with the answers the gate saw."""
    schema = read_schema(folder) if schema is None else schema
    path = folder / GOLDEN
    try:
        table = pq.read_table(path)
        outputs = {output.name: _output_array(table.column(output.name), output) for output in schema.outputs}
        row = np.asarray(table.column("row").to_numpy())
    except (OSError, KeyError, ValueError, pa.ArrowException) as error:
        raise BundleBroken(path=str(path), reason=f"{type(error).__name__}: {error}") from error
    return Golden(inputs=to_wire(table, schema), outputs=outputs, row=row)


def output_column(values: Array) -> pa.Array:
    """A model's output as a column of golden.parquet: plain for [rows, 1], a list of fixed size for more."""
    flat = pa.array(np.ascontiguousarray(values).reshape(-1))
    return flat if values.shape[1] == 1 else pa.FixedSizeListArray.from_arrays(flat, values.shape[1])


def with_answers(rows: pa.Table, answers: Mapping[str, Array], schema: Schema) -> pa.Table:
    """The rows with the model's outputs as further columns. An output of several numbers is a list, whose field names
    its elements: classes or targets. The field of a label names the classes, too."""
    for name, values in answers.items():
        column = output_column(values)
        names = schema.classes if name in ("probabilities", "label") else schema.targets
        known = names and (name == "label" or values.shape[1] == len(names) > 1)
        metadata = {ELEMENTS: json.dumps(names)} if known else None
        rows = rows.append_column(pa.field(name, column.type, metadata=metadata), column)
    return rows


def _output_array(column: pa.ChunkedArray, output: OutputTensor) -> Array:
    values = column.combine_chunks()
    if pa.types.is_fixed_size_list(values.type):
        values = values.flatten()
    return np.asarray(values.to_numpy(zero_copy_only=False)).reshape(len(column), *output.dims)


def _regular_files(folder: Path) -> Iterator[tuple[str, Path]]:
    """Every file below `folder` by its relative name. A link, a special file or an empty folder is BundleBroken."""
    for root, folders, names in os.walk(folder, followlinks=False):
        if not folders and not names and Path(root) != folder:
            raise BundleBroken(path=root, reason="it is an empty folder")
        for name in (*folders, *names):
            path = Path(root, name)
            mode = path.lstat().st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                raise BundleBroken(path=str(path), reason="it is a link or no plain file")
        for name in names:
            path = Path(root, name)
            try:
                yield _valid_path(path.relative_to(folder).as_posix()), path
            except ValueError as error:
                raise BundleBroken(path=str(folder), reason=str(error)) from error


def _valid_path(name: str) -> str:
    """`name` when it stays inside the bundle and is plain everywhere; else ValueError."""
    parts = PurePosixPath(name).parts
    deepest = _REPOSITORY_DEPTH if parts[:1] == (REPOSITORY,) else _DEPTH
    if not 1 <= len(parts) <= deepest or "/".join(parts) != name or not all(map(_PART.fullmatch, parts)):
        raise ValueError(f"{name!r} is not a valid name for a bundle's file")
    return name


def _check_release(folder: Path, name: str, version: int, edition: int) -> None:
    try:
        release = Release(model=name, version=version, edition=edition)
        Release.parse(release.name)
    except (NameInvalid, TypeError) as error:
        raise BundleBroken(
            path=str(folder / MANIFEST), reason=f"{name!r} version {version!r}: {error}"
        ) from error
