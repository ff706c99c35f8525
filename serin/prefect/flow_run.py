"""Runs a pipeline on the workers of the stack, or of the Prefect server that PREFECT_API_URL names."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from serin.errors import RunNotResumable, SpecError
from serin.host.process_scan import run_processes
from serin.host.state import POOLS
from serin.machine import environment
from serin.pipeline.needs import image_variable
from serin.prefect.follow import ENDED_BADLY, RunLog, begin_run, follow_run
from serin.prefect.login import PrefectServer, needed_server
from serin.prefect.processes import KUBERNETES_TYPE
from serin.prefect.reconcile import schedule_again
from serin.prefect.rest_api import pool_type
from serin.prefect.run_control import find_run
from serin.spec.load import load_spec
from serin.spec.pipeline import PipelineSpec

logger = logging.getLogger(__name__)

_CONTINUES = (
    "stopped watching; the run continues. "
    "`serin runs logs {run} --follow` shows it, `serin runs cancel {run}` cancels it"
)
_LOOK_S = 0.2
_LEFTOVERS_S = 60.0


def run_pipeline(
    home: Path,
    spec: Path | PipelineSpec,
    *,
    placed: bool,
    fresh: Sequence[str],
    serve: bool,
    follow: bool,
    approved_by: str | None = None,
) -> None:
    """Starts a pipeline run; returns when it has completed if it is followed, else when it was accepted.

    Raises PipelineFailed otherwise.
    """
    server = needed_server(home)
    deployment = f"pipeline/{'placed' if placed else 'inline'}"
    plan = load_spec(spec)
    refuse_image(server, plan)
    name = plan.name
    what = name if isinstance(spec, PipelineSpec) else str(spec)
    parameters = {"spec": _parameter(spec), "fresh": list(fresh), "serve": serve, "approved_by": approved_by}
    logger.info(f"{deployment} on {server.ui_url}")
    tags = [name]  # so that a model's runs can be found
    run = begin_run(server.api, deployment, parameters, tags=tags, job_variables=image_variable(plan))
    logger.info(f"{run['name']}: {server.ui_url}/runs/flow-run/{run['id']}")
    if follow:
        with _saying_how_to_cancel(run["name"]):
            follow_run(server, run["id"], what=what, log=RunLog(server.api, run["id"]))


def refuse_image(server: PrefectServer, spec: PipelineSpec) -> None:
    """Raises SpecError for an image where the stages would be no Jobs on Kubernetes."""
    if not image_variable(spec):
        return
    kinds = {pool: pool_type(server.api, pool) for pool in POOLS}
    if others := [f"{pool} ({kind})" for pool, kind in kinds.items() if kind not in (KUBERNETES_TYPE, None)]:
        problem = f"is for pools of type {KUBERNETES_TYPE}; these are others: {', '.join(others)}"
        advice = "use environment.requirements or environment.lock"
        raise SpecError(where=spec.name, problems=[("environment.image", f"{problem}; {advice}")])


@contextmanager
def _saying_how_to_cancel(run: str) -> Iterator[None]:
    """Ctrl-C ends the watching and not the run."""
    try:
        yield
    except KeyboardInterrupt:
        logger.info(_CONTINUES.format(run=run))
        raise


def _parameter(spec: Path | PipelineSpec) -> str | dict[str, Any]:
    """Returns the spec as the flow takes it: its path, or its content."""
    if isinstance(spec, PipelineSpec):
        return spec.model_dump(mode="json", by_alias=True, exclude_unset=True)
    return str(spec)


def resume_run(home: Path, run: str, *, follow: bool) -> None:
    """Resumes a run by name or id: it finds its earlier results and continues at, and inside, the stage that failed.

    Raises RunNotResumable when it has completed or still runs.
    """
    server = needed_server(home)
    found = find_run(server.api, run)
    if found["state_type"] not in ENDED_BADLY:
        raise RunNotResumable(run=found["name"], state=str(found["state_name"]).lower())
    _wait_for_leftovers(home, found["id"])
    log = RunLog(server.api, found["id"])
    log.skip()
    schedule_again(server.api, found["id"], f"resumed by {environment.user()}")
    logger.info(f"resuming {found['name']} on {server.ui_url}")
    if follow:
        with _saying_how_to_cancel(found["name"]):
            follow_run(server, found["id"], what=f"run {found['name']!r}", log=log)


def _wait_for_leftovers(home: Path, run: str) -> None:
    """Waits for leftovers of the run on this machine.

    They would work beside it, and a worker that still handles its end would report a second time that it has crashed.
    """
    deadline = time.monotonic() + _LEFTOVERS_S
    told = False
    while run_processes(home).get(run) is not None and time.monotonic() < deadline:
        if not told:
            logger.info("waiting for the last of its processes to exit")
            told = True
        time.sleep(_LOOK_S)
