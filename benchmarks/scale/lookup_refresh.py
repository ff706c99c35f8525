"""What a refresh of a lookup takes by its number of keys: CPU time, the most memory, and the size of the graph.

    python -m benchmarks.scale.lookup_refresh [KEYS ...]

The table has a key of text, an integer and a text column; every row has changed. The version is exported and refreshed
in separate processes, with all checks of a refresh; nothing is served.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

KEYS = (100_000, 1_000_000)


def planes(keys: int, seats: int) -> pa.Table:
    numbers = np.arange(keys)
    return pa.table(
        {
            "tailnum": pa.array(np.char.add("N", numbers.astype(str)).tolist()),
            "seats": (numbers + seats) % 900,
            "maker": pa.DictionaryArray.from_arrays(numbers % 2, ["Airbus", "Boeing"]).cast(pa.string()),
        }
    )


def export(folder: Path, keys: int) -> None:
    from serin.store.store import Store
    from tests.unit.export import small_dataset

    table = folder / "planes.parquet"
    small_dataset.planes = lambda: planes(keys, 1)
    data = small_dataset.spec_for("binary").data.model_dump(by_alias=True, mode="json", exclude_none=True)
    data["tables"] = {"flights": str(folder / "flights.parquet"), "planes": str(table)}
    small_dataset.make_trained(folder / "trained", "binary", data=data).export(Store(str(folder / "store")))
    pq.write_table(planes(keys, 2), table)


def refresh(folder: Path, keys: int) -> None:
    from serin.pipeline.lookups import find_or_publish
    from serin.store.store import Store

    store = Store(str(folder / "store"))
    base, began = store.bundle("flights", 1), time.process_time()
    edition = find_or_publish(store, base, base.release)
    seconds = time.process_time() - began
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    graph = (Path(edition.path) / "model.onnx").stat().st_size / 2**20
    assert edition.edition > 1, "the table has changed"
    print(f"{keys:>12,} {seconds:>8.1f} {most:>12,.0f} {graph:>10,.0f}", flush=True)


def main(words: list[str]) -> None:
    if words[:1] in (["export"], ["refresh"]):
        {"export": export, "refresh": refresh}[words[0]](Path(words[1]), int(words[2]))
        return
    print(f"{'keys':>12} {'CPU s':>8} {'most MiB':>12} {'graph MiB':>10}", flush=True)
    for keys in [int(word) for word in words] or KEYS:
        with tempfile.TemporaryDirectory(prefix="serin-bench-") as folder:
            for step in ("export", "refresh"):
                command = [sys.executable, "-m", "benchmarks.scale.lookup_refresh", step, folder, str(keys)]
                subprocess.run(command, check=True)


if __name__ == "__main__":
    main(sys.argv[1:])
