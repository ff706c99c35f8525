"""The state of a drift detector as JSON: its arrays as base64, bit for bit."""

from __future__ import annotations

import base64
import zlib
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from serin.evidence.e_detector import Array
from serin.monitoring.drift.quiet import QuietColumn

if TYPE_CHECKING:
    from serin.monitoring.drift.detector import DriftDetector

FORMAT, VERSION = "serin.drift_state", 2
_EVIDENCE = ("log_m", "run", "since", "hits", "rows")


def pack(detector: DriftDetector) -> dict[str, Any]:
    quiet = [{"column": column, **asdict(each)} for column, each in sorted(detector.quiet.items())]
    arrays = {name: _write(values) for name, values in _arrays(detector).items()}
    return {"format": FORMAT, "version": VERSION, "arrays": arrays, "quiet": quiet}


def unpack(detector: DriftDetector, state: dict[str, Any]) -> None:
    """Gives the detector what `pack` has written; ValueError when it does not fit. Version 1 had other stakes: what was
    open and alarmed stays, and evidence is collected again."""
    if state.get("format") != FORMAT or state.get("version") not in (1, VERSION):
        raise ValueError(f"not a {FORMAT} version {VERSION} document")
    before = state["version"] == 1
    for name, values in _arrays(detector).items():
        if before and (name in _EVIDENCE or name not in state["arrays"]):
            continue
        values[...] = np.frombuffer(
            zlib.decompress(base64.b64decode(state["arrays"][name])), values.dtype
        ).reshape(values.shape)
    detector.quiet = {entry["column"]: QuietColumn.from_json(entry) for entry in state["quiet"]}


def _arrays(detector: DriftDetector) -> dict[str, Array]:
    evidence = detector.evidence
    return {
        "open_counts": detector.open_counts,
        "open_first": detector.open_first,
        "open_rows": detector.open_rows,
        "open_start": detector.open_start,
        "waited": detector.waited,
        "log_m": evidence.log_m,
        "run": evidence.run,
        "since": evidence.since,
        "hits": evidence.hits,
        "rows": evidence.rows,
    }


def _write(values: Array) -> str:
    return base64.b64encode(zlib.compress(np.ascontiguousarray(values).tobytes(), 1)).decode()
