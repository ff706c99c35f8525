"""python -m benchmarks.etl.gpu: compares the ETL on this machine's GPU with the CPU's digest and with plain cuDF's
speed.

First every GPU engine must give the CPU's digest on awkward tables. Then Serin and plain cuDF take turns on generated
tables, from Parquet to shards: numbers (20 M rows x 23 columns) and strings (6 M rows x 23 columns, with a join), where
cudf-polars takes part if it is installed. Needs cuDF, dask-cuda and cupy; installs nothing.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.etl.cases import Case
from benchmarks.etl.ours import run as run_ours
from benchmarks.etl.sampling import sampled
from benchmarks.etl.string_table import numbers, times, write_files, write_string_table
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
ROWS = {"speed": 20_000_000, "strings": 6_000_000}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.etl.gpu", description=__doc__)
    parser.add_argument("--rows", type=int, help="default: 20,000,000 of numbers, 6,000,000 with strings")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument(
        "--only",
        nargs="+",
        choices=("cuda", "dask-cuda", "strings", "speed"),
        default=("cuda", "dask-cuda", "strings", "speed"),
        help="run only these parts",
    )
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
            if engine in chosen.only:
                from benchmarks.etl.gpu_equality import equality

                line[f"unequal_{engine}"] = equality(Path(folder) / engine, engine)
        # Strings first: what a first run takes longer is measured on them.
        for part, make in (("strings", write_string_table), ("speed", write_table)):
            if part in chosen.only:
                place, host = Path(folder) / part, not chosen.without_host
                begin = time.perf_counter()
                case = make(place / "table", chosen.rows or ROWS[part])
                print(f"{part}: written in {time.perf_counter() - begin:.0f} s", flush=True)
                found = speed(place, case, chosen.repetitions, profile=chosen.profile, host=host)
                prefix = "" if part == "speed" else f"{part}_"
                line |= {f"{prefix}{name}": value for name, value in found.items()}
    print(" ".join(f"{key}={value:.4g}" for key, value in line.items()))
    return 1 if any(value for key, value in line.items() if key.startswith("unequal")) else 0


def speed(
    folder: Path, case: Case, repetitions: int, *, profile: bool, host: bool = True
) -> dict[str, float]:
    files = sorted(str(file) for file in Path(case.table).glob("*.parquet"))
    rows = sum(pq.read_metadata(file).num_rows for file in files)
    size = sum(Path(file).stat().st_size for file in [*files, *(join.path for join in case.joins.values())])
    print(f"{rows:,} rows, {size / 1e9:.2f} GB of Parquet", flush=True)
    contenders = _contenders(case, files)
    if host:
        contenders["host"] = lambda out: run_ours({"case": case.request, "out": str(out)})
    first, laps = _laps(contenders, folder, case.numeric, repetitions)
    _stages(lambda: contenders["ours"](folder / "stages"), profile=profile)
    shutil.rmtree(folder)
    medians = {name: statistics.median(own) for name, own in laps.items()}
    for name, median in medians.items():
        print(
            f"  {name:<14}{median:>8.3f} s {rows / median / 1e6:>8.1f} M rows/s   fastest {min(laps[name]):.3f} s"
        )
    ratios = {name: median / medians["ours"] for name, median in medians.items() if name != "ours"}
    cold_s = first["ours"] - medians["ours"]
    return {**ratios, "m_rows_per_s": rows / medians["ours"] / 1e6, "cold_s": cold_s}


def _contenders(case: Case, files: list[str]) -> dict[str, Callable[[Path], dict[str, Any]]]:
    """Each writes what it makes of the table's files into a new folder."""
    from benchmarks.etl import cudf_peer

    columns = case.columns_of(case.table)
    request: dict[str, Any] = {"case": {**case.request, "read": columns}, "files": files, "columns": columns}

    def limit(out: Path, *, durable: bool = False) -> dict[str, Any]:
        with memory_pool():
            return cudf_peer.run({**request, "out": str(out), "our_writer": True, "durable": durable})

    def read_and_transform(_: Path) -> dict[str, Any]:
        import cupy

        cudf_peer.make(request["case"], files)
        cupy.cuda.Device().synchronize()
        return {}

    def plan(out: Path, executor: str) -> dict[str, Any]:
        from benchmarks.etl import cudf_polars_peer

        return cudf_polars_peer.run({**request, "out": str(out), "executor": executor})

    contenders: dict[str, Callable[[Path], dict[str, Any]]] = {
        "ours": lambda out: run_ours({**request, "out": str(out), "engine": "cuda"}),
        "cudf": lambda out: cudf_peer.run({**request, "out": str(out)}),
        "limit": limit,
        "limit_durable": lambda out: limit(out, durable=True),
        "cudf_no_write": read_and_transform,
    }
    if case.joins and importlib.util.find_spec("cudf_polars") is not None:
        contenders["cudf_polars"] = lambda out: plan(out, "in-memory")
    return contenders


def _laps(
    contenders: dict[str, Callable[[Path], dict[str, Any]]],
    folder: Path,
    numeric: list[str],
    repetitions: int,
) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Returns the seconds of every contender, run in turns: of the first round, whose outputs are compared, and of the
    others."""
    from benchmarks.etl.outputs import check_equal, read_outputs

    first: dict[str, float] = {}
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
            print(f"  round {turn}: {name} {seconds:.3f} s", flush=True)
            if turn:
                laps[name].append(seconds)
            else:
                first[name] = seconds
            if not turn and answer:
                found = read_outputs(answer)
                reference = reference or found
                check_equal(name, found, reference, numeric)
            shutil.rmtree(out, ignore_errors=True)
    return first, laps


def write_table(folder: Path, rows: int) -> Case:
    """Writes 13 numbers, 8 integer categories, a target and a time; a tenth of the numbers are null."""
    folder.mkdir(parents=True)
    write_files(folder, rows, _columns)
    return Case(
        name="numbers", table=str(folder), joins={}, target="y", above=0.5, time="t", numeric=NUMERIC,
        categorical=CATEGORICAL,
    )  # fmt: skip


def _columns(chance: np.random.Generator, start: int, rows: int) -> dict[str, pa.Array]:
    columns = numbers(chance, NUMERIC, rows)
    for name, size in zip(CATEGORICAL, SIZES, strict=True):
        values = (size * chance.random(rows) ** 2).astype(np.int64)
        columns[name] = pa.array(values, mask=chance.random(rows) < 0.01)
    columns["y"] = pa.array(chance.random(rows).astype(np.float32))
    columns["t"] = times(chance, start, rows)
    return columns


def _stages(run: Callable[[], object], *, profile: bool) -> None:
    """Prints where Serin spends its time, from its progress messages."""
    with sampled() if profile else nullcontext():
        begin = time.perf_counter()

        def say(text: str) -> None:
            print(f"  [{time.perf_counter() - begin:6.3f} s] {text}", flush=True)

        with heard(say):
            run()
        say("published")


def _importable(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ImportError as error:
        print(f"{name}: {error}")
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
