"""The section `etl`: how the dataset is computed."""

from __future__ import annotations

from typing import Literal

from pydantic import field_validator

from serin.spec.section import Section


class EtlSpec(Section):
    """How the dataset is computed. These settings never change the result."""

    engine: str = "auto"
    """What computes the dataset: `process` (one process), `dask` (a local cluster of processes), `cuda` (one GPU),
    `dask-cuda` (several GPUs) or the address of a Dask scheduler (`tcp://host:port`). `auto` chooses by the size of the
    tables, the free memory and the GPUs of this machine."""
    workers: int | Literal["auto"] = "auto"
    """The number of worker processes or threads. `auto` takes one per core, or one per GPU."""

    @field_validator("engine")
    @classmethod
    def _known(cls, engine: str) -> str:
        if engine not in ("auto", "process", "dask", "cuda", "dask-cuda") and "://" not in engine:
            raise ValueError(
                f"{engine!r} is not an engine: use auto, process, dask, cuda, dask-cuda or the address of a "
                "Dask scheduler (tcp://host:port)"
            )
        return engine
