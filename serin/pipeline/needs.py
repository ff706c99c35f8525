"""What a stage needs, from the spec and the size of its data: how many GPUs, with how much memory, alone or shared."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from serin.machine.hardware import inventory
from serin.machine.leases import Lease, lease
from serin.spec.data import DataSpec
from serin.spec.etl import EtlSpec
from serin.spec.export import ExportSpec
from serin.spec.model import ModelSpec
from serin.spec.training import TrainingSpec
from serin.training.launch.run_dir import devices_wanted

_GPU_BYTES = 64_000_000  # of Parquet; what is smaller is done before a GPU has begun
_GROWS = 4  # times its size on disk, a table takes on a GPU while it is worked on
_EXPORT_BYTES = 2_000_000_000  # a network, its variants and their workspaces


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
        """Of the stage's two, which stands in the pool that suits."""
        return "placed-gpu" if self.gpus else "placed"


def etl_needs(data: DataSpec, etl: EtlSpec) -> Needs:
    """A GPU for much data, where cupy could use one and the spec allows it. Shared: it does not train."""
    engine, devices = etl.engine, inventory()
    usable = len(devices) if importlib.util.find_spec("cupy") is not None else 0
    if not usable or engine in ("process", "dask") or "://" in engine or not data.tables:
        return Needs(
            gpus=0, why="no GPU is here that it could use" if not usable else f"etl.engine: {engine}"
        )
    size = _data_bytes(data)
    if engine == "auto" and size < _GPU_BYTES:
        return Needs(gpus=0, why=f"{size / 1e6:,.0f} MB of data")
    count = usable if engine in ("auto", "dask-cuda") else 1
    most = max(device.memory_bytes for device in devices) // 2
    each = min(_GROWS * size // count, most)
    return Needs(gpus=count, shared=True, memory_bytes=each, why=f"{size / 1e6:,.0f} MB of data")


def train_needs(model: ModelSpec, training: TrainingSpec) -> Needs:
    """Whole GPUs. Its one deployment stands in the pool gpu, which queues trainings also where there is none."""
    count = devices_wanted(model, training)
    if not count:
        return Needs(gpus=0, why="none is here" if not inventory() else f"model.kind: {model.kind}")
    return Needs(gpus=count, why=f"model.kind: {model.kind}, training.processes: {training.processes}")


def export_needs(export: ExportSpec) -> Needs:
    """A GPU only for a variant that is built and timed on one."""
    devices = inventory()
    if not devices or "tensorrt" not in export.variants:
        return Needs(gpus=0, why="no variant that is built on a GPU")
    most = max(device.memory_bytes for device in devices)
    return Needs(gpus=1, shared=True, memory_bytes=min(_EXPORT_BYTES, most // 2), why="the variant tensorrt")


def leased(
    needs: Needs, *, home: Path, purpose: str, stop: threading.Event, say: Callable[[str], None]
) -> AbstractContextManager[Lease]:
    """What a stage needs, held for the block."""
    return lease(
        needs.gpus, home=home, purpose=purpose, shared=needs.shared, memory_bytes=needs.memory_bytes,
        stop=stop, say=say,
    )  # fmt: skip


def _data_bytes(data: DataSpec) -> int:
    from serin.etl.sources.files import find_files

    return sum(file.size for name, url in data.tables.items() for file in find_files(name, url))
