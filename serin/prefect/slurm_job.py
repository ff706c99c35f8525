"""The batch job of a flow run on a Slurm node: `python -m serin.prefect.slurm_job`, started by Slurm.

It runs Prefect's engine as a child and handles what Slurm does with a job:

    SIGUSR1      the time limit is near, or more urgent work waits (where Slurm is set up so): the run is asked to save
                 and the job requeues itself; the next start resumes it
    SIGTERM      the job is cancelled or preempted: the run is asked to save, and Slurm decides the outcome
    a restart    after a requeue or a lost node; a start that Slurm has replaced ends itself (where only slurmd was
                 lost, it still runs)

The run reports no state when it is stopped (SERIN_SCHEDULER); this program and the worker do.

Of a training on several nodes the first one runs the flow. The others (`--join`, started with srun) read the run's
parameters from the Prefect server and join the training at the rendezvous (training/launch/machines.py). The run's
folder is on a file system that all of them see.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from serin.errors import PrefectGone, PrefectRefused, SerinError
from serin.host.standing import log_to_stdout
from serin.machine import environment
from serin.machine.parent_death import die_with_parent
from serin.machine.ports import free_ports
from serin.prefect.follow import FINAL
from serin.prefect.login import callers_api
from serin.prefect.reconcile import schedule_again
from serin.prefect.rest_api import Api, call

log = logging.getLogger("serin.prefect.slurm_job")  # not __name__, which is __main__ here

_ENGINE = "prefect.engine"
_JOIN = "--join"
_POLL_S = 0.2
_LOOK_S = 5.0
_PASS_ON_S = 1.0  # Slurm sends SIGTERM to all processes of a job, or to this one alone
_SAVE_S = 90.0  # a run that is asked to stop may save for this long
_USELESS_S = 60.0  # a run with a final state may take this long to exit
_TRIES_S = (0.0, 1.0, 2.0, 5.0, 10.0, 20.0)
_STOPPED = "its time limit came, or more urgent work"
_MOST_RESTARTS = 100  # of a stage that needs more than the time limit for what it cannot save
_PEERS_S = 60.0  # the other nodes of a training may take this long to exit
_TEMPORARY = 75  # the exit code of what should be run again


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """One start of a job. Slurm counts how often it has restarted it."""

    run: str
    job: int
    restarts: int
    nodes: int
    node: str

    @property
    def mark(self) -> str:
        """The name of this start on the run's page."""
        return f"{self.job}.{self.restarts}"

    def is_replaced_by(self, mark: str | None) -> bool:
        """Returns whether the run belongs to another start. The worker marks a run by the number of the job alone."""
        job, _, restarts = (mark or self.mark).partition(".")
        if not job.isdigit() or int(job) < self.job:  # of an earlier submission
            return False
        return int(job) > self.job or int(restarts or 0) > self.restarts


@dataclass(slots=True)
class _Asked:
    """What Slurm asked for."""

    time_is_up: threading.Event = field(default_factory=threading.Event)
    to_end: threading.Event = field(default_factory=threading.Event)

    def listen(self) -> None:
        for number, event in ((signal.SIGUSR1, self.time_is_up), (signal.SIGTERM, self.to_end)):
            signal.signal(number, lambda *_, event=event: event.set())


def main() -> None:
    log_to_stdout()
    run, url = environment.text("PREFECT__FLOW_RUN_ID"), environment.text("PREFECT_API_URL")
    if run is None or url is None:
        sys.exit("no flow run and no Prefect server: this program is started by Serin's Slurm worker")
    api = callers_api(url)
    if sys.argv[1:] == [_JOIN]:
        try:
            join_training(call(api, "GET", f"/flow_runs/{run}")["parameters"])
        except SerinError as error:
            log.warning("%s", error)
            sys.exit(error.exit_code)
        return
    job, restarts, nodes, node = environment.slurm_place()
    start = Start(run=run, job=job, restarts=restarts, nodes=nodes, node=node)
    asked = _Asked()
    asked.listen()
    sys.exit(execute(api, start, asked))


def execute(api: Api, start: Start, asked: _Asked) -> int:
    """Runs the flow run to its end or to a requested stop; returns the exit code of the job."""
    if not _take(api, start):
        return 0
    with together(start.nodes) as settings, Peers(start.nodes, settings) as peers:
        engine = subprocess.Popen(
            [sys.executable, "-m", _ENGINE],
            env=environment.child_environment(**settings),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=partial(die_with_parent, os.getpid()),  # noqa: PLW1509 (no thread runs here)
        )
        try:
            code = _watch(api, start, asked, engine, peers)
        finally:
            _end(engine)
    if asked.time_is_up.is_set() and not asked.to_end.is_set():
        return _requeue(api, start)
    return code if code >= 0 else 128 - code


def _take(api: Api, start: Start) -> bool:
    """Marks the run as this start's; False when it needs no work any more, or another start has it."""
    found = _patiently(api, start)
    state = found["state_type"]
    if state in FINAL or state == "CANCELLING":
        log.info("nothing to do: the run is %s", str(found["state_name"]).lower())
        return False
    if start.is_replaced_by(found["infrastructure_pid"]):
        log.info("nothing to do: the run belongs to job %s", found["infrastructure_pid"])
        return False
    _patiently(api, start, {"infrastructure_pid": start.mark})
    again = f", restart {start.restarts}" if start.restarts else ""
    log.info("job %d on %s%s", start.job, start.node, again)
    return True


def _patiently(api: Api, start: Start, change: dict[str, str] | None = None) -> dict[str, str]:
    """Reads the run, or changes it. Exits when the server does not answer for long."""
    for pause_s in _TRIES_S:
        time.sleep(pause_s)
        try:
            found = call(api, "GET" if change is None else "PATCH", f"/flow_runs/{start.run}", change)
            return dict(found or {})
        except PrefectGone as error:
            log.warning("%s", error)
    sys.exit(_TEMPORARY)


def _watch(api: Api, start: Start, asked: _Asked, engine: subprocess.Popen[bytes], peers: Peers) -> int:
    """Waits for the engine and passes on requests to stop. Ends it when its work is of no use any more."""
    look_at = time.monotonic() + _LOOK_S
    stop_at = useless_at = None
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return engine.wait(_POLL_S)
        now = time.monotonic()
        if stop_at is None and (asked.time_is_up.is_set() or asked.to_end.is_set()):
            stop_at = now + _SAVE_S
            if asked.to_end.is_set():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return engine.wait(_PASS_ON_S)
            if not asked.to_end.is_set() or _catches(engine.pid, signal.SIGTERM):
                log.info("asking the run to save and stop")
                engine.terminate()
            peers.ask_to_stop()
        if now >= look_at:
            look_at = now + _LOOK_S
            state = _state(api, start)
            if state == "replaced":
                log.info("Slurm has started this job elsewhere: ending this start")
                _end(engine)
            useless_at = (useless_at or now + _USELESS_S) if state in FINAL else None
        if any(limit is not None and now > limit for limit in (stop_at, useless_at)):
            _end(engine)


def _state(api: Api, start: Start) -> str:
    """Returns the type of the run's state; `replaced` when another start has the run; nothing without an answer."""
    try:
        found = call(api, "GET", f"/flow_runs/{start.run}")
    except (PrefectGone, PrefectRefused):
        return ""
    return "replaced" if start.is_replaced_by(found["infrastructure_pid"]) else str(found["state_type"])


def _requeue(api: Api, start: Start) -> int:
    """Puts this job back into Slurm's queue; where the cluster does not allow that, the worker submits another."""
    try:
        found = call(api, "GET", f"/flow_runs/{start.run}")
        if found["state_type"] in FINAL or found["state_type"] == "CANCELLING":
            return 0
        why = f"{_STOPPED}; job {start.job} waits in Slurm's queue again"
        state = {"type": "PENDING", "name": "Pending", "message": why}
        call(api, "POST", f"/flow_runs/{start.run}/set_state", {"state": state, "force": True})
    except (PrefectGone, PrefectRefused) as error:
        log.warning("%s", error)
    if start.restarts >= _MOST_RESTARTS:
        log.warning("not requeued: this job was started %d times before", start.restarts)
        return _TEMPORARY
    log.info("requeueing job %d", start.job)
    done = subprocess.run(
        ["scontrol", "requeue", str(start.job)], capture_output=True, text=True, timeout=_SAVE_S
    )
    if done.returncode:
        log.warning("not requeued: %s; another job is requested", done.stderr.strip())
        schedule_again(api, start.run, f"{_STOPPED}, and Slurm said: {done.stderr.strip()}")
    return _TEMPORARY


def _catches(pid: int, number: int) -> bool:
    """Returns whether a process has a handler for a signal. Prefect's is gone once it has been used: a second SIGTERM
    would kill a run that saves."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def _end(engine: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(engine.pid, signal.SIGKILL)
    engine.wait()


@contextlib.contextmanager
def together(nodes: int) -> Iterator[dict[str, str | None]]:
    """Yields the settings of a training on so many nodes: this one is where they meet."""
    if nodes == 1:
        yield {}
        return
    (port,) = free_ports(1)
    yield {"SERIN_MACHINES": str(nodes), "SERIN_RENDEZVOUS": f"{socket.gethostname()}:{port}"}


class Peers:
    """The job step on the other nodes; nothing when there is one node."""

    def __init__(self, nodes: int, settings: Mapping[str, str | None]) -> None:
        self._others, self._settings = nodes - 1, settings
        self._step: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Peers:
        if self._others:
            self._step = subprocess.Popen(
                [
                    "srun", "--relative=1", f"--nodes={self._others}", f"--ntasks={self._others}",
                    "--ntasks-per-node=1", sys.executable, "-m", "serin.prefect.slurm_job", _JOIN,
                ],
                env=environment.child_environment(**self._settings),
                stdin=subprocess.DEVNULL,
            )  # fmt: skip
        return self

    def ask_to_stop(self) -> None:
        """srun passes the signal on to the nodes; the ranks agree at which step they save."""
        if self._step is not None:
            self._step.terminate()

    def __exit__(self, *_: object) -> None:
        if self._step is not None:
            self._step.terminate()
            try:
                self._step.wait(_PEERS_S)
            except subprocess.TimeoutExpired:
                self._step.kill()
                self._step.wait()


def join_training(parameters: Mapping[str, Any]) -> None:
    """Trains what the flow `train` with these parameters trains, together with the node that runs the flow."""
    from serin.pipeline.open_spec import opened_spec
    from serin.pipeline.train import train_model
    from serin.store.artifacts import Dataset
    from serin.training.launch.machines import machines_told

    with opened_spec(parameters["spec"]) as plan:
        train_model(
            plan.model,
            plan.training,
            Dataset(**parameters["dataset"]),
            name=plan.name,
            machines=machines_told(),
            priority=plan.priority,
            fresh=bool(parameters.get("fresh")),
            attempt=parameters.get("attempt"),
        )


if __name__ == "__main__":
    main()
