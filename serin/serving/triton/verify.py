"""Checks that a running release answers the golden rows as its bundle says, by the measure of the export gate.

A difference of a regression's scores is in the units of gate.json, and of others relative to the golden one where that
is above 1. A release may run on another device than the one of the gate, so it may differ a few times as far as the
gate saw scores vary, but never further than the gate itself would have allowed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from serin.errors import BundleBroken, PredictionFailed, VerificationFailed
from serin.formats.bundle import Golden, read_golden
from serin.formats.gate import GATE, ScoreScale, read_runtime, read_scales, scores_apart
from serin.formats.schema import read_schema
from serin.formats.wire import Array
from serin.machine.documents import read_if_any
from serin.serving.client.client import Protocol, predict
from serin.serving.triton.repository import serving_settings
from serin.store.artifacts import Bundle, Endpoint, Release

_SINGLE_ROWS: Final = 3
_MOST_ROWS: Final = 65  # of a batch; more could take longer than a slow model may
_VERIFY_S: Final = 5.0  # for one batch of golden rows, or as long as a request may take
_SAME_RUNTIME: Final = 1e-5  # the same graph on the same runtime gave the golden answers
_TIMES_SEEN: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowed:
    """How far a score may be from its golden one. `scales`: what it is measured in, by output; see gate.json."""

    difference: float
    scales: Mapping[str, ScoreScale] = field(default_factory=dict)


NO_DIFFERENCE = Allowed(difference=0.0)


def allowed_difference(bundle: Path) -> Allowed:
    """Returns how far the scores of a bundle may be from its golden ones.

    That is some times the variation that the gate saw with the batch size, or between the whole graph on the CPU and
    its front and core, and at most what the gate allowed.
    """
    path = bundle / GATE
    if not path.is_file():
        return Allowed(difference=_SAME_RUNTIME)
    try:
        gate: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        seen = max(read_runtime(bundle).spread, float(gate.get("front_core_difference") or 0.0))
        allowed, scales = float(gate["allowed_difference"]), read_scales(gate)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BundleBroken(path=str(path), reason=f"{type(error).__name__}: {error}") from error
    return Allowed(difference=max(_SAME_RUNTIME, min(_TIMES_SEEN * seen, allowed)), scales=scales)


def difference_found(golden: Golden, answer: Mapping[str, Array], allowed: Allowed) -> str | None:
    """Describes the difference, with the first row that differs; None when all answers agree with the bundle."""
    for name, given in answer.items():
        wanted = golden.outputs[name][: len(given)]
        if given.shape != wanted.shape:
            return f"{name!r} has shape {given.shape}, but its bundle has {wanted.shape}"
        wrong = np.flatnonzero(~rows_near(name, given, golden.outputs, allowed))
        if wrong.size:
            first = int(wrong[0])
            unit = " standard deviations" if name in allowed.scales else ""
            return (
                f"{wrong.size} of {len(given)} rows differ in {name!r} by more than {allowed.difference:.3g}{unit}; "
                f"row {golden.row[first]} gives {given[first].tolist()}, its bundle has {wanted[first].tolist()}"
            )
    return None


def rows_near(name: str, given: Array, wanted: Mapping[str, Array], allowed: Allowed) -> Array:
    """Returns for each row of the output `name` whether it agrees with the first rows of `wanted`; the shapes must
    fit."""
    expected = wanted[name][: len(given)]
    if not np.issubdtype(given.dtype, np.integer):
        same = (given == expected) | (np.isnan(given) & np.isnan(expected))
        near = same | (scores_apart(given, expected, allowed.scales.get(name)) <= allowed.difference)
    elif name == "label" and "probabilities" in wanted:
        near = _near_labels(wanted["probabilities"][: len(given)], given, allowed.difference)
    else:
        near = given == expected
    return np.asarray(near.reshape(len(near), -1).all(axis=1))


def _near_labels(probabilities: Array, given: Array, allowed: float) -> Array:
    """Accepts a label when its golden probability is the largest, or nearly so: two classes may tie within the
    tolerance."""
    known = (given >= 0) & (given < probabilities.shape[1])
    chosen = np.take_along_axis(probabilities, np.where(known, given, 0), axis=1)
    return np.asarray(known & (probabilities.max(axis=1, keepdims=True) - chosen <= 2 * allowed))


def verify_release(release: Release, endpoint: Endpoint, bundle: Bundle) -> None:
    """Checks that the release answers the golden rows as its bundle says: by HTTP and gRPC, alone and in batches, and
    once in each batch size of its gate up to 65, because a kernel of this machine may be right for one row and wrong
    for eight.

    Raises VerificationFailed with the first difference.
    """
    folder = Path(bundle.path)
    schema = read_schema(folder)
    golden = read_golden(folder, schema)
    serving = serving_settings(bundle)
    batch_rows = min(64, serving.max_batch_rows)
    allowed = allowed_difference(folder)
    sizes = _gate_sizes(folder, min(_MOST_ROWS, serving.max_batch_rows)) if len(golden) else []
    few = [(_repeated(golden, min(_SINGLE_ROWS, len(golden))), 1)]
    urls: dict[Protocol, str] = {"http": endpoint.http, "grpc": endpoint.grpc}
    for protocol, url in urls.items():
        asked = [*few, (golden, batch_rows)]
        if protocol == "http":
            asked += [(_repeated(golden, size), size) for size in sizes]
        for rows, size in asked:
            try:
                answer = predict(
                    url,
                    release.model,
                    rows.inputs,
                    schema,
                    protocol,
                    release.version,
                    timeout_s=max(_VERIFY_S, serving.request_timeout),
                    batch_rows=size,
                )
            except PredictionFailed as error:
                raise VerificationFailed(release=release.name, reason=f"{protocol}: {error}") from error
            differs = difference_found(rows, answer, allowed)
            if differs:
                reason = f"{protocol}: {differs} (in batches of {size})"
                raise VerificationFailed(release=release.name, reason=reason)


def _gate_sizes(folder: Path, most: int) -> list[int]:
    """Returns the batch sizes that the gate of the bundle tried, up to `most`; none without a gate."""
    sizes = read_if_any(folder / GATE).get("batch_rows") or ()
    return [int(size) for size in sizes if size <= most]


def _repeated(golden: Golden, count: int) -> Golden:
    """Returns so many golden rows: the first ones, and all again when there are fewer."""
    at = np.arange(count) % max(len(golden), 1)
    return Golden(
        inputs={name: values[at] for name, values in golden.inputs.items()},
        outputs={name: values[at] for name, values in golden.outputs.items()},
        row=golden.row[at],
    )
