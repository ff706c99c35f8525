"""Checks that a release answers the golden rows as its bundle says, by the measure of the export gate.

A difference of scores is relative to the golden one where that is above 1. A release may run on another device than the
one of the gate, so it may differ a few times as far as the gate saw scores vary, but never further than the gate itself
would have allowed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from serin.errors import BundleBroken
from serin.formats.bundle import Golden
from serin.formats.gate import GATE, read_runtime
from serin.formats.wire import Array

_SAME_RUNTIME = 1e-5  # the same graph on the same runtime gave the golden answers
_TIMES_SEEN = 4
_OLDER_GATE_ALLOWED = 0.05  # between devices, where gate.json does not have it


def allowed_difference(bundle: Path) -> float:
    """Returns how far a score may be from its golden one.

    That is some times the variation that the gate saw with the batch size, or between the whole graph on the CPU and
    its front and core, and at most what the gate allowed.
    """
    path = bundle / GATE
    if not path.is_file():
        return _SAME_RUNTIME
    try:
        gate: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        apart = gate.get("front_core_difference")
        seen = max(read_runtime(bundle).spread, float(apart or 0.0))
        older = _OLDER_GATE_ALLOWED if apart is not None else gate.get("tolerance", 0.0)
        allowed = float(gate.get("allowed_difference") or older)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise BundleBroken(path=str(path), reason=f"{type(error).__name__}: {error}") from error
    return max(_SAME_RUNTIME, min(_TIMES_SEEN * seen, allowed))


def difference_found(golden: Golden, answer: Mapping[str, Array], allowed: float) -> str | None:
    """Describes the difference, with the first row that differs; None when all answers agree with the bundle."""
    for name, given in answer.items():
        wanted = golden.outputs[name][: len(given)]
        if given.shape != wanted.shape:
            return f"{name!r} has shape {given.shape}, but its bundle has {wanted.shape}"
        wrong = np.flatnonzero(~rows_near(name, given, golden.outputs, allowed))
        if wrong.size:
            return (
                f"{wrong.size} of {len(given)} rows differ in {name!r} by more than {allowed:.3g}; row "
                f"{golden.row[wrong[0]]} gives {given[wrong[0]].tolist()}, its bundle has {wanted[wrong[0]].tolist()}"
            )
    return None


def rows_near(name: str, given: Array, wanted: Mapping[str, Array], allowed: float) -> Array:
    """Returns for each row of the output `name` whether it agrees with the first rows of `wanted`; the shapes must
    fit."""
    expected = wanted[name][: len(given)]
    if not np.issubdtype(given.dtype, np.integer):
        near = _near(given, expected, allowed)
    elif name == "label" and "probabilities" in wanted:
        near = _near_labels(wanted["probabilities"][: len(given)], given, allowed)
    else:
        near = given == expected
    return np.asarray(near.reshape(len(near), -1).all(axis=1))


def _near(given: Array, wanted: Array, allowed: float) -> Array:
    same = (given == wanted) | (np.isnan(given) & np.isnan(wanted))
    with np.errstate(invalid="ignore"):  # between infinities
        difference = np.abs(given.astype(np.float64) - wanted) / np.maximum(1.0, np.abs(wanted))
    return np.asarray(same | (difference <= allowed))


def _near_labels(probabilities: Array, given: Array, allowed: float) -> Array:
    """Accepts a label when its golden probability is the largest, or nearly so: two classes may tie within the
    tolerance."""
    known = (given >= 0) & (given < probabilities.shape[1])
    chosen = np.take_along_axis(probabilities, np.where(known, given, 0), axis=1)
    return np.asarray(known & (probabilities.max(axis=1, keepdims=True) - chosen <= 2 * allowed))
