"""Starts the training processes, follows them, and turns their outcome into a Checkpoint or an error. Does not import
torch.

Everything of a run is in its folder: training.json, choices.json, progress.jsonl, status.json, receipt.json, logs/,
checkpoints/, result/. A second call with the same settings resumes an interrupted run.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from serin.errors import LossNotFinite, Preempted, TrainingRefused, WorkerFailed
from serin.machine import environment
from serin.machine.durable import write_whole
from serin.machine.hardware import Device, inventory
from serin.spec.model import ModelSpec
from serin.spec.training import TrainingSpec
from serin.store.artifacts import Checkpoint, Dataset
from serin.store.receipt import Measurement, Work, measure
from serin.store.waits import Wait
from serin.training.launch.job import (
    Status,
    TrainingJob,
    gpus_for,
    is_published,
    only_one,
    pruned_run,
    publish_pruned,
    read_job,
    read_status,
    result_folder,
    saved_steps,
    start_folder,
    status_file,
    training_file,
)
from serin.training.launch.machines import Machines, machines_told
from serin.training.launch.processes import HostWork, programs, pruning_program, run_process
from serin.training.launch.script import how_it_ended, last_words, prepare_script, script_status
from serin.training.launch.together.host import train_together
from serin.training.launch.together.meeting import Hosts
from serin.training.launch.tracking import tracked

logger = logging.getLogger(__name__)


def train(
    model: ModelSpec,
    training: TrainingSpec,
    dataset: Dataset,
    *,
    folder: Path,
    devices: tuple[str, ...] = (),
    stop: threading.Event | None = None,
    test: bool = True,
    machines: Machines | None = None,
    hear: Callable[[dict[str, Any]], None] = lambda _: None,
    waits: list[Wait] | None = None,
) -> Checkpoint:
    """Returns trained weights, from scratch or resumed from an earlier call in `folder`.

    `devices` are the leased GPUs, one process each; none means the CPU. Raises Preempted when it was asked to stop and
    has saved, WorkerFailed when a process died: after both, another call resumes. After LossNotFinite and
    TrainingRefused another call would not help. SIGTERM asks it to stop when it runs in the main thread, and `stop`
    does anywhere. Without `test` the test rows are not scored. `hear` gets progress as records; as text it is
    logged. `machines` comes from the environment when it is not given. `waits`: those before, for the receipt.
    """
    folder, machines = folder.absolute(), machines or machines_told()
    folder.mkdir(parents=True, exist_ok=True)
    job = _job(model, training, dataset, devices, folder, test=test)
    work = HostWork(
        job=job, name=folder.name, folder=folder, devices=devices, machines=machines,
        stop=stop or threading.Event(), hear=hear, waits=[] if waits is None else waits,
    )  # fmt: skip
    alone = machines.count == 1  # with several, other launchers use the same folder
    with only_one(folder / "launch.lock", wait_s=0) if alone else nullcontext():
        _begin(job, folder)
        if result_folder(folder).exists():
            logger.info(f"already trained: {result_folder(folder)}")
        else:
            _run_to_the_end(work)
        return _with_pruned(work, dataset)


def _run_to_the_end(work: HostWork) -> None:
    """Trains, with a receipt and, where it is configured, MLflow. Raises what ended it without a result."""
    job, folder, devices = work.job, work.folder, work.devices
    with tracked(job, folder) as tracker:

        def heard(record: dict[str, Any]) -> None:
            work.hear(record)
            if tracker:
                tracker.hear(record)

        with measure("train", _described(devices[: job.gpus])) as measurement:
            measurement.waits = work.waits
            run = _run_together if work.machines.in_store else _run
            watched, alone = (
                replace(work, hear=heard, began=measurement.watch.look_at),
                work.machines.count == 1,
            )
            end = run(watched)
            while alone and end.status and end.status.state == "again" and not end.stop_asked:
                logger.info(end.status.reason)
                end = run(watched)
            _fill(measurement, end.status, job, devices)
        assert measurement.receipt is not None
        measurement.receipt.write(folder / f"receipt{_mark(work.machines)}.json")
        checkpoint = _outcome(folder, end)
        if tracker:
            tracker.end(checkpoint, measurement.receipt)


def _with_pruned(work: HostWork, dataset: Dataset) -> Checkpoint:
    """Returns the finished training, with a pruned network beside it if requested."""
    job, folder = work.job, work.folder
    if job.training.prune is None or is_published(folder):
        return _checkpoint(folder)
    if work.machines.count > 1:
        raise TrainingRefused(folder=folder, reason="training.prune works on one machine only; remove it")
    if not start_folder(folder).exists():
        logger.info(f"pruning: {job.training.prune.share:.0%} of the hidden units are removed")
        log = folder / "logs" / "pruning.log"
        with log.open("wb") as output:
            code, asked = run_process(pruning_program(folder), {}, output, work)
        if asked:
            raise Preempted(step=max(saved_steps(folder), default=0), folder=folder)
        if code:
            raise WorkerFailed(rank=0, code=code, log=log, reason=last_words(log))
    logger.info("training the pruned network")
    smaller = ModelSpec.model_validate(json.loads((start_folder(folder) / "model.json").read_text())["model"])
    train(
        smaller, job.training.fine_tuning(), dataset, folder=pruned_run(folder), devices=work.devices,
        stop=work.stop, test=job.test, machines=work.machines)  # fmt: skip
    publish_pruned(folder)
    return _checkpoint(folder)


def _mark(machines: Machines) -> str:
    """Returns a suffix that separates the files of several machines in one folder."""
    return "" if machines.count == 1 else f"-{socket.gethostname()}-{os.getpid()}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _End:
    """How the processes ended; `status` is what they recorded themselves."""

    status: Status | None
    exit_code: int
    stop_asked: bool
    log: Path


def _job(
    model: ModelSpec,
    training: TrainingSpec,
    dataset: Dataset,
    devices: tuple[str, ...],
    folder: Path,
    *,
    test: bool = True,
) -> TrainingJob:
    each = training.processes_per_gpu
    processes = training.processes if training.processes != "auto" else max(1, len(devices) * each)
    if devices and gpus_for(processes, training) > len(devices):
        how = "one GPU each" if each == 1 else f"{each} on each GPU"
        reason = f"training.processes={processes}, {how}, but {len(devices)} leased: {', '.join(devices)}"
        raise TrainingRefused(folder=folder, reason=reason)
    return TrainingJob(
        model=model,
        training=training,
        dataset=str(Path(dataset.path).absolute()) if dataset.path else "",
        dataset_digest=dataset.digest,
        processes=processes,
        gpu=bool(devices),
        test=test,
    )


def _begin(job: TrainingJob, folder: Path) -> None:
    """Writes training.json; refuses a folder whose training would end with other weights."""
    file = training_file(folder)
    if file.exists():
        try:
            differences = read_job(folder).differences(job)
        except ValueError as error:  # not JSON, or not a training
            raise TrainingRefused(folder=folder, reason=f"its {file.name} cannot be read: {error}") from error
        if differences:
            reason = (
                f"it contains a training with other settings ({'; '.join(differences)}); use another folder"
            )
            raise TrainingRefused(folder=folder, reason=reason)
    write_whole(file, job.model_dump_json(indent=1) + "\n")


def _run(work: HostWork) -> _End:
    """Starts the processes, passes on their progress and waits for them. Leaves none behind on any exit."""
    job, folder = work.job, work.folder
    log = _next_log(folder, _mark(work.machines))
    status_file(folder).unlink(missing_ok=True)
    # Deliberately empty without a lease: GPUs that are not leased must not be visible.
    settings = {"CUDA_VISIBLE_DEVICES": ",".join(work.devices[: job.gpus]), "PYTHONUNBUFFERED": "1"}
    if job.model.kind == "script":
        settings |= prepare_script(job, folder)
    exit_code, asked = 0, False
    with log.open("wb") as output:
        for command in programs(job, folder, work.machines):
            exit_code, asked = run_process(command, settings, output, work)
            if exit_code or asked:
                break
    status = read_status(folder)
    if job.model.kind == "script" and status is None:
        status = script_status(exit_code, log)
    return _End(status=status, exit_code=exit_code, stop_asked=asked, log=log)


def _run_together(work: HostWork) -> _End:
    """The same with other hosts, whom it meets in the store. This host has its own folder in the run's."""
    folder, kind = work.folder, work.job.model.kind
    if kind in ("xgboost", "auto", "script", "onnx"):
        reason = f"hosts that meet in the store do not train model.kind: {kind}; use one machine"
        raise TrainingRefused(folder=folder, reason=reason)
    own = folder / "hosts" / environment.host()
    own.mkdir(parents=True, exist_ok=True)
    with only_one(own / "launch.lock", wait_s=0):
        _begin(work.job, own)
        log = _next_log(own, "")
        most, least = work.machines.count, work.machines.least
        hosts = Hosts(least=least or 1, begin=least or most, most=most)
        status = train_together(replace(work, folder=own), hosts, log)
        if status.state == "done":
            with suppress(OSError):  # another host that uses the same folder was faster
                result_folder(own).rename(result_folder(folder))
    return _End(status=status, exit_code=status.exit_code, stop_asked=work.stop.is_set(), log=log)


def _outcome(folder: Path, end: _End) -> Checkpoint:
    status = end.status
    state = status.state if status else "preempted" if end.stop_asked else "failed"
    by_signal = state == "failed" and end.exit_code in (-signal.SIGTERM, -signal.SIGKILL)
    if end.stop_asked and (by_signal or state == "again"):  # a script need not handle SIGTERM
        state = "preempted"
    if status is None:
        status = Status(state=state, exit_code=end.exit_code, reason=how_it_ended(end.exit_code))
    match state:
        case "done":
            return _checkpoint(folder)
        case "preempted":
            raise Preempted(step=max(saved_steps(folder), default=0) or status.step, folder=folder)
        case "diverged":
            raise LossNotFinite(step=status.step, value=status.loss, folder=folder / "checkpoints")
        case "refused":
            raise TrainingRefused(folder=folder, reason=status.reason)
        case "failed" | "again":
            raise WorkerFailed(rank=status.rank, code=status.exit_code, log=end.log, reason=status.reason)


def _checkpoint(folder: Path) -> Checkpoint:
    result = result_folder(folder)
    state = json.loads((result / "state.json").read_text())
    metrics = json.loads((result / "metrics.json").read_text())["metrics"]
    return Checkpoint(path=str(result), step=state["step"], metrics=metrics)


def _next_log(folder: Path, mark: str) -> Path:
    logs = folder / "logs"
    logs.mkdir(exist_ok=True)
    return logs / f"attempt-{len(list(logs.glob('attempt-*.log'))) + 1:03d}{mark}.log"


def _described(devices: tuple[str, ...]) -> list[Device]:
    known = {device.id: device for device in inventory()} if devices else {}
    return [known.get(device, Device(id=device, name="GPU", memory_bytes=0)) for device in devices]


def _fill(
    measurement: Measurement, status: Status | None, job: TrainingJob, devices: tuple[str, ...]
) -> None:
    if status is not None and status.state == "done":
        measurement.rows, measurement.work_s = status.rows, status.work_s
        measurement.data_wait_share = status.data_wait_share
        for rank, peak in enumerate(status.peak_bytes):
            place = rank // job.training.processes_per_gpu
            if place < len(devices):  # the others are on other machines
                sums = measurement.peak_bytes
                sums[devices[place]] = sums.get(devices[place], 0) + peak
        if status.flops and status.peak_flops_per_s and status.peak_bytes_per_s:
            measurement.work = Work(
                flops=status.flops,
                bytes=status.moved_bytes,
                peak_flops_per_s=status.peak_flops_per_s,
                peak_bytes_per_s=status.peak_bytes_per_s,
            )
