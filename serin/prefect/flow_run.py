"""Runs a pipeline on the workers of the stack, or of the Prefect server that PREFECT_API_URL names."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from serin.errors import RunNotResumable, SpecError
from serin.host.process_scan import run_processes
from serin.host.state import POOLS
from serin.machine import environment
from serin.pipeline.needs import image_variable, run_variables
from serin.pipeline.open_spec import package_spec
from serin.pipeline.pack import Package, pack_spec
from serin.prefect.follow import ENDED_BADLY, RunLog, begin_run, follow_run
from serin.prefect.login import PrefectServer, needed_server
from serin.prefect.processes import KUBERNETES_TYPE
from serin.prefect.reconcile import schedule_again
from serin.prefect.rest_api import pool_type
from serin.prefect.run_control import find_run
from serin.spec.environment import EnvironmentSpec
from serin.spec.load import WrittenSpec, environment_of, priority_of

logger = logging.getLogger(__name__)

_CONTINUES = (
    "stopped watching; the run continues. "
    "`serin runs logs {run} --follow` shows it, `serin runs cancel {run}` cancels it"
)
_LOOK_S = 0.2
_LEFTOVERS_S = 60.0


def run_pipeline(
    home: Path,
    spec: str | WrittenSpec,
    *,
    placed: bool,
    fresh: Sequence[str],
    serve: bool,
    follow: bool,
    approved_by: str | None = None,
) -> str:
    """Sends a spec to the store, with what it needs, and starts a pipeline run. `spec` may also be the reference of a
    package that was sent before.

    Returns the reference when the run has completed if it is followed, else when it was accepted. Raises PipelineFailed
    otherwise.
    """
    server = needed_server(home)
    deployment = f"pipeline/{'placed' if placed else 'inline'}"
    if isinstance(spec, str):
        reference, written = spec, package_spec(spec)
        name, asked, priority = str(written["name"]), environment_of(written), priority_of(written)
        refuse_image(server, asked, where=spec)
    else:
        name, asked, priority = spec.spec.name, spec.spec.environment, spec.spec.priority
        refuse_image(server, asked, where=spec.where)
        package = pack_for(server, spec)
        package.send()
        reference = package.reference
    parameters = {"spec": reference, "fresh": list(fresh), "serve": serve, "approved_by": approved_by}
    logger.info(f"{deployment} on {server.ui_url}")
    tags = [name]  # so that a model's runs can be found
    variables = run_variables(asked, priority, placed=placed)
    run = begin_run(server.api, deployment, parameters, tags=tags, job_variables=variables)
    logger.info(f"{run['name']}: {server.ui_url}/runs/flow-run/{run['id']}")
    if follow:
        with _saying_how_to_cancel(run["name"]):
            what = spec if isinstance(spec, str) else spec.where
            follow_run(server, run["id"], what=what, log=RunLog(server.api, run["id"]))
    return reference


def pack_for(server: PrefectServer | None, spec: WrittenSpec) -> Package:
    """Packs a spec for the workers of a server; None: for those of this machine. SpecError where they cannot read the
    store that it would be sent to."""
    if server is not None and server.stack is None and environment.shared_store_url() is None:
        problem = (
            f"is not set, and the workers of {server.ui_url} cannot read the store in {environment.home()}; set it to "
            "their store, such as s3://BUCKET/PREFIX"
        )
        raise SpecError(where=spec.where, problems=[("SERIN_STORE", problem)])
    return pack_spec(spec, elsewhere=server is not None and not server.is_own)


def refuse_image(server: PrefectServer, asked: EnvironmentSpec | None, *, where: str) -> None:
    """Raises SpecError for an image where the stages would be no Jobs on Kubernetes."""
    if not image_variable(asked):
        return
    kinds = {pool: pool_type(server.api, pool) for pool in POOLS}
    if others := [f"{pool} ({kind})" for pool, kind in kinds.items() if kind not in (KUBERNETES_TYPE, None)]:
        problem = f"is for pools of type {KUBERNETES_TYPE}; these are others: {', '.join(others)}"
        advice = "use environment.requirements or environment.lock"
        raise SpecError(where=where, problems=[("environment.image", f"{problem}; {advice}")])


@contextmanager
def _saying_how_to_cancel(run: str) -> Iterator[None]:
    """Ctrl-C ends the watching and not the run."""
    try:
        yield
    except KeyboardInterrupt:
        logger.info(_CONTINUES.format(run=run))
        raise


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
    schedule_again(server.api, found["id"], f"resumed by {environment.actor()}")
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
