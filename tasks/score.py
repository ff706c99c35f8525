"""Prefect's task that scores the rows which have come to a table."""

from __future__ import annotations

from typing import Any, Literal

from prefect import get_run_logger, task
from prefect.artifacts import acreate_markdown_artifact
from prefect.cache_policies import NO_CACHE
from prefect.runtime import flow_run

from serin.pipeline import score as use_case
from serin.store.artifacts import Release
from tasks.in_thread import in_thread
from tasks.markdown import receipt_table
from tasks.retry import error_is_retryable


@task(
    task_run_name="score {model}",
    retries=3,
    retry_delay_seconds=5,
    retry_condition_fn=error_is_retryable,
    cache_policy=NO_CACHE,
)
async def score_new_rows(
    model: str,
    rows: str | dict[str, Any],
    out: str | dict[str, Any],
    since: str | None,
    late: bool,
    scheduler: str | None,
    device: Literal["auto", "cpu", "gpu"],
) -> int:
    """Returns the number of rows that were scored."""
    done: use_case.Scored | None = await in_thread(
        use_case.score_new,
        model,
        rows,
        out,
        since=since,
        late=late,
        scheduler=scheduler,
        device=device,
        run=str(flow_run.id),
    )
    if done is None:
        get_run_logger().info("no new rows")
        return 0
    get_run_logger().info("%s scored %s rows", done.run.release, done.run.rows)
    release = Release.parse(done.run.release)
    await acreate_markdown_artifact(
        key=f"{release.model}-scores",
        markdown=f"# {done.run.rows:,} rows scored by {done.run.release}\n\n{receipt_table(done.receipt.to_json())}",
        description=f"Rows scored by {release.model} on a schedule",
    )
    return done.run.rows
