"""gate.json: what the export checked before it published a version, and the result of each variant."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from serin.errors import BundleBroken
from serin.formats.groups import GroupReport

GATE = "gate.json"


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
class VariantResult:
    """Times are medians in microseconds, by rows in a batch, with one thread. `drop`: of the budget's metric against
    fp32, on `test_rows` rows (fewer for one that is far too slow). `segments`: the drop in each, worst first."""

    name: str
    status: Literal["chosen", "passed", "rejected", "unavailable"]
    reason: str = ""
    node: str | None = None  # where it first leaves fp32
    bytes: int | None = None
    flops: int | None = None  # for one row
    latency_us: dict[int, float] = field(default_factory=dict)
    mix_us: float | None = None  # mean over the batch mix
    largest_score_difference: float | None = None
    test_rows: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    drop: float | None = None
    segments: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class GateReport:
    """What was compared and how far apart it was; gate.json."""

    golden_rows: int
    batch_rows: tuple[int, ...]
    feature_columns: int  # equal bit for bit
    rounded_columns: tuple[str, ...]  # logarithms and sines: equal within their last place
    tolerance: float
    largest_score_difference: float
    test_rows: int
    made_by: str  # the trainer
    test_trained: dict[str, float]
    test_onnx: dict[str, float]
    target: str = "cpu"
    chosen: str = "fp32"
    variants: tuple[VariantResult, ...] = ()
    front_core_difference: float | None = None  # largest, of a score by front and core from the whole graph's
    allowed_difference: float | None = None  # of a score on another device or in another batch
    engine_key: str | None = None  # of the machine that a TensorRT engine is good for
    runtime: Runtime = field(default_factory=Runtime)
    groups: GroupReport | None = None  # by the columns of export.segments

    def with_variants(
        self, chosen: str, variants: tuple[VariantResult, ...], front_core: float | None, runtime: Runtime
    ) -> GateReport:
        return replace(
            self, chosen=chosen, variants=variants, front_core_difference=front_core, runtime=runtime
        )

    def to_json(self, versions: Mapping[str, str]) -> dict[str, Any]:
        """`versions`: of the libraries that the checks ran with."""
        document = {"format": "serin.gate", "version": 1, "passed": True, **asdict(self)}
        return {**document, "versions": dict(versions)}


def read_runtime(bundle: Path) -> Runtime:
    """The section `runtime` of the bundle's gate.json; one thread when there is none."""
    path = bundle / GATE
    if not path.is_file():
        return Runtime()
    try:
        section = json.loads(path.read_text(encoding="utf-8")).get("runtime") or {}
        threads = section.get("threads", 1)
        if not isinstance(threads, int) or threads < 1:
            raise ValueError(f"{threads!r} is not a number of threads")
        spread = float(section.get("spread", 0.0))
        return Runtime(threads=threads, mix_us=dict(section.get("mix_us", {})), spread=spread)
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise BundleBroken(path=str(path), reason=f"{type(error).__name__}: {error}") from error
