"""python -m benchmarks.etl.gpu: compares the ETL on this machine's GPU with the CPU's digest and with plain cuDF's
speed.

First every GPU engine must give the CPU's digest on awkward tables. Then Serin and plain cuDF take turns on a generated
table (20 M rows x 23 columns), from Parquet to shards. Needs cuDF, dask-cuda and cupy; installs nothing.
"""

from __future__ import annotations

import argparse
import importlib
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.etl.sampling import sampled
from serin.etl.engines.device import memory_pool
from tests.logs import heard

NEEDED = (
    "cupy",
    "cudf",
    "rmm",
    "dask_cuda",
    "distributed",
    "pyarrow",
    "pydantic",
    "fsspec",
    "psutil",
    "yaml",
)
NUMERIC = [f"n{index}" for index in range(13)]
CATEGORICAL = [f"c{index}" for index in range(8)]
SIZES = (4, 20, 100, 500, 2_000, 10_000, 50_000, 200_000)
FILE_ROWS = 1_000_000


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.etl.gpu", description=__doc__)
    parser.add_argument("--rows", type=int, default=20_000_000)
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--only", choices=("cuda", "dask-cuda", "speed"), help="run only this part")
    parser.add_argument("--scratch", type=Path, help="a folder on a fast disk (default: the system's)")
    parser.add_argument(
        "--without-host", action="store_true", help="do not compare with Serin on the CPU: it is slow"
    )
    parser.add_argument("--profile", action="store_true", help="show where Serin spends its time")
    chosen = parser.parse_args()
    missing = [name for name in NEEDED if not _importable(name)]
    if missing:
        print(f"cannot be imported here: {', '.join(missing)}")
        return 2
    line: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=chosen.scratch) as folder:
        for engine in ("cuda", "dask-cuda"):
            if chosen.only in (None, engine):
                from benchmarks.etl.gpu_equality import equality

                line[f"unequal_{engine}"] = equality(Path(folder) / engine, engine)
        if chosen.only in (None, "speed"):
            place, host = Path(folder) / "speed", not chosen.without_host
            line |= speed(place, chosen.rows, chosen.repetitions, profile=chosen.profile, host=host)
    print(" ".join(f"{key}={value:.4g}" for key, value in line.items()))
    return 1 if any(value for key, value in line.items() if key.startswith("unequal")) else 0


def speed(folder: Path, rows: int, repetitions: int, *, profile: bool, host: bool = True) -> dict[str, float]:
    from benchmarks.etl import cudf_peer

    folder.mkdir()
    begin = time.perf_counter()
    files = write_table(folder / "table", rows)
    size = sum(Path(file).stat().st_size for file in files)
    print(
        f"{rows:,} rows, {size / 1e9:.2f} GB of Parquet, written in {time.perf_counter() - begin:.0f} s",
        flush=True,
    )
    case = {
        "numeric": NUMERIC, "categorical": CATEGORICAL, "target": "y", "above": 0.5, "time": "t", "min_count": 10,
    }  # fmt: skip

    def plain(out: Path) -> dict[str, Any]:
        return cudf_peer.run({"case": case, "files": files, "out": str(out)})

    def limit(out: Path, *, durable: bool = False) -> dict[str, Any]:
        request = {"case": case, "files": files, "out": str(out), "our_writer": True, "durable": durable}
        with memory_pool():
            return cudf_peer.run(request)

    def read_and_transform(_: Path) -> dict[str, Any]:
        import cupy

        cudf_peer.make(case, files)
        cupy.cuda.Device().synchronize()
        return {}

    contenders: dict[str, Callable[[Path], dict[str, Any]]] = {
        "ours": lambda out: _ours(folder / "table", out, "cuda"),
        "cudf": plain,
        "limit": limit,
        "limit_durable": lambda out: limit(out, durable=True),
        "cudf_no_write": read_and_transform,
    }
    if host:
        contenders["host"] = lambda out: _ours(folder / "table", out, "process")
    laps = _laps(contenders, folder, repetitions)
    _stages(folder / "table", folder / "stages", profile=profile)
    medians = {name: statistics.median(own) for name, own in laps.items()}
    for name, median in medians.items():
        print(
            f"  {name:<14}{median:>8.3f} s {rows / median / 1e6:>8.1f} M rows/s   fastest {min(laps[name]):.3f} s"
        )
    ratios = {name: median / medians["ours"] for name, median in medians.items() if name != "ours"}
    return {**ratios, "m_rows_per_s": rows / medians["ours"] / 1e6}


def _laps(
    contenders: dict[str, Callable[[Path], dict[str, Any]]], folder: Path, repetitions: int
) -> dict[str, list[float]]:
    """Returns the seconds of every contender, run in turns; the first round is compared and not counted."""
    from benchmarks.etl.outputs import check_equal, read_outputs

    laps: dict[str, list[float]] = {name: [] for name in contenders}
    reference: Any = None
    for turn in range(repetitions + 1):
        for name, contender in contenders.items():
            if name == "host" and turn > 1:  # takes as long as all the others together
                continue
            out = folder / f"{name}-{turn}"
            begin = time.perf_counter()
            answer = contender(out)
            seconds = time.perf_counter() - begin
            if turn:
                laps[name].append(seconds)
            elif answer:
                found = read_outputs(answer)
                reference = reference or found
                check_equal(name, found, reference, NUMERIC)
            shutil.rmtree(out, ignore_errors=True)
        print(f"round {turn} of {repetitions}", flush=True)
    return laps


def write_table(folder: Path, rows: int) -> list[str]:
    """Writes 13 numbers, 8 integer categories, a target and a time; a tenth of the numbers are null."""
    folder.mkdir()
    starts = range(0, rows, FILE_ROWS)
    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(lambda start: _write_file(folder, start, min(FILE_ROWS, rows - start)), starts))


def _write_file(folder: Path, start: int, rows: int) -> str:
    import pyarrow as pa
    import pyarrow.parquet as pq

    random = np.random.default_rng(start)
    columns: dict[str, Any] = {}
    for index, name in enumerate(NUMERIC):
        values = random.normal(index, 1 + index, rows).astype(np.float32)
        columns[name] = pa.array(values, mask=random.random(rows) < 0.1 if index % 2 else None)
    for name, size in zip(CATEGORICAL, SIZES, strict=True):
        values = (size * random.random(rows) ** 2).astype(np.int64)
        columns[name] = pa.array(values, mask=random.random(rows) < 0.01)
    columns["y"] = pa.array(random.random(rows).astype(np.float32))
    times = 1_700_000_000_000_000 + (start + np.arange(rows)) * 1_000_000 + random.integers(0, 10**9, rows)
    columns["t"] = pa.array(times, pa.timestamp("us"))
    path = folder / f"part-{start:012d}.parquet"
    pq.write_table(pa.table(columns), path, row_group_size=FILE_ROWS)
    return str(path)


def _ours(table: Path, out: Path, engine: str) -> dict[str, Any]:
    from serin.etl.build import build_dataset
    from serin.formats.dataset import read_dataset
    from serin.spec.load import load_spec
    from serin.store.store import Store

    spec = load_spec(
        {
            "name": "gpu",
            "data": {
                "tables": {"main": str(table)},
                "target": {"expression": "y > 0.5", "task": "binary"},
                "time": "t",
            },
            "features": [
                {"columns": NUMERIC, "steps": ["fill_median", "normalize"]},
                {"columns": CATEGORICAL, "steps": [{"categorify": {"min_count": 10}}]},
                {"columns": ["t"], "steps": [{"date_parts": ["hour", "weekday"]}]},
            ],
            "etl": {"engine": engine},
        }
    )
    dataset = build_dataset(spec.data, spec.features, spec.etl, store=Store(str(out)))
    description = read_dataset(Path(dataset.path))
    categorical = [category.name for category in description.categorical]
    return {"path": dataset.path, "numeric": list(description.numeric), "categorical": categorical}


def _stages(table: Path, out: Path, *, profile: bool) -> None:
    """Prints where Serin spends its time, from its progress messages."""
    with sampled() if profile else nullcontext():
        begin = time.perf_counter()

        def say(text: str) -> None:
            print(f"  [{time.perf_counter() - begin:6.3f} s] {text}", flush=True)

        with heard(say):
            _ours(table, out, "cuda")
        say("published")
    shutil.rmtree(out)


def _importable(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ImportError as error:
        print(f"{name}: {error}")
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
