"""Which errors make Prefect try again."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from prefect import flow, task
from prefect.cache_policies import NO_CACHE
from prefect.states import Failed

from serin.errors import ControllerSilent, GateFailed, LossNotFinite, Preempted, SerinError, WorkerFailed
from tasks.retry import error_is_retryable

WORTH_IT = [
    WorkerFailed(rank=0, code=-9, log="attempt-001.log"),
    Preempted(step=4, folder="run"),
    ControllerSilent(model="flights", command="start", waited_s=10),
]
IN_VAIN = [
    GateFailed(stage="scores", what="'score' differs", found="torch 0.1, graph 0.9"),
    LossNotFinite(step=7, value="nan", folder="run"),
    ValueError("a bug"),
    KeyError("another"),
]


@pytest.mark.parametrize("error", WORTH_IT, ids=lambda error: type(error).__name__)
def test_an_error_marked_as_retryable_is_retried(error: SerinError) -> None:
    assert error_is_retryable(None, None, Failed(data=error))  # type: ignore[arg-type]


@pytest.mark.parametrize("error", IN_VAIN, ids=lambda error: type(error).__name__)
def test_any_other_error_fails_at_once(error: Exception) -> None:
    assert not error_is_retryable(None, None, Failed(data=error))  # type: ignore[arg-type]


@pytest.mark.parametrize(("error", "tries"), [(WORTH_IT[0], 3), (IN_VAIN[0], 1)], ids=["retryable", "final"])
def test_the_engine_asks_the_error_itself(prefect_server: None, error: Exception, tries: int) -> None:
    count = 0

    @task(retries=2, retry_condition_fn=error_is_retryable, cache_policy=NO_CACHE)
    async def fail() -> None:
        nonlocal count
        count += 1
        raise error

    @flow
    async def run() -> Any:
        return await fail()

    with pytest.raises(type(error), match=str(error)[:20]):
        asyncio.run(run())
    assert count == tries
