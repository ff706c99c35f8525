"""Scores what has come to a table since the last run: on a schedule, or from CI."""

from __future__ import annotations

from typing import Any, Literal

from prefect import flow

from tasks.outcome import outcome_as_state
from tasks.score import score_new_rows
from tasks.tag import tag_with_model


@flow(name="score", persist_result=True, result_serializer="json")
@outcome_as_state
async def score(
    model: str,
    rows: str | dict[str, Any],
    out: str | dict[str, Any],
    since: str | None = None,
    late: bool = False,
    scheduler: str | None = None,
    device: Literal["auto", "cpu", "gpu"] = "cpu",
) -> int:
    """Scores the rows that no earlier run has scored into the target `out`, each once. Returns how many rows; 0 when
    nothing has come.

    `model`: MODEL[:VERSION]; the live version by default. `rows`: a folder, a glob or a URL, or an entry as in
    `data.tables` (`{"delta": ...}`, `{"sql": ..., "connection": ..., "order_by": ...}`). `out`: a folder,
    `{"delta": ...}` or `{"table": ..., "connection": ...}`. `since`: only files whose name behind the fixed part of
    `rows` is at least this text; the first version of a Delta table; the least value of a query's first order_by
    column. `late`: also files that come before one that was scored. `scheduler`: of Dask. Paths are those of the
    worker.
    """
    await tag_with_model(model.partition(":")[0])
    return await score_new_rows(model, rows, out, since, late, scheduler, device)
