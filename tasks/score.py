"""Prefect's task that scores the files which have come to a table."""

from __future__ import annotations

from typing import Literal

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from serin.pipeline import score as use_case
from tasks.in_thread import in_thread
from tasks.retry import error_is_retryable


@task(
    task_run_name="score {model}",
    retries=3,
    retry_delay_seconds=5,
    retry_condition_fn=error_is_retryable,
    cache_policy=NO_CACHE,
)
async def score_new_files(
    model: str,
    rows: str,
    out: str,
    since: str | None,
    late: bool,
    scheduler: str | None,
    device: Literal["auto", "cpu", "gpu"],
) -> int:
    """Returns the number of rows that were scored."""
    done = await in_thread(
        use_case.score_new, model, rows, out, since=since, late=late, scheduler=scheduler, device=device
    )
    if done is None:
        get_run_logger().info("no new files at %s", rows)
        return 0
    get_run_logger().info("%s scored %s rows of %s files", done.release, done.rows, len(done.files))
    return done.rows
