"""The distribution of the last day: counts of bins in buckets of three hours, for pages. Nothing is decided by them."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from serin.evidence.e_detector import Array

BUCKET_S: Final = 10_800
KEPT: Final = 8


class RecentCounts:
    """Counts by bucket for the bins of all series. The newest eight buckets are kept."""

    def __init__(self, bins: int) -> None:
        self._bins = bins
        self._buckets: dict[int, Array] = {}

    def add(self, starts: Array, counts: Array) -> None:
        for bucket in np.unique(starts // BUCKET_S):
            rows = counts[starts // BUCKET_S == bucket].sum(axis=0)
            held = self._buckets.setdefault(int(bucket), np.zeros(self._bins, np.int64))
            held += rows
        for old in sorted(self._buckets)[:-KEPT]:
            del self._buckets[old]

    def total(self) -> Array:
        """The counts of all buckets together."""
        found: Array = np.sum([np.zeros(self._bins, np.int64), *self._buckets.values()], axis=0)
        return found

    @property
    def since(self) -> float | None:
        """The beginning of the oldest bucket (seconds since 1970)."""
        return float(min(self._buckets) * BUCKET_S) if self._buckets else None

    def to_json(self) -> dict[str, str]:
        return {str(bucket): _pack(counts) for bucket, counts in sorted(self._buckets.items())}

    @classmethod
    def from_json(cls, bins: int, document: Mapping[str, Any]) -> RecentCounts:
        made = cls(bins)
        for bucket, text in document.items():
            made._buckets[int(bucket)] = (
                np.frombuffer(zlib.decompress(base64.b64decode(text)), "<i8").reshape(bins).copy()
            )
        return made


def _pack(counts: Array) -> str:
    return base64.b64encode(zlib.compress(counts.astype("<i8").tobytes(), 1)).decode()
