"""Computes what a stage needs from the spec and the size of its data: GPUs, memory, exclusive or shared."""

from __future__ import annotations

import importlib.util
from contextlib import suppress
from dataclasses import dataclass

from serin.errors import DataError, StoreError
from serin.formats.cluster.host_report import PREFIX, WorkerReport, read_report
from serin.machine.hardware import inventory
from serin.spec.data import DataSpec
from serin.spec.environment import EnvironmentSpec
from serin.spec.etl import EtlSpec, gpus_wanted
from serin.spec.model import ModelSpec
from serin.spec.names import Priority
from serin.spec.pipeline import PipelineSpec
from serin.spec.training import TrainingSpec
from serin.store.stage_results import shared_objects
from serin.training.launch.run_dir import devices_wanted

_GROWS = 16  # a table takes this many times its size on disk on a GPU, to be worked on at once
_LEAST_BYTES = 1_000_000_000
_EXPORT_BYTES = 2_000_000_000  # a network, its variants and their workspaces
_GPU = "placed-gpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    gpus: int
    why: str
    memory_bytes: int = 0  # on each; of a shared lease
    shared: bool = False

    def __str__(self) -> str:
        if not self.gpus:
            return f"no GPU ({self.why})"
        how = f"shared, {self.memory_bytes / 1e9:.1f} GB on each" if self.shared else "alone"
        return f"{self.gpus} GPU{'s' if self.gpus > 1 else ''}, {how} ({self.why})"

    @property
    def deployment(self) -> str:
        """Returns the stage's deployment in the suitable pool."""
        return "placed-gpu" if self.gpus else "placed"


def etl_needs(data: DataSpec, etl: EtlSpec) -> Needs:
    """A GPU for much data, where cupy could use one and the spec allows it. Shared: it does not train."""
    devices = inventory() if importlib.util.find_spec("cupy") is not None else ()
    if not devices or not data.tables:
        return Needs(gpus=0, why="there is no usable GPU here")
    size = data_bytes(data)
    count = gpus_wanted(etl.engine, data_bytes=size, usable=len(devices))
    why = f"{size / 1e6:,.0f} MB of data" if etl.engine == "auto" else f"etl.engine: {etl.engine}"
    if not count:
        return Needs(gpus=0, why=why)
    most = max(device.memory_bytes for device in devices) // 2
    return Needs(
        gpus=count, shared=True, memory_bytes=min(max(_GROWS * size // count, _LEAST_BYTES), most), why=why
    )


def train_needs(model: ModelSpec, training: TrainingSpec) -> Needs:
    """Returns whole GPUs. The only deployment is in the pool gpu, which queues trainings even without a GPU."""
    count = devices_wanted(model, training)
    if not count:
        return Needs(gpus=0, why="there is no GPU here" if not inventory() else f"model.kind: {model.kind}")
    return Needs(gpus=count, why=f"model.kind: {model.kind}, training.processes: {training.processes}")


def export_needs(spec: PipelineSpec) -> Needs:
    """A GPU for what is built or measured on one: a model whose target is a GPU, and TensorRT. Shared."""
    devices = inventory()
    if not devices or not spec.has_data:
        return Needs(gpus=0, why="there is no GPU here" if not devices else "a model with its own inputs")
    from serin.scoring.session import has_device  # ONNX Runtime: only where there is a GPU

    if spec.export.target != "cpu" and has_device("cuda"):
        why = f"export.target: {spec.export.target}"
    elif "tensorrt" in spec.export.variants and has_device("tensorrt"):
        why = "the variant tensorrt"
    else:
        return Needs(gpus=0, why="nothing is measured on a GPU")
    most = max(device.memory_bytes for device in devices)
    return Needs(gpus=1, shared=True, memory_bytes=min(_EXPORT_BYTES, most // 2), why=why)


def job_variables(stage: str, spec: PipelineSpec) -> dict[str, float | str]:
    """Returns what a stage asks of a cluster, as variables of its work pool; a pool that does not know them ignores
    them. The cluster's machines are not visible here, so these are facts of the spec and of its data."""
    return {
        **image_variable(spec.environment),
        **_priority_variables(spec.priority),
        **_size_variables(stage, spec),
    }


def run_variables(asked: EnvironmentSpec | None, priority: Priority, *, placed: bool) -> dict[str, str]:
    """Returns what a whole run asks of its work pool. The small parent of placed stages holds nothing that others wait
    for: it does not give way."""
    own: Priority = "normal" if placed and priority == "idle" else priority
    return {**image_variable(asked), **_priority_variables(own)}


def image_variable(asked: EnvironmentSpec | None) -> dict[str, str]:
    """The image of a run's Jobs, where the spec names one. A worker without images ignores it; its stages refuse it."""
    image = None if asked is None else asked.image
    return {} if image is None else {"image": image}


def _priority_variables(priority: Priority) -> dict[str, str]:
    """Slurm's quality of service and Kubernetes' priority class: their own queues decide who goes first."""
    name = f"serin-{priority}"
    return {} if priority == "normal" else {"qos": name, "priority_class": name}


def _size_variables(stage: str, spec: PipelineSpec) -> dict[str, float]:
    if stage == "train" and isinstance(spec.training.processes, int):
        return {"processes": spec.training.processes}
    if stage == "etl":
        with suppress(DataError, OSError):  # tables that only the cluster's machines see
            return {"data_gb": round(data_bytes(spec.data) / 1e9, 3)}
    return {}


def data_bytes(data: DataSpec) -> int:
    """The size of all tables' files."""
    from serin.etl.sources.find import find_table

    return sum(file.size for name, table in data.tables.items() for file in find_table(name, table))


def etl_deployment(spec: PipelineSpec, needs: Needs) -> str:
    """The deployment of the ETL: on a host with GPUs for much data, wherever that is."""
    there = 0 if needs.gpus else gpus_elsewhere()
    with suppress(DataError, OSError):  # tables that only other hosts see
        if there and gpus_wanted(spec.etl.engine, data_bytes=data_bytes(spec.data), usable=there):
            return _GPU
    return needs.deployment


def export_deployment(spec: PipelineSpec, needs: Needs) -> str:
    """The deployment of the export: on a host with GPUs for what is built or measured on one."""
    on_gpu = spec.has_data and (spec.export.target != "cpu" or "tensorrt" in spec.export.variants)
    return _GPU if not needs.gpus and on_gpu and gpus_elsewhere() else needs.deployment


def gpus_elsewhere() -> int:
    """The most GPUs that one host of the pool gpu reports; 0 without a store that hosts share."""
    shared, most = shared_objects(), 0
    with suppress(StoreError):
        for key in [] if shared is None else shared.keys(PREFIX):
            if shared is not None and key.endswith("/worker-gpu.json"):
                report = read_report(WorkerReport, shared, key)
                most = max(most, len(report.gpus) if report else 0)
    return most
