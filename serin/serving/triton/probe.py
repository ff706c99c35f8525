"""The releases that were started on this machine, and whether they answer. It starts and changes none.

Triton itself is called, not the gateway, so that the request log has no trace of it.

Triton 2.51 reports a model and its server as ready even when the Python process that runs it is dead: only a scored row
is proof.
"""

from __future__ import annotations

import http.client
import json
import logging
import math
import time
from pathlib import Path
from typing import Literal

from serin.errors import FileBroken, NameInvalid, ReleaseNotReady
from serin.formats.schema import Schema, read_schema
from serin.machine.documents import warn_once
from serin.machine.heartbeat import beat
from serin.machine.process import ProcessHost
from serin.serving.triton.process import TritonPorts, close_shared_memory
from serin.serving.triton.release_record import Record, Served, read_record
from serin.store.artifacts import Endpoint, Release

logger = logging.getLogger(__name__)

ReleaseState = Literal["absent", "starting", "ready", "dead"]

_SILENT_S, _TIMES_AS_LONG, _LONGEST_ROW_S = 2.0, 4.0, 30.0


class RowTimes:
    """How long one row of each release took when it was last ready, and which process answered it."""

    def __init__(self) -> None:
        self._row_s: dict[str, float] = {}
        self._instances: dict[str, int | None] = {}

    def note(self, release: Release, row_s: float, instance: int | None = None) -> None:
        self._row_s[release.name], self._instances[release.name] = row_s, instance

    def known(self, release: Release, instance: int | None = None) -> bool:
        """Returns whether this process has answered: a new one is still loading."""
        return release.name in self._row_s and self._instances[release.name] == instance

    def forget(self, release: Release) -> None:
        self._row_s.pop(release.name, None)

    def patience_s(self, release: Release, request_s: float) -> float:
        """Returns how long a row may take before the release counts as silent.

        At first as long as a request may take, then several times as long as it took before.
        """
        if release.name in self._row_s:
            return max(_SILENT_S, _TIMES_AS_LONG * self._row_s[release.name])
        return min(max(_SILENT_S, request_s), _LONGEST_ROW_S)


def answers(address: str, release: Release, schema: Schema, *, timeout_s: float = 2.0) -> bool:
    """Returns whether the release is loaded under its version and scores a row.

    A timeout is retried once, a row that is not scored twice: a busy release, or one that fails now and then, is not
    dead. The evidence judges how often it fails.
    """
    timeouts = refusals = 0
    while timeouts < 2 and refusals < 3:
        try:
            if _asked(address, release, schema, timeout_s):
                return True
            refusals += 1
        except TimeoutError:
            timeouts += 1
        except (OSError, http.client.HTTPException):
            return False
    return False


def _asked(address: str, release: Release, schema: Schema, timeout_s: float) -> bool:
    connection = http.client.HTTPConnection(address, timeout=timeout_s)
    place = f"/v2/models/{release.model}/versions/{release.version}"
    beat(within_s=2 * timeout_s)  # two requests
    try:
        connection.request("GET", f"{place}/ready")
        answer = connection.getresponse()
        answer.read()
        if answer.status != 200:
            return False
        connection.request("POST", f"{place}/infer", _empty_row(schema))
        answer = connection.getresponse()
        answer.read()
        return answer.status == 200
    finally:
        connection.close()


def _empty_row(schema: Schema) -> str:
    inputs = [
        {
            "name": column.name,
            "datatype": column.dtype,
            "shape": [1, *column.dims],
            "data": ["" if column.dtype == "BYTES" else 0] * math.prod(column.dims),
        }
        for column in schema.inputs
    ]
    return json.dumps({"inputs": inputs})


class KnownReleases:
    """The releases that were started here. There is one folder per release in `folder`: running releases are known from
    there and from the host, also after a crash."""

    def __init__(self, folder: Path, *, host: ProcessHost) -> None:
        self._folder, self._host = folder, host
        self._row_times = RowTimes()
        self._records: dict[Release, Record] = {}

    def endpoint(self, release: Release) -> Endpoint:
        place = self._place(release)
        if place is None:
            raise ReleaseNotReady(release=release.name, reason="it was not started", log=self.log(release))
        return place.endpoint

    def state(self, release: Release) -> ReleaseState:
        """Returns the state. `ready`: it answers a row. `dead`: its process failed, it was ready and no longer answers,
        or its record is damaged and nobody knows its ports: it can be started again."""
        try:
            record = self._record(release)
        except FileBroken as error:
            warn_once(logger, error)
            return "dead"
        process = self._host.state(release.name)
        if record is None or process == "absent":
            return "absent"
        if process == "failed":
            return "dead"
        began, instance = time.monotonic(), self._host.pid(release.name)
        patience_s = self._row_times.patience_s(release, record.served.request_s)
        if answers(record.place.endpoint.http, release, self._schema(release), timeout_s=patience_s):
            self._row_times.note(release, time.monotonic() - began, instance)
            close_shared_memory(record.place)  # also of a part that was restarted
            return "ready"
        return "dead" if self._row_times.known(release, instance) else "starting"

    def instance(self, release: Release) -> int | None:
        """Returns the process that runs it; another one after its host has restarted it."""
        return self._host.pid(release.name)

    def running(self) -> list[Release]:
        """Returns every release that was started and not stopped, and whose process the host still keeps."""
        return [release for release in self._known() if self._host.state(release.name) != "absent"]

    def served(self, release: Release) -> Served | None:
        """Returns backend, device and reason; None for a release that was not started."""
        record = self._record(release)
        return record.served if record else None

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

    def _place(self, release: Release) -> TritonPorts | None:
        record = self._record(release)
        return record.place if record else None

    def _place_if_known(self, release: Release) -> TritonPorts | None:
        try:
            return self._place(release)
        except FileBroken:
            return None

    def _record(self, release: Release) -> Record | None:
        """Returns the record. One that was damaged since it was read is remembered: its process still runs."""
        try:
            found = read_record(self._folder / release.name)
        except FileBroken as error:
            if release not in self._records:
                raise
            warn_once(logger, error)
            return self._records[release]
        if found is None:
            self._records.pop(release, None)
        else:
            self._records[release] = found
        return found
