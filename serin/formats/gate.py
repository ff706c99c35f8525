"""gate.json: what the export checked before it published a version, the result of each variant and of each group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from serin.formats.wire import Array
from serin.machine.documents import read_facts
from serin.machine.typed_json import json2value

GATE = "gate.json"
NETWORK_TERMS = 8  # roundings of a network's answer, in units of the target's deviation
_ROUNDING = 2.0**-23  # half a place of each of two float32 results, relative to their size


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """How ONNX Runtime runs the bundle's graph, as the export measured it.

    `threads`: for one run. `mix_us`: the mean time of a request for each number of threads tried. `spread`: how far a
    golden row's score moved at most with the size of its batch, since 8-bit layers round differently in other batches.
    """

    threads: int = 1
    mix_us: dict[str, float] = field(default_factory=dict)
    spread: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreScale:
    """What a difference between two scores of a regression is measured in, one number for each element of an output.

    `unit`: the standard deviation of the golden scores. `rounding`: how far apart two correct sums of the same float32
    numbers may be, in the target's unit; a difference within it counts as none.
    """

    unit: tuple[float, ...]
    rounding: tuple[float, ...]

    @classmethod
    def of(
        cls,
        scores: Array,
        *,
        terms: int = NETWORK_TERMS,
        base: float | Array = 0.0,
        size: float | Array = 0.0,
    ) -> ScoreScale:
        """`scores`: [rows, ...]. `terms`: how many float32 numbers are summed before `base` is added; `size`: how large
        their sum is, if larger than what the scores show.

        Summing n numbers in another order moves the result by up to n roundings of the largest partial sum. Where
        scores vary less than that, it is also the unit, and 1 where all are 0.
        """
        flat = scores.reshape(len(scores), -1).astype(np.float64)
        flat = flat[np.isfinite(flat).all(axis=1)]
        inner = np.maximum(np.abs(flat - base).max(axis=0, initial=0.0), size)
        rounding = _ROUNDING * (terms * inner + np.abs(flat).max(axis=0, initial=0.0) + np.abs(base))
        unit = np.maximum(flat.std(axis=0), rounding) if len(flat) else rounding
        return cls(unit=tuple(np.where(unit > 0, unit, 1.0).tolist()), rounding=tuple(rounding.tolist()))


def scores_apart(found: Array, wanted: Array, scale: ScoreScale | None) -> Array:
    """Returns the differences of [rows, ...] scores: in units of the scale, beyond its rounding; without a scale they
    are relative to `wanted` where that is above 1, which suits probabilities."""
    with np.errstate(invalid="ignore"):  # between infinities
        difference = np.abs(found.astype(np.float64) - wanted)
    if scale is None:
        return np.asarray(difference / np.maximum(1.0, np.abs(wanted)))
    flat = np.maximum(difference.reshape(len(difference), -1) - np.asarray(scale.rounding), 0.0)
    return np.asarray((flat / np.asarray(scale.unit)).reshape(difference.shape))


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantResult:
    """Times are medians in microseconds, by rows in a batch, with one thread. `drop`: of the budget's metric against
    fp32, on `test_rows` rows (fewer for one that is far too slow). `segments`: the drop in each, worst first."""

    name: str
    status: Literal["chosen", "passed", "rejected", "unavailable"]
    reason: str = ""
    bytes: int | None = None
    latency_us: dict[int, float] = field(default_factory=dict)
    mix_us: float | None = None  # mean over the batch mix
    largest_score_difference: float | None = None
    test_rows: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    drop: float | None = None
    segments: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A number with its band at the report's confidence."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupResult:
    """One group against all other rows. `metric` is None where it cannot be measured (AUC with one class), `rate` in
    anything but a binary task. `gap`: how much worse the metric is than that of the other rows (an rmse's as a share of
    theirs); `rate_gap`: the group's selection rate minus theirs. `worse`: what is surely beyond a limit."""

    group: str
    rows: int
    metric: Measured | None
    gap: Measured | None
    rate: Measured | None
    rate_gap: Measured | None
    worse: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupReport:
    """`rows`: test rows in all. `small`: groups with fewer than `min_rows` rows, which are not judged. The error
    probability of the limits is shared among the groups."""

    columns: tuple[str, ...]
    metric: str
    rows: int
    confidence: float
    threshold: float | None
    min_rows: int
    max_gap: float | None
    max_rate_gap: float | None
    groups: tuple[GroupResult, ...]
    small: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class GateReport:
    """What was compared and how far apart it was; gate.json."""

    golden_rows: int
    batch_rows: tuple[int, ...]
    feature_columns: int  # equal bit for bit
    rounded_columns: tuple[str, ...]  # logarithms and sines: equal within their last place
    tolerance: float
    largest_score_difference: float
    allowed_difference: float  # of a score on another device or in another batch
    test_rows: int
    made_by: str  # the trainer
    test_trained: dict[str, float]
    test_onnx: dict[str, float]
    target: str = "cpu"
    chosen: str = "fp32"
    variants: tuple[VariantResult, ...] = ()
    front_core_difference: float | None = None  # largest, of a score by front and core from the whole graph's
    engine_key: str | None = None  # of the machine that a TensorRT engine is good for
    runtime: Runtime = field(default_factory=Runtime)
    scales: dict[str, ScoreScale] = field(default_factory=dict)  # of a regression's outputs, by name
    groups: GroupReport | None = None  # by the columns of export.segments

    def to_json(self, versions: Mapping[str, str]) -> dict[str, Any]:
        """`versions`: of the libraries that the checks ran with."""
        document = {"format": "serin.gate", "version": 1, "passed": True, **asdict(self)}
        return {**document, "versions": dict(versions)}


def read_runtime(bundle: Path) -> Runtime:
    """The section `runtime` of the bundle's gate.json; one thread when there is none."""
    path = bundle / GATE
    return read_facts(path, _runtime) if path.is_file() else Runtime()


def _runtime(gate: Mapping[str, Any]) -> Runtime:
    runtime = json2value(Runtime, gate.get("runtime") or {})
    if runtime.threads < 1:
        raise ValueError(f"{runtime.threads!r} is not a number of threads")
    return runtime


def read_scales(gate: Mapping[str, Any]) -> dict[str, ScoreScale]:
    """The section `scales` of a gate.json; empty for a classification."""
    return json2value(dict[str, ScoreScale], gate.get("scales") or {})
