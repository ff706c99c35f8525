"""Chooses a stage's pool when only other hosts have GPUs, by what their workers report to the store."""

from __future__ import annotations

from contextlib import suppress

from serin.errors import DataError, StoreError
from serin.formats.cluster.host_report import PREFIX, WorkerReport
from serin.pipeline.needs import Needs, data_bytes
from serin.spec.etl import gpus_wanted
from serin.spec.pipeline import PipelineSpec
from serin.store.stage_results import shared_objects

_GPU = "placed-gpu"


def etl_deployment(spec: PipelineSpec, needs: Needs) -> str:
    """The deployment of the ETL: on a host with GPUs for much data, wherever that is."""
    there = 0 if needs.gpus else gpus_elsewhere()
    with suppress(DataError, OSError):  # tables that only other hosts see
        if there and gpus_wanted(spec.etl.engine, data_bytes=data_bytes(spec.data), usable=there):
            return _GPU
    return needs.deployment


def export_deployment(spec: PipelineSpec, needs: Needs) -> str:
    """The deployment of the export: on a host with GPUs for what is built or measured on one."""
    engines = {"tensorrt", "tensorrt_rtx"} & set(spec.export.variants)
    on_gpu = spec.has_data and (spec.export.target != "cpu" or bool(engines))
    return _GPU if not needs.gpus and on_gpu and gpus_elsewhere() else needs.deployment


def gpus_elsewhere() -> int:
    """The most GPUs that one host of the pool gpu reports; 0 without a store that hosts share."""
    shared, most = shared_objects(), 0
    with suppress(StoreError):
        for key in [] if shared is None else shared.keys(PREFIX):
            found = shared.read(key) if shared is not None and key.endswith("/worker-gpu.json") else None
            with suppress(ValueError, TypeError, KeyError):  # of another version
                most = max(most, len(WorkerReport.load(found.content).gpus) if found else 0)
    return most
