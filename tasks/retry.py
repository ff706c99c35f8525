"""Decides when a task is retried: when its error says that this may help. Other errors would only fail later."""

from __future__ import annotations

from typing import Any

from prefect.client.schemas.objects import State, TaskRun

from serin.errors import SerinError


def error_is_retryable(_task: Any, _task_run: TaskRun, state: State[Any]) -> bool:
    """Prefect's `retry_condition_fn`. The engine hands over the error itself as the state's data."""
    return isinstance(state.data, SerinError) and state.data.retryable
