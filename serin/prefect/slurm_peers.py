"""The other nodes of a training: `srun python -m serin.prefect.slurm_peers` on each but the first.

The first node runs the flow. The others read the run's parameters from the Prefect server and join the training at the
rendezvous (training/launch/machines.py). The run's folder is on a file system that all of them see.
"""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from serin.errors import SerinError
from serin.host.standing import log_to_stdout
from serin.machine import environment
from serin.machine.ports import free_ports
from serin.prefect.login import callers_api
from serin.prefect.rest_api import call

log = logging.getLogger("serin.prefect.slurm_peers")  # not __name__, which is __main__ here

_END_S = 60.0


@contextmanager
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
                    "--ntasks-per-node=1", sys.executable, "-m", "serin.prefect.slurm_peers",
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
                self._step.wait(_END_S)
            except subprocess.TimeoutExpired:
                self._step.kill()
                self._step.wait()


def main() -> None:
    log_to_stdout()
    run, url = environment.flow_run_id(), environment.prefect_api_url()
    if run is None or url is None:
        sys.exit("no flow run and no Prefect server: this program is started by Serin's Slurm job")
    try:
        join_training(call(callers_api(url), "GET", f"/flow_runs/{run}")["parameters"])
    except SerinError as error:
        log.warning("%s", error)
        sys.exit(error.exit_code)


def join_training(parameters: Mapping[str, Any]) -> None:
    """Trains what the flow `train` with these parameters trains, together with the node that runs the flow."""
    from serin.pipeline.train import train_model
    from serin.spec.load import load_spec
    from serin.store.artifacts import Dataset
    from serin.training.launch.machines import machines_told

    given = parameters["spec"]
    plan = load_spec(given if isinstance(given, dict) else Path(given))
    train_model(
        plan.model,
        plan.training,
        Dataset(**parameters["dataset"]),
        name=plan.name,
        machines=machines_told(),
        fresh=bool(parameters.get("fresh")),
        attempt=parameters.get("attempt"),
    )


if __name__ == "__main__":
    main()
