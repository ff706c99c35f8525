"""Checks that a release is alive by calling Triton itself, not the gateway, so that the request log has no trace of it.

Triton 2.51 reports a model and its server as ready even when the Python process that runs it is dead: only a scored row
is proof.
"""

from __future__ import annotations

import http.client
import json
import math

from serin.formats.schema import Schema
from serin.machine.heartbeat import beat
from serin.store.artifacts import Release

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
