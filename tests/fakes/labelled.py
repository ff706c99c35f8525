"""Recorded requests of a small model and the truth about them, for tests of labels and live quality."""

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from serin.formats.schema import (
    DTYPE_OF_KIND,
    NULL_OF_KIND,
    InputColumn,
    Kind,
    OutputTensor,
    Schema,
    outputs_of,
)
from serin.monitoring.quality.labels import TruthOf
from serin.monitoring.quality.scan import Watched
from serin.spec.data import DataSpec
from tests.kit.recorded_parts import write_part

MODEL = "delays"
KINDS: dict[str, Kind] = {"flight": "string", "carrier": "string", "distance": "float", "day": "timestamp"}
BEGAN = datetime(2026, 3, 1, 6, tzinfo=UTC).timestamp()


def schema(task: str = "binary", classes: tuple[str, ...] | None = None, **kinds: Kind) -> Schema:
    columns = tuple(
        InputColumn(name=name, dtype=DTYPE_OF_KIND[kind], kind=kind, null=NULL_OF_KIND[kind])
        for name, kind in {**KINDS, **kinds}.items()
    )
    outputs: tuple[OutputTensor, ...] = outputs_of(task, len(classes or ()))  # type: ignore[arg-type]
    return Schema(task=task, inputs=columns, outputs=outputs, classes=classes)  # type: ignore[arg-type]


def data(expression: str = "arr_delay > 15", task: str = "binary", **others: Any) -> DataSpec:
    return DataSpec.model_validate(
        {
            "tables": {"flights": "flights.parquet"},
            "target": {"expression": expression, "task": task},
            **others,
        }
    )


def truth_of(**given: Any) -> TruthOf:
    return TruthOf(model=MODEL, **{"data": data(), "schema": schema(), **given})


def watched(version: int, **given: Any) -> Watched:
    return Watched(version=version, **{"data": data(), "schema": schema(), "segments": ("carrier",), **given})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Recorded:
    """Requests that were recorded, and the truth about them."""

    table: pa.Table
    truth: np.ndarray[Any, np.dtype[np.float64]]

    @property
    def scores(self) -> np.ndarray[Any, np.dtype[np.float32]]:
        return np.asarray(self.table.column("_answer_score"))

    def labels(self, rows: Any = slice(None)) -> pa.Table:
        """The truth by request id and row."""
        places = np.arange(self.table.num_rows)[rows]
        taken = self.table.select(["_id", "_row"]).take(pa.array(places))
        return taken.append_column("_label", pa.array(self.truth[places]))


def record(home: Path, rows: int, *, version: int = 1, **how: Any) -> Recorded:
    """Writes rows as `requests` makes them."""
    made = requests(rows, version=version, **how)
    write_part(home, MODEL, version, made.table)
    return made


def requests(
    rows: int,
    *,
    version: int = 1,
    seed: int = 0,
    each: int = 1,
    began: float = BEGAN,
    every_s: float = 20.0,
    skill: float = 1.0,
    source: str = "live",
) -> Recorded:
    """Rows in requests of `each`, one every `every_s` seconds. Scores are the truth's own chances when `skill` is 1,
    and say less about it the smaller it is."""
    random = np.random.default_rng([seed, version])
    request = np.arange(rows) // each
    logit = random.normal(-1.0, 1.5, rows)
    truth = (random.random(rows) < 1 / (1 + np.exp(-logit))).astype(np.float64)
    noise = random.normal(0.0, 1.5, rows)
    score = 1 / (1 + np.exp(-(skill * logit + (1 - skill) * noise)))
    t = (np.round((began + request * every_s) * 1e6)).astype(np.int64)
    carriers = np.array(["AA", "UA", "DL"], dtype=object)[random.integers(0, 3, rows)]
    table = pa.table(
        {
            "_id": pa.array([f"{seed}-{version}-{number}" for number in request]),
            "_row": pa.array((np.arange(rows) % each).astype(np.int32)),
            "_client_id": pa.array([f"client-{seed}-{number}" for number in request]),
            "_t": pa.array(t).cast(pa.timestamp("us", "UTC")),
            "_release": pa.array([f"{MODEL}-v{version}"] * rows),
            "_source": pa.array([source] * rows),
            "flight": pa.array([f"F{number}" for number in range(rows)]),
            "carrier": pa.array(carriers, pa.string()),
            "distance": pa.array(random.uniform(100, 2000, rows).astype(np.float32)),
            "day": pa.array(t // 86_400_000_000 * 86_400_000_000).cast(pa.timestamp("us")),
            "_answer_score": pa.array(score.astype(np.float32)),
        }
    )
    return Recorded(table=table, truth=truth)
