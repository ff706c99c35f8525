"""The section `etl`: how the dataset is computed."""

from __future__ import annotations

from typing import Literal

from pydantic import field_validator

from serin.spec.section import Section

WORTH_BYTES = 64_000_000  # of all tables' files; on less, a GPU's start costs more than it saves


class EtlSpec(Section):
    """How the dataset is computed. These settings never change the result."""

    engine: str = "auto"
    """What computes the dataset: `process` (one process), `dask` (a local cluster of processes), `cuda` (one GPU),
    `dask-cuda` (several GPUs) or the address of a Dask scheduler (`tcp://host:port`). `auto` chooses by the size of the
    tables, the free memory and the GPUs of this machine."""
    workers: int | Literal["auto"] = "auto"
    """The number of worker processes or threads. `auto` takes one per core, or one per GPU; with `dask-cuda`, more
    workers than GPUs share them."""

    @field_validator("engine")
    @classmethod
    def _known(cls, engine: str) -> str:
        if engine not in ("auto", "process", "dask", "cuda", "dask-cuda") and "://" not in engine:
            raise ValueError(
                f"{engine!r} is not an engine: use auto, process, dask, cuda, dask-cuda or the address of a "
                "Dask scheduler (tcp://host:port)"
            )
        return engine


def gpus_wanted(engine: str, *, data_bytes: int, usable: int) -> int:
    """How many of `usable` GPUs `etl.engine` uses: all of them for much data, one for `cuda`, none on the host or on a
    scheduler elsewhere. Leases and engines follow this one rule. `data_bytes`: the size of all tables' files."""
    match engine:
        case "auto":
            return usable if data_bytes >= WORTH_BYTES else 0
        case "dask-cuda":
            return usable
        case "cuda":
            return min(1, usable)
        case _:
            return 0
