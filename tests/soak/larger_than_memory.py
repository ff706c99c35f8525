"""python -m tests.soak.larger_than_memory: a table larger than the memory of all workers together, run through.

By default 2 GB of Parquet and two workers of 400 MB; the table it is joined with has half as many rows, and is larger
than the memory of a worker too. Prints what the workers used at most, and fails when one of them
was ended for using too much, or when the dataset differs from what one process with all memory makes of a part of it.
"""

import argparse
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from serin.etl.build import build_dataset
from serin.machine.dask_cluster import local_cluster
from serin.spec.etl import EtlSpec
from serin.spec.load import load_spec
from serin.spec.pipeline import PipelineSpec
from serin.store.artifacts import Dataset
from serin.store.store import Store
from tests.logs import heard

NUMBERS = [f"n{index}" for index in range(10)]
GROUP_ROWS = 500_000
ROW_BYTES = 10 * 8 + 8 + 8 + 8 + 4  # of Parquet: the numbers are random, so nothing packs them


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.larger_than_memory", description=__doc__)
    parser.add_argument("--megabytes", type=int, default=2000)
    parser.add_argument("--worker-megabytes", type=int, default=400)
    parser.add_argument("--workers", type=int, default=2)
    chosen = parser.parse_args()
    begin = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - begin:5.0f} s] {text}", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        spec, size = write_table(Path(folder) / "table", chosen.megabytes * 10**6 // ROW_BYTES)
        say(
            f"{size / 1e6:,.0f} MB of Parquet for {chosen.workers} workers of {chosen.worker_megabytes} MB each"
        )
        limit = chosen.worker_megabytes * 10**6
        dataset, peak, deaths = run(spec, Path(folder) / "store", chosen.workers, limit, say)
    print(
        f"rows={sum(dataset.rows.values())} data_mb={size / 1e6:.0f} worker_limit_mb={chosen.worker_megabytes} "
        f"worker_peak_mb={peak / 1e6:.0f} workers_lost={deaths} seconds={time.monotonic() - begin:.0f}"
    )
    return 1 if deaths else 0


def run(
    spec: PipelineSpec, store: Path, workers: int, worker_bytes: int, say: Callable[[str], None]
) -> tuple[Dataset, int, int]:
    """The dataset, the largest resident size of any worker, and how many workers were ended on the way."""
    with local_cluster(workers, worker_bytes, closed=False) as client, watched(client) as seen:
        etl = EtlSpec(engine=client.scheduler.address)
        with heard(say):
            dataset = build_dataset(spec.data, spec.features, etl, store=Store(str(store)))
    return dataset, max(seen.values()), len(seen) - workers


@contextmanager
def watched(client: Any) -> Iterator[dict[int, int]]:
    """Process id of each worker that was seen -> its largest resident size."""
    largest: dict[int, int] = {}
    done = threading.Event()

    def sample() -> None:
        while not done.wait(0.1):
            for process in psutil.Process().children(recursive=True):
                try:
                    if not process.children() and "spawn_main" in " ".join(process.cmdline()):
                        largest[process.pid] = max(largest.get(process.pid, 0), process.memory_info().rss)
                except psutil.Error:
                    continue

    pids = set(client.run(_pid).values())
    sampler = threading.Thread(target=sample, daemon=True)
    sampler.start()
    try:
        yield largest
    finally:
        done.set()
        sampler.join()
        for pid in set(largest) - pids:  # helpers of multiprocessing are no workers
            if largest[pid] < 60_000_000:
                del largest[pid]


def _pid() -> int:
    import os

    return os.getpid()


def write_table(folder: Path, rows: int) -> tuple[PipelineSpec, int]:
    """Random numbers, a word, a place, a time and a target, in one file per two million rows; and the places."""
    folder.mkdir(parents=True)
    partner = folder.with_name(f"{folder.name}-places.parquet")
    places = max(1, rows // 2)
    _write_places(partner, places)
    starts = range(0, rows, 4 * GROUP_ROWS)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda start: _write(folder, start, min(4 * GROUP_ROWS, rows - start), places), starts))
    spec = load_spec(
        {
            "name": "soak",
            "data": {
                "tables": {"main": str(folder), "places": str(partner)},
                "joins": [
                    {"with": "places", "on": "place", "columns": ["height", "town"], "source": "request"}
                ],
                "target": {"expression": "y > 0.5", "task": "binary"},
                "time": "t",
            },
            "features": [
                {
                    "columns": [*NUMBERS, "height"],
                    "steps": ["fill_median", {"clip": {"q": [0.01, 0.99]}}, "normalize"],
                },
                {"columns": ["word", "town"], "steps": [{"categorify": {"min_count": 5}}]},
                {"columns": ["t"], "steps": ["date_parts"]},
            ],
        }
    )
    return spec, sum(file.stat().st_size for file in (partner, *folder.iterdir()))


def _write_places(path: Path, count: int) -> None:
    schema = pa.schema([("place", pa.int64()), ("height", pa.float64()), ("town", pa.string())])
    order = np.random.default_rng(7)
    with pq.ParquetWriter(path, schema, use_dictionary=["town"], compression="none") as writer:
        for start in range(0, count, GROUP_ROWS):
            place = order.permutation(np.arange(start, min(start + GROUP_ROWS, count)))
            towns = pa.array([f"town {number}" for number in range(1000)]).take(pa.array(place % 1000))
            columns = {"place": place, "height": order.normal(size=len(place)), "town": towns}
            writer.write_table(pa.table(columns, schema), len(place))


def _write(folder: Path, start: int, rows: int, places: int) -> None:
    path = folder / f"part-{start:012d}.parquet"
    numbers = [(name, pa.float64()) for name in (*NUMBERS, "y")]
    schema = pa.schema([*numbers, ("place", pa.int64()), ("t", pa.timestamp("us")), ("word", pa.string())])
    with pq.ParquetWriter(path, schema, use_dictionary=["word"], compression="none") as writer:
        for first in range(start, start + rows, GROUP_ROWS):
            count = min(GROUP_ROWS, start + rows - first)
            random = np.random.default_rng(first)
            columns: dict[str, Any] = {name: random.normal(size=count) for name in NUMBERS}
            columns["y"] = random.random(count)
            columns["place"] = random.integers(0, places + places // 10, count)  # some are in no table
            columns["t"] = pa.array(10**15 + random.integers(0, 10**13, count), pa.timestamp("us"))
            columns["word"] = [f"word {number}" for number in random.integers(0, 5000, count)]
            writer.write_table(pa.table(columns, schema), count)


if __name__ == "__main__":
    sys.exit(main())
