"""Runs a pipeline on the stack's workers."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serin.errors import NotUp, PipelineFailed, RunNotResumable
from serin.machine import environment
from serin.machine.application import application_folder
from serin.spec.load import load_spec
from serin.spec.pipeline import PipelineSpec
from serin.stack.host.process_scan import STACK_MARK
from serin.stack.host.run_processes import run_processes
from serin.stack.host.state import Stack, read_stack, running_stack
from serin.stack.prefect.follow import ENDED_BADLY, RunLog, begin_run, follow_run
from serin.stack.prefect.login import stack_api
from serin.stack.prefect.processes import prefect_environment
from serin.stack.prefect.reconcile import schedule_again
from serin.stack.prefect.run_control import find_run

logger = logging.getLogger(__name__)

_CONTINUES = (
    "stopped watching; the run continues. "
    "`serin runs logs {run} --follow` shows it, `serin runs cancel {run}` cancels it"
)
_LOOK_S = 0.2
_LEFTOVERS_S = 60.0
_LOG = re.compile(r"▪\s+[\d:.]+\s+\S+ (?P<text>.*)")
_EVENT = re.compile(r"●\s+[\d:.]+\s+\S+ prefect\.(?:task|flow)-run\.(?P<state>[A-Z]\w+) \* (?P<name>.*)")


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
    stack, server = _find_server(home)
    deployment = f"pipeline/{'placed' if placed else 'inline'}"
    name = load_spec(spec).name
    what = name if isinstance(spec, PipelineSpec) else str(spec)
    parameters = {"spec": _parameter(spec), "fresh": list(fresh), "serve": serve, "approved_by": approved_by}
    logger.info(f"{deployment} on {server.ui_url}")
    tags = [name]  # so that a model's runs can be found
    if stack is None or not stack.owns_prefect:
        _run_by_prefect(server, deployment, parameters, tags, what=what, follow=follow)
        return
    run = begin_run(stack_api(stack), deployment, parameters, tags=tags)
    logger.info(f"{run['name']}: {stack.prefect_ui_url}/runs/flow-run/{run['id']}")
    if follow:
        with _saying_how_to_cancel(run["name"]):
            follow_run(stack, run["id"], what=what, log=RunLog(stack_api(stack), run["id"]))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Server:
    """A Prefect server that is not the stack's own. `is_alive`: whether what must be up on this host is up."""

    home: Path
    api_url: str
    ui_url: str
    is_alive: Callable[[], bool]


def _find_server(home: Path) -> tuple[Stack | None, _Server]:
    """The stack in `home` and its server; without a stack the server that PREFECT_API_URL names, whose workers are on
    other hosts. NotUp when there is neither."""
    url, stack = environment.prefect_api_url(), read_stack(home)
    if url is not None and (stack is None or not stack.is_alive):
        ui_url = url.rstrip("/").removesuffix("/api")
        return None, _Server(home=home, api_url=url, ui_url=ui_url, is_alive=lambda: True)
    found = running_stack(home)
    return found, _Server(
        home=home,
        api_url=found.prefect_api_url,
        ui_url=found.prefect_ui_url,
        is_alive=lambda: found.is_alive,
    )


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


def _run_by_prefect(
    server: _Server, deployment: str, parameters: dict[str, Any], tags: list[str], *, what: str, follow: bool
) -> None:
    """Starts the run with Prefect's own command, which supports every kind of foreign server: profiles, keys,
    logins."""
    command = [sys.executable, "-m", "prefect", "--no-prompt", "deployment", "run", deployment]
    for name, value in parameters.items():
        command += ["--param", f"{name}={json.dumps(value)}"]
    for tag in tags:
        command += ["--tag", tag]
    if follow:
        command.append("--watch")
    _follow(server, command, what=what)


def resume_run(home: Path, run: str, *, follow: bool) -> None:
    """Resumes a run by name or id: it finds its earlier results and continues at, and inside, the stage that failed.

    Raises RunNotResumable when it has completed or still runs.
    """
    stack = running_stack(home)
    found = find_run(stack, run)
    if found["state_type"] not in ENDED_BADLY:
        raise RunNotResumable(run=found["name"], state=str(found["state_name"]).lower())
    _wait_for_leftovers(stack, found["id"])
    log = RunLog(stack_api(stack), found["id"])
    log.skip()
    schedule_again(stack_api(stack), found["id"], f"resumed by {environment.user()}")
    logger.info(f"resuming {found['name']} on {stack.prefect_ui_url}")
    if follow:
        with _saying_how_to_cancel(found["name"]):
            follow_run(stack, found["id"], what=f"run {found['name']!r}", log=log)


def _wait_for_leftovers(stack: Stack, run: str) -> None:
    """Waits for leftovers of the run on this machine.

    They would work beside it, and a worker that still handles its end would report a second time that it has crashed.
    """
    deadline = time.monotonic() + _LEFTOVERS_S
    told = False
    while run_processes(stack.home).get(run) is not None and time.monotonic() < deadline:
        if not told:
            logger.info("waiting for the last of its processes to exit")
            told = True
        time.sleep(_LOOK_S)


def _follow(server: _Server, command: list[str], *, what: str) -> None:
    """Runs Prefect's command and passes on its output; raises PipelineFailed when it did not succeed."""
    settings = prefect_environment(server.home, server.api_url, own=False)
    settings.pop(STACK_MARK, None)  # this process ends it, not the stack
    settings["COLUMNS"] = "1000"  # its lines are parsed here; a folded one cannot be
    watching = subprocess.Popen(
        command,
        env=settings,
        cwd=application_folder(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    )
    try:
        with watching, _ending_with(server, watching):
            assert watching.stdout is not None
            for line in watching.stdout:
                shown = translate(line.rstrip())
                if shown:
                    logger.info(shown)
    except KeyboardInterrupt:
        logger.info(_CONTINUES.format(run="RUN"))
        raise
    if not server.is_alive():
        raise NotUp(home=server.home)
    if watching.returncode != 0:
        raise PipelineFailed(spec=what, url=server.ui_url)


@contextmanager
def _ending_with(server: _Server, watching: subprocess.Popen[str]) -> Iterator[None]:
    """Ends the watcher when the stack is gone: Prefect's would wait for its server forever."""
    done = threading.Event()

    def guard() -> None:
        while not done.wait(1.0):
            if not server.is_alive():
                watching.terminate()

    thread = threading.Thread(target=guard, name="stack-guard", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()


def translate(line: str) -> str | None:
    """Translates a line of `prefect deployment run --watch`: logs and state changes. None: not for people.

    A line of another form is passed on unchanged, because Prefect may change its format.
    """
    if log := _LOG.fullmatch(line):
        return log["text"]
    if line.startswith("└── "):
        return line.removeprefix("└── ") if "URL" in line else None
    if not line.startswith("●"):
        return line
    event = _EVENT.fullmatch(line)
    return f"{event['name']}: {event['state'].lower()}" if event else None
