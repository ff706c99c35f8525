"""Sends a training's metrics to MLflow too, when MLFLOW_TRACKING_URI is set. The worker does not know about it.

progress.jsonl has all of them in any case: an MLflow that does not answer is reported once, and the training continues.
A separate thread sends the metrics, so that a slow server delays nothing. A resumed training continues its MLflow run.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from serin.errors import TrainingRefused
from serin.machine import environment
from serin.machine.durable import write_whole
from serin.machine.mlflow_client import Client, first_line, mlflow_uri, open_client
from serin.store.artifacts import Checkpoint
from serin.store.receipt import Receipt
from serin.training.launch.job import TrainingJob, only_one

logger = logging.getLogger(__name__)

_ENDS_IN_S = 30.0  # the rest is not sent then
_LONGEST_VALUE = 6000  # characters of a parameter that MLflow takes
Call = Callable[[Client], None]


@contextmanager
def tracked(job: TrainingJob, folder: Path) -> Iterator[Tracker | None]:
    """Yields a tracker for the block; None where no MLflow is configured. If the block fails, the MLflow run is marked
    as failed."""
    uri = mlflow_uri()
    if uri is None:
        yield None
        return
    with ExitStack() as held:
        try:
            held.enter_context(only_one(folder / "mlflow.lock", wait_s=0))
        except TrainingRefused:  # another machine's launcher reports everything
            yield None
            return
        tracker = Tracker(uri, job, folder)
        try:
            yield tracker
        except BaseException:
            tracker.close("FAILED")
            raise
        tracker.close("FINISHED")


class Tracker:
    """Takes records and results as they come."""

    def __init__(self, uri: str, job: TrainingJob, folder: Path) -> None:
        self._uri, self._job, self._folder = uri, job, folder
        self._run = ""
        self._calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._send, name="mlflow", daemon=True)
        self._calls.put(self._begin)
        self._thread.start()

    def hear(self, record: Mapping[str, Any]) -> None:
        match record["event"]:
            case "epoch":
                self._put(record["metrics"], record["step"], record["t"])
            case "step":
                found = {"step_loss": record["loss"], "rows_per_s": record["rows_per_s"]}
                self._put(found, record["step"], record["t"])

    def end(self, checkpoint: Checkpoint, receipt: Receipt | None) -> None:
        found = dict(checkpoint.metrics)
        if receipt is not None:
            known = {
                "seconds": receipt.seconds,
                "mfu": receipt.mfu,
                "joules": receipt.joules,
                "cost": receipt.cost,
            }
            found |= {f"receipt.{name}": value for name, value in known.items() if value is not None}
        self._put({f"best.{name}": value for name, value in found.items()}, checkpoint.step, None)

    def close(self, state: str) -> None:
        self._calls.put(lambda client: client.set_terminated(self._run, state))
        self._calls.put(None)
        self._thread.join(_ENDS_IN_S)

    def _put(self, metrics: Mapping[str, float], step: int, when: float | None) -> None:
        moment = None if when is None else int(when * 1000)

        def call(client: Client) -> None:
            for name, value in metrics.items():
                client.log_metric(self._run, name, float(value), timestamp=moment, step=step)

        self._calls.put(call)

    def _send(self) -> None:
        from mlflow.exceptions import MlflowException  # here, because it takes seconds to import

        client = None
        while (call := self._calls.get()) is not None:
            try:
                client = client or open_client(self._uri)
                call(client)
            except (MlflowException, OSError) as error:  # requests' errors are OSErrors
                text = f"MLflow did not accept the metrics: {first_line(error)}"
                logger.warning(f"{text}; they are in {self._folder}/progress.jsonl")
                return

    def _begin(self, client: Client) -> None:
        """Returns the training's MLflow run, created once; its id is stored in the training's folder."""
        file = self._folder / "mlflow.json"
        if file.exists():
            self._run = json.loads(file.read_text())["run"]
            client.update_run(self._run, "RUNNING")
            return
        name = environment.mlflow_experiment()
        experiment = client.get_experiment_by_name(name)
        known = experiment.experiment_id if experiment else client.create_experiment(name)
        run = client.create_run(
            known, run_name=self._folder.name, tags={"serin.dataset": self._job.dataset_digest}
        )
        self._run = run.info.run_id
        write_whole(file, json.dumps({"format": "serin.mlflow", "version": 1, "run": self._run}) + "\n")
        for section in ("model", "training"):
            for key, value in getattr(self._job, section).model_dump(mode="json").items():
                client.log_param(self._run, f"{section}.{key}", json.dumps(value)[:_LONGEST_VALUE])
