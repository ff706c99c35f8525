"""When the ETL uses GPUs: the one rule by which a lease is asked for and an engine is chosen."""

from __future__ import annotations

WORTH_BYTES = 64_000_000  # of all tables' files; on less, a GPU's start costs more than it saves


def gpus_wanted(engine: str, *, data_bytes: int, usable: int) -> int:
    """How many of `usable` GPUs `etl.engine` asks for: all of them for much data, one for `cuda`, none on the host or
    on a scheduler elsewhere. `data_bytes`: the size of all tables' files, known before anything is read."""
    match engine:
        case "auto":
            return usable if data_bytes >= WORTH_BYTES else 0
        case "dask-cuda":
            return usable
        case "cuda":
            return min(1, usable)
        case _:
            return 0
