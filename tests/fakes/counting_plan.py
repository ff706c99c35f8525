"""Online windows for the hand-made model (tests/unit/serving/bundles.py): the number of earlier requests of a carrier
takes the place of the distance, which clients do not send."""

import math
import time
from typing import Any

from serin.formats.schema import DTYPE_OF_KIND, InputColumn, Kind
from serin.formats.windows import OnlineColumn, OnlineWindow, WindowPlan

_KINDS: dict[str, Kind] = {"at": "timestamp", "id": "string", "carrier": "string"}
PLAN = WindowPlan(
    time="at",
    id="id",
    max_late_us=600_000_000,
    max_future_us=60_000_000,
    unavailable="refuse",
    inputs=tuple(
        InputColumn(name=name, kind=kind, dtype=DTYPE_OF_KIND[kind]) for name, kind in _KINDS.items()
    ),
    dropped=("at", "id"),
    windows=(
        OnlineWindow(
            by=("carrier",),
            span_us=3_600_000_000,
            delay_us=0,
            columns={"distance": OnlineColumn(function="count", column=None, back=1, kind="int")},
        ),
    ),
)
BIAS = -8.0  # keeps scores apart


def event_inputs(event: str, at: int | None = None) -> list[dict[str, Any]]:
    """A request of one row; an event without an id is counted nowhere."""
    values: dict[str, tuple[str, Any]] = {
        "at": ("INT64", at or time.time_ns() // 1000), "id": ("BYTES", event), "carrier": ("BYTES", "AA"),
        "temp": ("FP32", 0.5), "night": ("INT8", 0),
    }  # fmt: skip
    return [
        {"name": name, "datatype": dtype, "shape": [1, 1], "data": [value]}
        for name, (dtype, value) in values.items()
    ]


def count_of(score: float) -> int:
    """How many events the model saw: its score is the logistic function of 1 + 0.5 + this number + BIAS."""
    return round(math.log(score / (1 - score)) - 1.5 - BIAS)
