"""Where a spec is: the one answer of all flows to the parameter `spec`, on the machine that runs them.

It is a package of the store (`package:DIGEST`, what `serin run` sends), a URL of an object store, a path on this
machine, or the spec itself. What cannot be used is refused before any work begins.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from serin.errors import SpecError
from serin.machine import environment
from serin.pipeline.pack import SPEC, pack_spec
from serin.spec.load import (
    WrittenSpec,
    checked_spec,
    enter_environment,
    environment_of,
    load_spec,
    read_spec,
    spec_file,
    written_spec,
)
from serin.spec.names import is_model_name
from serin.spec.pipeline import PipelineSpec
from serin.spec.tables import located
from serin.spec.yaml_file import parse_mapping, read_mapping
from serin.store.packages import REFERENCE, fetch_package, inside_package, read_manifest
from serin.store.store import Store

_SEND = "send it with `serin run SPEC`, which packs what it needs"


@contextmanager
def opened_spec(source: str | Mapping[str, Any] | PipelineSpec) -> Iterator[PipelineSpec]:
    """The spec, for the block. A package is the working folder then: relative paths begin there, and the user's modules
    are imported from there, by this process and its children. This process enters the spec's environment."""
    if isinstance(source, str) and source.startswith(REFERENCE):
        store, digest, where = Store.open(), source.removeprefix(REFERENCE), source[:20]
        fetched = fetch_package(store, digest)
        written = read_mapping(fetched / SPEC)
        # Before the block, so that this process stays in the environment after it.
        enter_environment(written, where=where, base=fetched)
        with inside_package(store, digest):
            yield checked_spec(written, where=where)
    else:
        yield _located(source)


def package_spec(reference: str) -> Mapping[str, Any]:
    """The spec in a package, as it is written there."""
    return read_mapping(fetch_package(Store.open(), reference.removeprefix(REFERENCE)) / SPEC)


def copy_package(reference: str, target: Path | None = None) -> Path:
    """Copies the files of a package to a new folder, by default one that is called like its model and digest; without
    a valid name of a model, like its digest."""
    store, digest = Store.open(), reference.removeprefix(REFERENCE)
    source, manifest = fetch_package(store, digest), read_manifest(store, digest)
    if target is None:
        name = str(read_mapping(source / SPEC).get("name"))
        target = Path(f"{name}-{manifest.digest[:12]}" if is_model_name(name) else manifest.digest[:12])
    if target.exists() and any(target.iterdir()):
        raise SpecError(where=str(target), problems=[("--to", "is there already; name a new folder")])
    for name in manifest.files:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, target / name)
    return target


def sent_spec(source: str | Mapping[str, Any], spec: PipelineSpec) -> str:
    """A reference by which other runs open the same spec: of the package that `source` names, or of a new one. No run
    reads a file again, which may be edited in the meantime."""
    folder = Path.cwd()
    if isinstance(source, str):
        if source.startswith(REFERENCE):
            return source
        folder = folder if "://" in source else spec_file(Path(source)).absolute().parent
    package = pack_spec(WrittenSpec(spec=spec, folder=folder, where="spec"), elsewhere=False)
    package.send()
    return package.reference


def _located(source: str | Mapping[str, Any] | PipelineSpec) -> PipelineSpec:
    if isinstance(source, PipelineSpec):
        return load_spec(source)
    if isinstance(source, Mapping):
        why = "is relative, and a spec without a file has no folder; write an absolute path or a URL, or"
        _refuse_relative_lock(source, "spec", f"{why} {_SEND}")
        written = read_spec(source)
        _refuse_relative(written, f"{why} {_SEND}")
        return written.resolved()
    if "://" in source:
        return _at_url(source)
    if not Path(source).exists():
        why = f"there is no such file on {environment.host()}, where the run is; give a URL or the spec itself, or"
        raise SpecError(where=source, problems=[("spec", f"{why} {_SEND}")])
    return load_spec(source)


def _at_url(url: str) -> PipelineSpec:
    """Tables are relative to the spec's URL. Code beside it is not fetched: what it imports is not known there."""
    from serin.store.file_systems import file_system, reason_of, remote_errors  # fsspec: for URLs alone

    try:
        system, path = file_system(url)
        text = system.cat_file(path).decode(errors="replace")
    except remote_errors(OSError, ValueError, ImportError) as error:
        reason = "there is no such object" if isinstance(error, FileNotFoundError) else reason_of(error, url)
        problem = (
            f"cannot be read on {environment.host()}, where the run is: {reason}; correct the URL, or {_SEND}"
        )
        raise SpecError(where=url, problems=[("spec", problem)]) from error
    document, why = parse_mapping(text, url), f"is not fetched from a URL; {_SEND}"
    _refuse_relative_lock(document, url, why)
    written = written_spec(document, where=url, base=Path("/"))
    base, data = url.rpartition("/")[0], written.spec.data
    tables = {
        name: located(table, lambda path: path if _is_absolute(path) else f"{base}/{path}")
        for name, table in data.tables.items()
    }
    spec = written.spec.model_copy(update={"data": data.model_copy(update={"tables": tables})})
    _refuse_relative(replace(written, spec=spec), why)
    return spec


def _refuse_relative_lock(document: Mapping[str, Any], where: str, why: str) -> None:
    """Comes first: a spec is checked in its environment."""
    asked = environment_of(document)
    if asked is not None and asked.lock is not None and not _is_absolute(asked.lock):
        raise SpecError(where=where, problems=[("environment.lock", f"{asked.lock} {why}")])


def _refuse_relative(written: WrittenSpec, why: str) -> None:
    """SpecError for every path that means nothing here."""
    named = list[tuple[str, str]]()

    def name(key: str, path: str) -> str:
        named.append((key, path))
        return path

    for table, entry in written.spec.data.tables.items():
        located(entry, partial(name, f"data.tables.{table}"))
    written.spec.model.located(lambda key, path: name(f"model.{key}", path))
    problems = [(key, f"{path} {why}") for key, path in named if not _is_absolute(path)]
    if problems:
        raise SpecError(where=written.where, problems=problems)


def _is_absolute(path: str) -> bool:
    return "://" in path or Path(path).expanduser().is_absolute()
