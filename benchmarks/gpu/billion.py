"""python -m benchmarks.gpu.billion: a network with a billion weights in its tables, from raw rows to Triton, on one GPU
in ten minutes. Installs nothing.

The table is generated on the GPU: ids of up to fifty million values, hashed into as many codes as give the weights. The
training is killed with -9 after its first checkpoint and resumed. The version is served by Serin's own backend on the
CPU and on the GPU, and must answer its golden rows there. `--pretended --weights 50_000_000` runs without a GPU: the
host plays it, and the threshold from which weights are stored beside the graph is lowered to what it takes.
"""

from __future__ import annotations

import argparse
import importlib
import os
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.race import Unequal
from benchmarks.serving.gpu_servers import Running, Wanted, serving
from serin.errors import WorkerFailed
from serin.formats import external_data
from serin.formats.bundle import read_golden, read_manifest
from serin.formats.schema import read_schema
from serin.formats.trained import WEIGHTS
from serin.pipeline.run_stage import run_etl, run_export, run_train
from serin.serving.client.client import predict
from serin.serving.tuning.load import Closed, model_target, quantile_ms, run_load
from serin.spec.load import load_spec
from serin.spec.pipeline import PipelineSpec
from serin.store.artifacts import Bundle
from serin.store.receipt import Receipt
from serin.training.launch.run_dir import training_folder
from tests.logs import heard
from tests.signals import hit
from tests.unit.training.runs import at_the_next_checkpoint

WIDTH = 32
SHARES = {"user": 0.6, "item": 0.25, "page": 0.1, "query": 0.05}  # of the codes; `query` is a string
VALUES = {"user": 50_000_000, "item": 20_000_000, "page": 5_000_000, "query": 1_000_000}
FILE_ROWS = 5_000_000
TOLERANCE = 1e-3  # products on a GPU use TF32


@dataclass(slots=True)
class Lines:
    """The seconds of each stage, and what was measured in it."""

    rows: list[tuple[str, float, str]] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Iterator[dict[str, float]]:
        begin, found = time.perf_counter(), dict[str, float]()
        print(name, flush=True)

        def say(text: str) -> None:
            print(f"  [{time.perf_counter() - begin:6.1f} s] {text}", flush=True)

        with heard(say):
            yield found
        seconds = time.perf_counter() - begin
        self.rows.append((name, seconds, ", ".join(f"{value:,.4g} {what}" for what, value in found.items())))
        key = name.partition(" ")[0].strip(",")
        self.figures[f"{key}_s"] = seconds

    def show(self) -> str:
        lines = [f"{name:<24}{seconds:>8.1f} s   {what}" for name, seconds, what in self.rows]
        return "\n".join([*lines, " ".join(f"{key}={value:.4g}" for key, value in self.figures.items())])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.billion", description=__doc__)
    parser.add_argument("--weights", type=int, default=1_000_000_000)
    parser.add_argument("--rows", type=int, default=20_000_000)
    parser.add_argument("--batch-rows", type=int, default=65_536)
    parser.add_argument("--pretended", action="store_true", help="without a GPU")
    parser.add_argument("--scratch", type=Path, help="a folder on a fast disk (default: the system's)")
    chosen = parser.parse_args()
    external_data.LIMIT_BYTES = min(external_data.LIMIT_BYTES, 2 * chosen.weights)
    lines = Lines()
    with tempfile.TemporaryDirectory(dir=chosen.scratch, prefix="serin-billion-") as place:
        os.environ["SERIN_HOME"] = str(Path(place, "home"))
        run(Path(place), chosen, lines)
    print(lines.show())
    return 0


def run(folder: Path, chosen: argparse.Namespace, lines: Lines) -> None:
    with lines.stage("table") as found:
        (folder / "table").mkdir()
        for start in range(0, chosen.rows, FILE_ROWS):
            count = min(FILE_ROWS, chosen.rows - start)
            file = folder / "table" / f"part-{start:012d}.parquet"
            write_rows(file, start, count, on_host=chosen.pretended)
        found |= {"rows": chosen.rows, "GB of Parquet": _gigabytes(folder / "table")}
    spec = spec_of(folder / "table", chosen)
    with lines.stage("etl") as found:
        _receipt(run_etl(spec).receipt, found)
    training = training_folder(folder / "home", spec.model, spec.training, run_etl(spec).value, attempt=None)
    with lines.stage("killed with -9") as found:
        try:
            with at_the_next_checkpoint(training, hit):
                run_train(spec)
        except WorkerFailed as error:
            print(f"  {error}", flush=True)
        else:
            raise Unequal("the training ended before its first checkpoint")
    with lines.stage("training, resumed") as found:
        done = run_train(spec)
        _receipt(done.receipt, found)
        lines.figures["rows_per_s"] = found.get("rows/s", 0.0)
        found |= {f"{name}": value for name, value in done.value.metrics.items() if name == "test_auc"}
    with lines.stage("export and gate") as found:
        exported = run_export(spec)
        bundle = exported.value
        files = read_manifest(Path(bundle.path)).files
        size = sum(file.size for file in files.values())
        _receipt(exported.receipt, found)
        found |= {"bytes in the bundle": size, f"of them in {WEIGHTS}": files[WEIGHTS].size}
        found["GB of host memory at most"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
        lines.figures["bundle_gb"] = size / 1e9
    serve(bundle, folder, lines, pretended=chosen.pretended)


def spec_of(table: Path, chosen: argparse.Namespace) -> PipelineSpec:
    codes = chosen.weights // WIDTH
    hashed = [
        {"columns": [name], "steps": [{"hash_bucket": int(share * codes) + 1}]}
        for name, share in SHARES.items()
    ]
    steps = int(0.94 * chosen.rows) // chosen.batch_rows
    return load_spec(
        {
            "name": "billion",
            "data": {
                "tables": {"visits": str(table / "*.parquet")},
                "target": {"expression": "bought == 1", "task": "binary"},
                "split": {"train": 0.94, "valid": 0.03, "test": 0.03},
            },
            "features": [*hashed, {"columns": ["price"], "steps": ["normalize"]}],
            "model": {"kind": "dcn", "embedding": WIDTH, "hidden": [256, 128]},
            "training": {
                "epochs": 1,
                "batch_rows": chosen.batch_rows,
                "checkpoint_every_steps": max(1, steps // 3),
                "processes": 1,
            },
            "export": {"target": "gpu", "variants": ["fp32", "int8_embeddings"]},
            "serving": {"max_batch_rows": 1024},
        }
    )


def serve(bundle: Bundle, folder: Path, lines: Lines, *, pretended: bool) -> None:
    """Starts each server alone, compares its answers with the golden rows, and measures the time of one row."""
    schema, golden = read_schema(Path(bundle.path)), read_golden(Path(bundle.path))
    some = {name: values[:256] for name, values in golden.inputs.items()}
    for device in ("cpu", "gpu"):
        backend = {"backend": "onnx_native"} if device == "gpu" else {}  # what a CPU has by default
        wanted = Wanted(name=device, serving={**backend, "device": device}, split={})
        with (
            lines.stage(f"serving_{device}") as found,
            serving(bundle, folder / "serving", [wanted], rehearsal=pretended) as servers,
        ):
            if device not in servers:
                raise Unequal(f"the server on the {device} did not start")
            server: Running = servers[device]
            answers = predict(server.url, bundle.model, golden.inputs, schema, "http", bundle.version)
            apart = float(np.max(np.abs(answers["score"] - golden.outputs["score"])))
            if not apart <= TOLERANCE:
                raise Unequal(f"golden rows are answered differently on the {device}, by {apart:.3g}")
            target = model_target(server.url, bundle.model, some, schema)
            load = run_load(target, Closed(clients=1), seconds=3.0, warm_up_s=0.5)
            p50 = quantile_ms(list(load.latencies), 0.5)
            found |= {"ms for one row (p50)": p50, "largest difference on golden rows": apart}
            lines.figures[f"{device}_p50_ms"] = p50


def write_rows(file: Path, seed: int, rows: int, *, on_host: bool) -> None:
    """Few ids are frequent and most are rare, as in logs of visits; each has its own effect."""
    xp: Any = importlib.import_module("numpy" if on_host else "cupy")
    chance = xp.random.default_rng(seed)
    ids = {name: (size * chance.random(rows) ** 6).astype(xp.int64) for name, size in VALUES.items()}
    price = 20 * chance.random(rows)
    effect = sum(xp.sin(each.astype(xp.float64)) for each in ids.values())
    bought = effect + price / 10 + chance.standard_normal(rows) > 1.5
    found = {**ids, "price": price.astype(xp.float32), "bought": bought.astype(xp.int64)}
    columns = {name: pa.array(each if on_host else each.get()) for name, each in found.items()}
    columns["query"] = pa.DictionaryArray.from_arrays(columns["query"], _queries())
    pq.write_table(pa.table(columns), file, row_group_size=1_000_000)


@cache
def _queries() -> pa.Array:
    return pa.array([f"query {number}" for number in range(VALUES["query"])])


def _receipt(receipt: Receipt | None, found: dict[str, float]) -> None:
    assert receipt is not None, "the stage had been done before"
    if receipt.rows_per_s is not None:
        found["rows/s"] = receipt.rows_per_s
    peaks = [cost.peak_bytes for cost in receipt.device if cost.peak_bytes is not None]
    if peaks:
        found[f"GB of memory ({receipt.device[0].name})"] = max(peaks) / 1e9


def _gigabytes(folder: Path) -> float:
    return sum(file.stat().st_size for file in folder.iterdir()) / 1e9


if __name__ == "__main__":
    sys.exit(main())
