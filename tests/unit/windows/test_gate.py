"""The export replays the history of a dataset and refuses windows that would be served otherwise."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from serin.errors import ColumnUnusable, GateFailed
from serin.etl.build import build_dataset
from serin.export.gate.windows import check_windows
from serin.formats.windows import HISTORY, WindowPlan, read_windows, write_windows
from serin.spec.pipeline import PipelineSpec
from serin.store.store import Store


def spec_of(folder: Path, rows: int = 400, **window: Any) -> PipelineSpec:
    draw = np.random.default_rng(3)
    times = pd.Timestamp("2026-03-29T00:30:00Z") + pd.to_timedelta(draw.integers(0, 3600, rows), unit="s")
    frame = pd.DataFrame(
        {
            "payment": draw.integers(0, rows * 3 // 4, rows),  # some come twice
            "at": times,
            "card": draw.choice(["a", "b", "c", None], rows),
            "amount": np.where(draw.random(rows) < 0.1, np.nan, draw.normal(size=rows)).astype(np.float32),
            "fraud": draw.integers(0, 2, rows),
        }
    )
    frame["known"] = frame["at"] + pd.to_timedelta(draw.choice([0, 0, 2, 90], rows), unit="s")
    frame.to_parquet(folder / "payments.parquet")
    make = {"n": "count()", "spent": "sum(amount)", "mean": "mean(amount)", "last": "lag(amount, 2)"}
    given = {"by": "card", "span": "5m", "delay": "1s", "source": "online", "make": make, **window}
    return PipelineSpec.model_validate(
        {
            "name": "pay",
            "data": {
                "tables": {"payments": str(folder / "payments.parquet")},
                "time": "at",
                "target": {"expression": "fraud == 1", "task": "binary"},
                "events": {"id": "payment", "arrival": "known"},
                "windows": [given],
            },
            "features": [{"columns": ["amount", *make], "steps": ["fill_median", "normalize"]}],
            "model": {"kind": "xgboost"},
        }
    )


def built(tmp_path: Path, spec: PipelineSpec) -> tuple[Path, WindowPlan]:
    dataset = build_dataset(spec.data, spec.features, spec.etl, store=Store(str(tmp_path / "store")))
    plan = read_windows(Path(dataset.path))
    assert plan is not None
    copy = tmp_path / "copy"
    (copy / HISTORY).mkdir(parents=True)
    history = Path(dataset.path, HISTORY, "0.parquet")
    (copy / HISTORY / "0.parquet").write_bytes(history.read_bytes())
    write_windows(copy, plan)
    return copy, plan


def test_the_history_of_a_dataset_passes_and_another_window_is_refused(tmp_path: Path) -> None:
    folder, plan = built(tmp_path, spec_of(tmp_path))
    check_windows(folder)
    assert set(plan.dropped) == {"at", "payment", "card"}
    (window,) = plan.windows
    for wrong in (
        replace(window, span_us=window.span_us - 1_000_000),
        replace(window, delay_us=0),
        replace(window, columns={**window.columns, "mean": replace(window.columns["mean"], function="max")}),
    ):
        write_windows(folder, replace(plan, windows=(wrong,)))
        with pytest.raises(GateFailed, match="served windows differ"):
            check_windows(folder)


def test_a_key_with_more_events_than_are_kept_is_refused(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, rows=60_000, span="1h")
    with pytest.raises(ColumnUnusable, match="online keeps 4,096"):
        build_dataset(spec.data, spec.features, spec.etl, store=Store(str(tmp_path / "store")))
