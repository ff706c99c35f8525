"""Registers servers that Serin does not run as versions of a model: with their address, what they say about their
tensors, and what is recorded and watched of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from serin.errors import RolloutRefused, SpecError
from serin.formats import drift, quality, schema
from serin.formats.bundle import MANIFEST
from serin.formats.schema import Schema
from serin.machine.documents import canonical
from serin.monitoring.quality.scan import answer_of
from serin.rollout.decide.plan import Plan
from serin.serving.external import Server, Tensors, describe, read_server, recordable
from serin.spec.elsewhere import load_elsewhere, problems
from serin.store.artifacts import Endpoint, Release
from serin.store.published import SERVER
from serin.store.store import Store

SPEC = "spec.yaml"
_REFERENCES = {"drift": drift.FILE, "quality": quality.FILE}  # by section of `monitoring`


class Elsewhere:
    """The servers of one model, and the settings that new versions of it get: those of the file `spec`, else those of
    the last version. `timeout_s`: of a request, instead. `reference`: a table to compare live rows with."""

    def __init__(
        self, store: Store, model: str, *, spec: Path | None, timeout_s: float | None, reference: Path | None
    ) -> None:
        self._store, self._model, self._reference = store, model, reference
        self._folders = dict(self._registered())
        last = next(iter(self._folders.values()), None)
        self._where = model if spec is None else str(spec)
        source = spec or (last / SPEC if last else None)
        self.spec, self._document = load_elsewhere(model, source or {})
        if timeout_s is not None:
            serving = {**self._document.get("serving", {}), "request_timeout": timeout_s}
            self.spec, self._document = load_elsewhere(model, {**self._document, "serving": serving})

    def _registered(self) -> Iterator[tuple[int, Path]]:
        """The versions with their folders, the newest first. RolloutRefused when Serin serves one of them."""
        for version in reversed(self._store.versions(self._model)):
            if not self._store.has_file(self._model, version, SERVER):
                reason = "a model in the store has this name"
                raise RolloutRefused(model=self._model, command="start", reason=reason)
            yield version, Path(self._store.bundle(self._model, version).path)

    def endpoint(self, version: int) -> Endpoint | None:
        """Where a version is served; None: it is not in the store."""
        return read_server(self._folders[version]) if version in self._folders else None

    @property
    def plan(self) -> Plan | None:
        """How a candidate takes over; None: as if nothing was said about it."""
        spec, said = self.spec, self._document.keys() & {"rollout", "serving", "objectives"}
        return Plan.from_spec(spec.rollout, spec.serving, spec.objectives) if said else None

    def register(self, place: Endpoint) -> Release:
        """Returns the version of an address with these settings: the newest that it has, or the next one."""
        files = self._files(place)
        for version, folder in self._folders.items():
            there = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != MANIFEST}
            if there == files:
                return Release(model=self._model, version=version)
        from serin.export.publish import seal_bundle  # takes seconds to import

        release = Release(model=self._model, version=self._store.reserve_version(self._model))
        with self._store.workspace() as work:
            for name, content in files.items():
                (work / name).write_bytes(content)
            lineage = {"server": f"http://{place.http}"}
            digest = self.spec.digest()
            bundle = seal_bundle(self._store, release, work, spec_digest=digest, lineage=lineage, metrics={})
        self._folders = {release.version: Path(bundle.path), **self._folders}
        return release

    def _files(self, place: Endpoint) -> dict[str, bytes]:
        """The content of the bundle of a version."""
        tensors = describe(place, self._model)
        described = self._schema(place, tensors)
        files = {
            SERVER: canonical(Server(http=place.http, grpc=place.grpc).to_json()),
            SPEC: yaml.safe_dump(self._document, sort_keys=True, allow_unicode=True).encode(),
            schema.FILE: canonical(described.to_json()),
        }
        columns = [*tensors["inputs"]] if tensors else [each.name for each in described.inputs]
        return files | self._references(described, columns)

    def _schema(self, place: Endpoint, tensors: Mapping[str, Tensors] | None) -> Schema:
        """What the server says about its tensors, or said when it was registered last; empty: it is not known, or could
        not be recorded. SpecError when the spec asks for records of it."""
        capture, target = self.spec.monitoring.capture, self.spec.data.target
        task = target.task if self.spec.has_target else self.spec.model.task or "regression"
        unknown = Schema(
            task=task, inputs=(), outputs=(), classes=self.spec.model.classes, targets=tuple(target.names)
        )
        if tensors is None:
            page = f"http://{place.http}/v2/models/{self._model}"
            wrong, hint = [f"needs the types of the model's tensors, and {page} does not tell them here"], ""
        else:
            inputs, outputs, wrong = recordable(tensors, {*capture.mask, *capture.drop})
            hint = "; leave an input out of the records with monitoring.capture.drop"
            if not wrong:
                found = replace(unknown, inputs=inputs, outputs=outputs)
                if self.spec.has_target and (problem := _no_answer(found)):
                    raise self._problem([("data.target", problem)])
                return found
        if capture.share:
            raise self._problem([("monitoring.capture", f"{each}{hint}") for each in wrong])
        known = (folder for folder in self._folders.values() if read_server(folder) == place)
        return next((schema.read_schema(folder) for folder in known), unknown)

    def _references(self, described: Schema, columns: list[str]) -> dict[str, bytes]:
        """The files that live rows are compared with: made of the table, else those of the last version that watches
        the same. SpecError for what the spec asks for and cannot be watched."""
        wanted = {name for name in _REFERENCES if getattr(self.spec.monitoring, name) is not None}
        if self._reference is not None:
            from serin.pipeline.reference import ReferenceRows  # takes seconds to import

            if not wanted:
                text = "is for monitoring.drift and monitoring.quality, and the spec has neither"
                raise self._problem([("--reference", text)])
            if not self.spec.monitoring.capture.share:
                self._check(columns, set(), has_time=True)  # which needs records
            rows = ReferenceRows(self._reference, self.spec, described)
            self._check(columns, set(), has_time=rows.times is not None)
            made = {"drift": rows.drift, "quality": rows.quality}
            return {_REFERENCES[name]: canonical(made[name]().to_json()) for name in sorted(wanted)}
        kept = {name: self._kept(name) for name in sorted(wanted)}
        self._check(columns, {name for name, found in kept.items() if found is None}, has_time=True)
        return {_REFERENCES[name]: found for name, found in kept.items() if found is not None}

    def _kept(self, name: str) -> bytes | None:
        """The file of the newest version whose spec asks for the same."""
        for folder in self._folders.values():
            path = folder / _REFERENCES[name]
            _, before = load_elsewhere(self._model, folder / SPEC)
            if path.is_file() and _compared(before, name) == _compared(self._document, name):
                return path.read_bytes()
        return None

    def _check(self, columns: list[str], without: set[str], *, has_time: bool) -> None:
        found = problems(self.spec, columns, has_time=has_time)
        text = "needs rows to compare with: name a table with --reference, such as one of `serin captures export`"
        found += [(f"monitoring.{name}", text) for name in sorted(without)]
        if found:
            raise self._problem(found)

    def _problem(self, found: list[tuple[str, str]]) -> SpecError:
        return SpecError(where=self._where, problems=found)


def _no_answer(described: Schema) -> str:
    """Why labels cannot be compared with the server's answers; empty: they can."""
    name, sizes = answer_of(described), {each.name: math.prod(each.dims) for each in described.outputs}
    if described.task == "multiclass" and not described.classes:
        return "is one of several classes: name them in the order of the server's probabilities with model.classes"
    wanted = (
        len(described.classes or ()) if described.task == "multiclass" else max(len(described.targets), 1)
    )
    if name is None or sizes[name] != wanted:
        named = "probabilities" if described.task == "multiclass" else "score"
        return (
            f"is compared with the output {named!r} or the only one, of {wanted} numbers in a row; the server answers "
            f"with {', '.join(f'{each!r} ({size})' for each, size in sizes.items())}"
        )
    return ""


def _compared(document: Mapping[str, Any], name: str) -> tuple[object, ...]:
    """What of a spec decides how live rows are compared."""
    monitoring, capture = document["monitoring"], document["monitoring"].get("capture", {})
    hidden = capture.get("mask"), capture.get("drop")
    sections = document.get("data"), document.get("export"), document["model"]
    return monitoring.get(name) if name == "drift" else None, hidden, *sections
