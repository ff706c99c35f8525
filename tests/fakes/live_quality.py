"""A served model whose requests were recorded by the real recorder, and labels that come as labels do."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from serin.columns.scored import measured, reliability, row_loss
from serin.formats.quality import QualityReference
from serin.machine.durable import make_private
from serin.monitoring.capture.recorder import Plan, Recorder
from serin.spec.monitoring import CaptureSpec
from serin.store.artifacts import Bundle, Release
from serin.store.store import Store
from tests.kit.decoding import built_decoder
from tests.kit.rings import Exchange, RingWriter, binary_body
from tests.unit.serving import bundles

DAY_S = 86_400.0
BEGAN = 1772366400.0  # 2026-03-01T12:00 UTC

Array = np.ndarray[Any, np.dtype[Any]]


def spec(monitoring: str = "{capture: {share: 1}}", time: str = "") -> str:
    return f"""
name: delays
data:
  tables: {{flights: flights.parquet}}
  target: {{expression: arr_delay > 15, task: binary}}
features:
  - {{columns: [temp, distance], steps: [fill_median]}}
  - {{columns: [carrier, night], steps: [categorify]}}
export: {{segments: [carrier]}}
monitoring: {monitoring}
objectives: {{latency_ms: 50}}
{time}"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Served:
    """Requests that a version answered: `delay` is the flight's, `late` the truth."""

    version: int
    ids: Array
    t: Array
    scores: Array
    delay: Array

    @property
    def late(self) -> Array:
        return (self.delay > 15).astype(np.float64)

    def labels(self, places: Any) -> pa.Table:
        """Labels as a team has them: the delay in minutes, by request id."""
        return pa.table({"_id": self.ids[places].tolist(), "arr_delay": self.delay[places]})


def publish(
    store: Store,
    bias: float,
    monitoring: str = "{capture: {share: 1}}",
    block_s: float = 60.0,
    files: Mapping[str, bytes] | None = None,
) -> Bundle:
    """A version whose scores are too low or too high by `bias`, with what its export would have measured, and other
    `files`."""
    rows = bundles.rows(4000, seed=99)
    logit = _logit(rows)
    scores = _sigmoid(logit + bias)
    late = (np.random.default_rng(3).random(len(logit)) < _sigmoid(logit)).astype(np.float64)
    reference = QualityReference(
        rows=len(late),
        loss_name="brier",
        loss=float(row_loss("binary", late, scores).mean()),
        scale=1.0,
        clip=1.0,
        block_s=block_s,
        metrics=measured("binary", late, scores),
        reliability=tuple((b.score, b.rate, b.rows) for b in reliability("binary", late, scores)),
    )
    extra = {"quality.json": json.dumps(reference.to_json()).encode(), **(files or {})}
    return bundles.publish(store, bias=bias, spec=spec(monitoring), extra=extra)


def serve(
    home: Path,
    bundle: Bundle,
    rows: int,
    *,
    seed: int,
    began: float = BEGAN,
    every_s: float = 10.0,
    worse: float = 0.0,
    edition: int = 1,
) -> Served:
    """Answers requests with the bundle's own graph and records them as the recorder does. `worse`: the share of rows
    whose truth has nothing to do with its columns. `edition`: of the release's lookups."""
    columns = bundles.rows(rows, seed=seed)
    scores = bundles.score(bundle.path, columns)
    random = np.random.default_rng([seed, bundle.version])
    t = began + np.arange(rows) * every_s
    ids = np.array([f"{seed}-{bundle.version}-{number}" for number in range(rows)])
    chance = np.where(random.random(rows) < worse, random.random(rows) < 0.5, _sigmoid(_logit(columns)))
    delay = np.where(random.random(rows) < chance, 16.0, 15.0) + random.normal(0, 0.3, rows).clip(-0.9, 0)
    release = Release(model=bundles.MODEL, version=bundle.version, edition=edition).name
    make_private(home)
    ring = RingWriter(
        home, f"{int(began * 1000):012x}-17-{seed:04x}{bundle.version:04x}-0", capacity=32 << 20
    )
    for at in range(rows):
        one = {each.name: _cell(columns[each.name], each.dtype, at) for each in bundles.SCHEMA.inputs}
        request, length = binary_body("inputs", one)
        answer, answer_length = binary_body("outputs", {"score": _cell(scores, "FP32", at)})
        lengths = {"request_json": length, "answer_json": answer_length}
        known = {"t": float(t[at]), "id": str(ids[at]), "release": release}
        assert ring.write(Exchange(request=request, answer=answer, **lengths, **known))  # type: ignore[arg-type]
    ring.end()
    plan = Plan(schema=bundles.SCHEMA, settings=CaptureSpec(share=1.0))
    recorder = Recorder(home, lambda _: plan, built_decoder())
    assert recorder.record(t[-1] + 60).requests == rows
    return Served(version=bundle.version, ids=ids, t=t, scores=scores[:, 0], delay=delay)


def _cell(values: Array, dtype: str, at: int) -> tuple[str, list[int], list[Any]]:
    return dtype, [1, 1], values[at].ravel().tolist()


def _logit(columns: dict[str, Array]) -> Array:
    """The graph's own formula without its bias."""
    codes = {"AA": 1.0, "UA": 2.0, "DL": 3.0, "Zürich 雪": 4.0}
    code = np.array([codes.get(value, 0.0) for value in columns["carrier"][:, 0]])
    temp = np.nan_to_num(columns["temp"][:, 0])
    return code + temp + columns["distance"][:, 0] + columns["night"][:, 0]


def _sigmoid(value: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-value)))
