"""python -m benchmarks.gpu.scale: a table with strings of 100 M rows on one GPU, in ten minutes. Installs nothing.

The table is generated on the GPU (24 columns, more than 10 GB of Parquet). It is built three times: with all of the
GPU's memory, with a pool of 8 GiB, and by two workers of dask-cuda that share the GPU. The digests must be equal.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.etl.cases import Case
from benchmarks.etl.ours import run as run_ours
from benchmarks.etl.string_table import CODES, NUMERIC, PLACES, TEXTS, case_of, names, write_places
from benchmarks.race import Unequal
from serin.etl.engines.subnormals import keep_subnormals
from serin.formats.dataset import read_dataset
from serin.machine.environment import showing_devices
from serin.machine.hardware import inventory
from tests.logs import heard

FILE_ROWS = 5_000_000
WIDE = NUMERIC[::2]  # float64, as databases write numbers
POOL_BYTES = 8 << 30


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.scale", description=__doc__)
    parser.add_argument("--rows", type=int, default=100_000_000)
    parser.add_argument("--scratch", type=Path, help="a folder on a fast disk (default: the system's)")
    parser.add_argument(
        "--only", nargs="+", choices=("whole", "pool", "two"), default=("whole", "pool", "two")
    )
    chosen = parser.parse_args()
    keep_subnormals()  # before a kernel is compiled: the table is made by the same ones
    with tempfile.TemporaryDirectory(dir=chosen.scratch) as place:
        folder = Path(place)
        begin = time.perf_counter()
        case = write_on_gpu(folder / "table", chosen.rows)
        size = sum(file.stat().st_size for file in Path(case.table).iterdir())
        print(
            f"{chosen.rows:,} rows, {size / 1e9:.1f} GB of Parquet in {time.perf_counter() - begin:.0f} s",
            flush=True,
        )
        line = {"gb": size / 1e9}
        found: dict[str, str] = {}
        for name in chosen.only:
            seconds, found[name] = build(case, folder / name, name)
            line |= {f"{name}_s": seconds, f"{name}_m_rows_per_s": chosen.rows / seconds / 1e6}
        print(" ".join(f"{key}={value:.4g}" for key, value in line.items()))
    if len(set(found.values())) > 1:
        raise Unequal(f"the digests differ: {found}")
    return 0


def build(case: Case, out: Path, name: str) -> tuple[float, str]:
    """Returns the seconds and the dataset's digest. Says what the build says, with the time."""
    request: dict[str, Any] = {"case": case.request, "out": str(out), "engine": "cuda"}
    if name == "two":
        request |= {"engine": "dask-cuda", "workers": 2}
    limit = POOL_BYTES if name == "pool" else 0
    begin = time.perf_counter()

    def say(text: str) -> None:
        print(f"  {name} [{time.perf_counter() - begin:6.2f} s] {text}", flush=True)

    with showing_devices((inventory()[0].id,), limit), heard(say):
        answer = run_ours(request)
    seconds = time.perf_counter() - begin
    digest = read_dataset(Path(answer["path"])).digest
    shutil.rmtree(out)
    return seconds, digest


def write_on_gpu(folder: Path, rows: int) -> Case:
    """Writes the table of `benchmarks.etl.string_table`, made by the GPU; another seed for each file."""
    import cudf
    import cupy

    (folder / "main").mkdir(parents=True)
    write_places(folder)
    texts = {name: cudf.Series.from_arrow(names(f"{name} of many", size)) for name, size in TEXTS.items()}
    places = cudf.Series.from_arrow(names("place", PLACES))
    for start in range(0, rows, FILE_ROWS):
        count, chance = min(FILE_ROWS, rows - start), cupy.random.default_rng(start)
        frame = cudf.DataFrame()
        for index, name in enumerate(NUMERIC):
            kind = np.float64 if name in WIDE else np.float32
            frame[name] = chance.standard_normal(count, dtype=kind) * (1 + index) + index
            if index % 2:
                frame[name] = frame[name].mask(chance.random(count) < 0.1)
        for name, size in (TEXTS | CODES).items():
            codes = (size * chance.random(count) ** 2).astype(np.int64)
            made = texts[name].take(codes).reset_index(drop=True) if name in texts else cudf.Series(codes)
            frame[name] = made.mask(chance.random(count) < 0.01)
        frame["place"] = places.take(chance.integers(0, PLACES, count)).reset_index(drop=True)
        frame["y"] = chance.random(count, dtype=np.float32)
        moments = 1_700_000_000_000_000 + (start + cupy.arange(count)) * 1_000_000
        frame["t"] = cudf.Series(moments + chance.integers(0, 10**9, count)).astype("datetime64[us]")
        frame["note"] = chance.integers(0, 2**40, count)
        frame["reference"] = chance.integers(0, 2**62, count)
        frame.to_parquet(folder / "main" / f"part-{start:012d}.parquet", row_group_size_rows=1_000_000)
    return case_of(folder)


if __name__ == "__main__":
    sys.exit(main())
