"""A small model whose backend leaves requests in a spool, for tests of the recorder."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from serin.formats.serving.spool_blocks import Recorded, encode_block, encode_header
from serin.spec.monitoring import CaptureSpec
from serin.store.artifacts import Release

NOON = 1772366400.0  # 2026-03-01T12:00 UTC
WRITER = "001772366400-17-0000abcd"
INPUTS = [("name", "string", [1]), ("age", "int", [1]), ("fare", "float", [1])]
OUTPUTS = [("score", "FP32", [1])]


def request(number: int, t: float, rows: int = 1, *, prefix: str = "id") -> Recorded:
    """Request `number`, whose rows have the ages 1000 * number, 1000 * number + 1, ..."""
    ages = np.arange(rows, dtype=np.int64).reshape(-1, 1) + 1000 * number
    names = np.array([[f"n{number}".encode()]] * rows, dtype=object)
    fares = np.full((rows, 1), number / 4, np.float32)
    return Recorded(t, f"{prefix}-{number}".encode(), b"", rows, [names, ages, fares, fares + 1])


class Backend:
    """Writes files as a serving backend does."""

    def __init__(
        self, home: Path, release: str = "taxis-v1", writer: str = WRITER, share: float = 1.0
    ) -> None:
        self.folder = home / "spool" / release / writer
        self.sent = self.dropped = 0
        self._next = 1
        model = release.rpartition("-v")[0]
        self._header = encode_header(
            model=model, release=release, share=share, inputs=INPUTS, outputs=OUTPUTS
        )

    def leave(
        self, requests: Sequence[Recorded], *, dropped: int = 0, cut: int = 0, end: str = ".rows"
    ) -> Path:
        """One file with `requests`, after `dropped` others. `cut`: so many bytes are missing at its end."""
        self.sent += len(requests) + dropped
        self.dropped += dropped
        self.folder.mkdir(parents=True, exist_ok=True)
        data = self._header + encode_block(requests, sent=self.sent, dropped=self.dropped)
        path = self.folder / f"{self._next:08d}{end}"
        path.write_bytes(data[: len(data) - cut])
        self._next += 1
        return path


def log_line(number: int, t: float, *, arm: str = "stable", prefix: str = "id", us: int = 2500) -> str:
    fields = {
        "t": f"{t:.6f}", "model": "taxis", "epoch": 4, "arm": arm, "release": "taxis-v1", "code": 200,
        "grpc": None, "us": us, "up_us": 900, "attempts": 1, "flags": "-", "proto": "HTTP/1.1",
        "id": f"{prefix}-{number}", "client_id": f"mine-{number}", "trace": None,
    }  # fmt: skip
    return json.dumps(fields) + "\n"


def keep_all(release: Release) -> CaptureSpec:
    return CaptureSpec(share=1.0)
