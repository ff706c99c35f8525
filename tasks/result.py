"""What a pipeline has made, as the last lines of its log."""

from __future__ import annotations

from prefect import get_run_logger

from serin.machine import environment
from serin.stack.prefect.run_summary import summary
from serin.store.artifacts import Release


def log_result(release: Release, *, served: bool) -> None:
    """`served`: the version was rolled out and is live."""
    for line in summary(environment.home(), release, served=served):
        get_run_logger().info(line)
