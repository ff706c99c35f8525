"""The releases that run on this machine: one Triton process each, with its own repository, ports and shared memory."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, Literal

import numpy as np

from serin.artifacts import Endpoint, Release
from serin.errors import NameInvalid, PredictionFailed, ReleaseNotReady, VerificationFailed
from serin.formats.bundle import Golden, read_golden
from serin.formats.runtime import read_runtime
from serin.formats.schema import Schema, read_schema
from serin.formats.wire import Array
from serin.serving.client import Protocol, predict
from serin.serving.ports import free_ports, is_free
from serin.serving.probe import answers
from serin.serving.process import ProcessHost
from serin.serving.repository import build_repository, serving_settings
from serin.serving.triton import (
    TritonInstall,
    TritonPlace,
    find_triton,
    new_place,
    reclaim_shared_memory,
    triton_process,
)
from serin.store import Store

ReleaseState = Literal["absent", "starting", "ready", "dead"]

FORMAT, VERSION = "serin.release", 1

_TOLERANCE = 1e-5  # absolute and relative; the same graph on the same runtime gave the golden answers
_SPREADS = 4  # ... or so many times as far as its scores move with the size of their batch
_SINGLE_ROWS = 3


class Releases:
    """Keeps one folder per release in `folder`; what runs is known from there and from the host, so it survives us."""

    def __init__(
        self, folder: Path, *, host: ProcessHost, store: Store, install: TritonInstall | None = None
    ) -> None:
        self._folder = folder
        self._host = host
        self._store = store
        self._install = install
        self._were_ready: set[str] = set()

    def start(self, release: Release) -> None:
        """The release runs or is coming up. Does nothing when it is; one that died on its feet is started anew."""
        place = self._place(release)
        if place and self._host.state(release.name) in ("starting", "running"):
            if self.state(release) != "dead":
                return
            self._host.stop(release.name)
        bundle = self._store.bundle(release.model, release.version)
        repository = build_repository(bundle, self._repository(release))
        if place:
            reclaim_shared_memory(place)
        if place is None or not all(map(is_free, place.ports)):
            place = self._new_place(release)
        if self._install is None:
            self._install = find_triton()
        self._were_ready.discard(release.name)
        self._host.start(triton_process(self._install, release, repository, place, self.log(release)))

    def endpoint(self, release: Release) -> Endpoint:
        place = self._place(release)
        if place is None:
            raise ReleaseNotReady(release=release.name, reason="it was not started", log=self.log(release))
        return place.endpoint

    def state(self, release: Release) -> ReleaseState:
        """`ready`: it answers a row. `dead`: its process failed, or it was ready and does not answer any more."""
        place = self._place(release)
        process = self._host.state(release.name)
        if place is None or process == "absent":
            return "absent"
        if process == "failed":
            return "dead"
        if answers(place.endpoint.http, release, self._schema(release)):
            self._were_ready.add(release.name)
            return "ready"
        return "dead" if release.name in self._were_ready else "starting"

    def instance(self, release: Release) -> int | None:
        """The process that runs it. One that died and was started again by its host is another."""
        return self._host.pid(release.name)

    def verify(self, release: Release) -> None:
        """The running release answers the golden rows as its bundle says: by HTTP and gRPC, alone and in batches."""
        bundle = self._store.bundle(release.model, release.version)
        folder = Path(bundle.path)
        schema = read_schema(folder)
        golden = read_golden(folder, schema)
        endpoint = self.endpoint(release)
        batch_rows = min(64, serving_settings(bundle).max_batch_rows)
        tolerance = max(_TOLERANCE, _SPREADS * read_runtime(folder).spread)
        few = {name: values[:_SINGLE_ROWS] for name, values in golden.inputs.items()}
        urls: dict[Protocol, str] = {"http": endpoint.http, "grpc": endpoint.grpc}
        for protocol, url in urls.items():
            for rows, size in ((few, 1), (golden.inputs, batch_rows)):
                try:
                    answer = predict(
                        url,
                        release.model,
                        rows,
                        schema,
                        protocol,
                        release.version,
                        timeout_s=5.0,
                        batch_rows=size,
                    )
                except PredictionFailed as error:
                    raise VerificationFailed(release=release.name, reason=f"{protocol}: {error}") from error
                _compare(release, protocol, golden, answer, tolerance)

    def stop(self, release: Release) -> None:
        """Nothing of the release is left: process, shared memory, folder. Its log stays."""
        place = self._place(release)
        self._host.stop(release.name)
        if place:
            reclaim_shared_memory(place)
        self._were_ready.discard(release.name)
        shutil.rmtree(self._folder / release.name, ignore_errors=True)

    def running(self) -> list[Release]:
        """Every release that was started and not stopped, and whose process the host still keeps."""
        return [release for release in self._known() if self._host.state(release.name) != "absent"]

    def log(self, release: Release) -> Path:
        return self._folder / "logs" / f"{release.name}.log"

    def _known(self) -> list[Release]:
        found = []
        for record in self._folder.glob("*/release.json"):
            try:
                found.append(Release.parse(record.parent.name))
            except NameInvalid:
                continue
        return sorted(found)

    def _repository(self, release: Release) -> Path:
        return self._folder / release.name / "repository"

    def _schema(self, release: Release) -> Schema:
        return read_schema(self._repository(release) / release.model / str(release.version))

    def _place(self, release: Release) -> TritonPlace | None:
        try:
            record: dict[str, Any] = json.loads((self._folder / release.name / "release.json").read_text())
        except FileNotFoundError:
            return None
        return TritonPlace(**record["place"])

    def _new_place(self, release: Release) -> TritonPlace:
        others = [self._place(other) for other in self._known() if other != release]
        taken = [port for place in others if place for port in place.ports]
        http, grpc, metrics = free_ports(3, but=taken)
        place = new_place(release, (http, grpc, metrics))
        record = {"format": FORMAT, "version": VERSION, "release": release.name, "place": place.to_json()}
        path = self._folder / release.name / "release.json"
        scratch = path.with_suffix(".new")
        scratch.touch(mode=0o600)  # it holds the token
        scratch.write_text(json.dumps(record))
        scratch.rename(path)
        return place


def _compare(
    release: Release, protocol: str, golden: Golden, answer: dict[str, Array], tolerance: float
) -> None:
    for name, given in answer.items():
        wanted = golden.outputs[name][: len(given)]
        if given.shape != wanted.shape:
            reason = f"{name!r} has shape {given.shape}, its bundle says {wanted.shape}"
            raise VerificationFailed(release=release.name, reason=f"{protocol}: {reason}")
        near = np.isclose(given, wanted, rtol=tolerance, atol=tolerance, equal_nan=True)
        wrong = np.flatnonzero(~near.reshape(len(near), -1).all(axis=1))
        if wrong.size:
            reason = (
                f"{wrong.size} of {len(given)} rows differ in {name!r}; row {golden.row[wrong[0]]} gives "
                f"{given[wrong[0]].tolist()}, its bundle says {wanted[wrong[0]].tolist()}"
            )
            raise VerificationFailed(release=release.name, reason=f"{protocol}: {reason}")
