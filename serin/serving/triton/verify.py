"""Checks a running release by its golden rows, at whatever address it answers."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from serin.errors import PredictionFailed, VerificationFailed
from serin.formats.bundle import read_golden
from serin.formats.schema import read_schema
from serin.serving.client.client import Protocol, predict
from serin.serving.triton.checked_rows import CheckedRows
from serin.serving.triton.golden_answers import allowed_difference, difference_found
from serin.serving.triton.repository import serving_settings
from serin.store.artifacts import Bundle, Endpoint, Release

_SINGLE_ROWS: Final = 3
_VERIFY_S: Final = 5.0  # for one batch of golden rows, or as long as a request may take


def verify_release(release: Release, endpoint: Endpoint, bundle: Bundle) -> CheckedRows:
    """Checks that the release answers the golden rows as its bundle says: by HTTP and gRPC, alone and in batches.

    Returns what it was asked. Raises VerificationFailed with the first difference.
    """
    folder = Path(bundle.path)
    schema = read_schema(folder)
    golden = read_golden(folder, schema)
    serving = serving_settings(bundle)
    batch_rows = min(64, serving.max_batch_rows)
    allowed = allowed_difference(folder)
    few = {name: values[:_SINGLE_ROWS] for name, values in golden.inputs.items()}
    asked = CheckedRows()
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
                    timeout_s=max(_VERIFY_S, serving.request_timeout),
                    batch_rows=size,
                )
            except PredictionFailed as error:
                raise VerificationFailed(release=release.name, reason=f"{protocol}: {error}") from error
            differs = difference_found(golden, answer, allowed)
            if differs:
                raise VerificationFailed(release=release.name, reason=f"{protocol}: {differs}")
            count = len(next(iter(rows.values())))
            asked = CheckedRows(rows=asked.rows + count, requests=asked.requests + -(-count // size))
    return asked
