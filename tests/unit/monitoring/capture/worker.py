"""A small model, and a worker of the gateway that leaves its requests in a ring, for tests of the recorder."""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from serin.formats.schema import InputColumn, OutputTensor, Schema
from serin.monitoring.capture.recorder import Plan, Plans, Recorder
from serin.spec.monitoring import CaptureSpec
from serin.store.artifacts import Release
from tests.kit.decoding import built_decoder
from tests.kit.rings import BOOT, Exchange, RingWriter, binary_body, json_answer, json_request

NOON = 1772366400.0  # 2026-03-01T12:00 UTC
SCHEMA = Schema(
    task="binary",
    inputs=(
        InputColumn(name="name", dtype="BYTES", kind="string"),
        InputColumn(name="age", dtype="INT64", kind="int"),
        InputColumn(name="fare", dtype="FP32", kind="float"),
    ),
    outputs=(OutputTensor(name="score", dtype="FP32", dims=(1,)),),
)


def request(number: int, t: float, rows: int = 1, *, prefix: str = "id", arm: str = "stable") -> Exchange:
    """Request `number`, whose rows have the ages 1000 * number, 1000 * number + 1, ...: JSON, or binary if odd."""
    ages = (np.arange(rows, dtype=np.int64) + 1000 * number).tolist()
    fares = [number / 4] * rows
    columns = {
        "name": ("BYTES", (rows, 1), [f"n{number}"] * rows),
        "age": ("INT64", (rows, 1), ages),
        "fare": ("FP32", (rows, 1), fares),
    }
    answers = {"score": ("FP32", (rows, 1), [fare + 1 for fare in fares])}
    known = {"t": t, "id": f"{prefix}-{number}", "client_id": f"mine-{number}", "arm": arm}
    if number % 2 == 0:
        return Exchange(request=json_request(columns), answer=json_answer(answers), **known)  # type: ignore[arg-type]
    (body, length), (answer, answer_length) = binary_body("inputs", columns), binary_body("outputs", answers)
    return Exchange(request=body, answer=answer, request_json=length, answer_json=answer_length, **known)  # type: ignore[arg-type]


class Worker:
    """A worker of the gateway with requests of one release."""

    def __init__(
        self, home: Path, release: str = "taxis-v1", share: float = 1.0, *, boot: str = BOOT
    ) -> None:
        self.release, self.share = release, share
        self.ring = RingWriter(home, f"{boot}-{zlib.crc32(release.encode()) % 1000}")

    def leave(self, requests: Sequence[Exchange], *, dropped: int = 0) -> None:
        """Leaves `requests`, after `dropped` others that had no room."""
        self.ring.drawn += dropped
        if dropped:
            self.ring.drop(self.release, dropped)
        for each in requests:
            assert self.ring.write(replace(each, release=self.release, share=self.share))

    @property
    def waits(self) -> int:
        """Bytes that are not recorded."""
        return self.ring.head - self.ring.tail


def plans(settings: Callable[[Release], CaptureSpec | None]) -> Plans:
    def plan(release: Release) -> Plan | None:
        found = settings(release)
        return None if found is None else Plan(schema=SCHEMA, settings=found)

    return plan


def keep_all(release: Release) -> CaptureSpec:
    return CaptureSpec(share=1.0)


def recorder(
    home: Path, settings: Callable[[Release], CaptureSpec | None] = keep_all, **options: object
) -> Recorder:
    return Recorder(home, plans(settings), built_decoder(), **options)  # type: ignore[arg-type]
