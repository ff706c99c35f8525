"""Finds the live models that are due for retraining, and runs their pipelines, each as a separate run."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prefect import get_run_logger
from prefect.runtime import flow_run

from serin.errors import SerinError
from serin.formats.reason import Kind, Reason
from serin.machine import environment
from serin.monitoring.retrain import Refusal, RetrainBook, failed_alert, failed_key
from serin.pipeline.needs import run_variables
from serin.rollout.run.access import find_rollouts
from serin.rollout.run.status import status_of
from serin.spec.pipeline import PipelineSpec
from serin.store.artifacts import Release
from serin.store.stage_keys import note
from serin.watcher.cluster_state import find_book
from tasks.place import run_stage
from tasks.versions import all_tried, find_version, live_models, sent_version


@dataclass(frozen=True, slots=True, kw_only=True)
class Due:
    """A model to train again. `live`: its release so far."""

    spec: PipelineSpec
    live: Release
    reason: Reason


def models_to_retrain(why: Kind, model: str | None, payload: Mapping[str, Any] | None) -> list[Due]:
    """Returns the live models to retrain now, as their specs and budgets allow; each decision is recorded.

    A model that is named must have a live version. `payload`: the event's, with the reason.
    """
    logger, now, due = get_run_logger(), time.time(), []
    reason = Reason.of_event(why, payload, now=now)
    for name in [model] if model else live_models():
        live, spec = find_version(name, "live")
        if why != "asked" and why not in spec.monitoring.retrain:
            continue
        book = RetrainBook(environment.home(), name)
        made = book.request(
            reason, spec.monitoring, live=live.name, run=_run(), now=now, candidate=_candidate(name)
        )
        if isinstance(made, Refusal):
            logger.warning("%s is %s", name, made)
            _note(name, str(made), ran=False)
        else:
            logger.info("%s is trained again because of %s", name, made.reason)
            due.append(Due(spec=spec, live=live, reason=made.reason))
    if not due:
        logger.info("no live model is trained again (monitoring.retrain of its spec)")
    return due


async def retrain_models(due: list[Due]) -> list[Release]:
    """Retrains the models and returns the versions that are live then. All are tried; the first error is raised at the
    end."""
    return await all_tried(map(_retrain, due))


async def _retrain(due: Due) -> Release:
    book = RetrainBook(environment.home(), due.spec.name)
    try:
        release = await run_stage(
            "pipeline",
            Release,
            job_variables=run_variables(due.spec.environment, due.spec.priority, placed=True),
            spec=sent_version(due.live),
            reason=due.reason.to_json(),
        )
    except SerinError as error:
        book.end(_run(), "failed", str(error), time.time())
        _note(due.spec.name, f"because of {due.reason}; it failed", ran=True)
        find_book(environment.home()).fire(
            failed_alert(due.spec.name, due.live.name, due.reason, str(error), now=time.time()), time.time()
        )
        raise
    find_book(environment.home()).resolve(failed_key(release.model), time.time())
    if release == due.live:
        get_run_logger().info("%s: nothing has changed since it was trained", release.name)
        book.end(_run(), "unchanged", release.name, time.time())
        _note(release.model, f"{release.name} stays: nothing has changed since it was trained", ran=False)
    else:
        book.end(_run(), "promoted", release.name, time.time())
        _note(release.model, f"{release.name}, because of {due.reason}", ran=True, made=release)
    return release


def _candidate(model: str) -> str | None:
    """The release of the model that is being rolled out now."""
    status = status_of(find_rollouts(), model)
    if status is None or not status.rollout.running:
        return None
    return f"{model}-v{status.rollout.label}"


def _run() -> str:
    return str(flow_run.id)


def _note(model: str, why: str, *, ran: bool, made: Release | None = None) -> None:
    """Records the decision for `serin runs show`."""
    version = None if made is None else (made.model, made.version)
    note(environment.home(), _run(), f"retrain {model}", ran=ran, why=why, version=version)
