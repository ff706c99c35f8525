"""The whole chain on one stack: raw rows, training, export and a release, then a second version under load, both placed
by Prefect; what every stage cost, and who held the GPU in the meantime.

    python -m tests.gpu.whole_chain               on this machine's GPU
    python -m tests.gpu.whole_chain --pretended   without one: a pretended GPU, which only the training leases
"""

import argparse
import json
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from serin.formats.schema import read_schema
from serin.formats.wire import to_wire
from serin.host.state import read_stack, running_stack
from serin.machine.hardware import inventory
from serin.serving.tuning.load import LoadResult, Open, model_target, run_load
from serin.store.receipt import Receipt
from serin.store.store import Store
from tests.chaos.pipelines import TRAIN
from tests.e2e.whole_stack import Stack, until
from tests.fakes.small_pipeline import NAME, parcels, small_spec, write_spec
from tests.gpu.lease_log import LeaseLog, check_leases, watched_leases

ENDED = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")
STAGES = ("etl", "train", "export")
LONGEST_S = 500.0
ROLLOUT = {
    "steps": [10, 50, 100], "step_time": "2s", "min_requests": 50, "warmup": "2s", "bake": "2s", "deadline": "200s",
    "latency": {"margin": 1.0, "tolerance_ms": 50},
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A pipeline that ran: the receipts of its stages, and what was said about its leases."""

    version: int
    receipts: dict[str, Receipt]
    leases: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainResult:
    first: Placed
    second: Placed
    load: LoadResult
    log: LeaseLog
    costs: dict[str, Any]  # of the second version, as `serin models show` has them


def run_chain(stack: Stack, folder: Path, *, gpu: bool) -> ChainResult:
    """Both versions on a stack that is up, with `folder` for tables and specs. `gpu`: on the machine's own GPU."""
    with watched_leases(stack.home, lambda: _gpus(stack)) as log:
        first = run_placed(stack, _spec(folder / "first", gpu=gpu, seed=11), log)
        with asked(stack, folder, requests_per_s=200 if gpu else 40) as load:
            second = run_placed(stack, _spec(folder / "second", gpu=gpu, seed=12), log)
        until(lambda: _serves_only(stack, 2, gpu=gpu), "the old release is stopped", within_s=60)
        costs = stack.ask("models", "show", f"{NAME}:2")["costs"]
    return ChainResult(first=first, second=second, load=load[0], log=log, costs=costs)


def run_placed(stack: Stack, spec: Path, log: LeaseLog) -> Placed:
    """Runs a spec by `serin run --placed` to its end; the version is live then."""
    asked_at = time.time()
    run = stack.begin(spec, "--placed")
    until(
        lambda: stack.state(run) in ENDED,
        "the pipeline ends",
        within_s=LONGEST_S,
        alive=lambda: _is_up(stack),
    )
    found = stack.call("GET", f"/flow_runs/{run}")
    assert found["state_type"] == "COMPLETED", stack.serin("runs", "logs", found["name"])
    stages = {stage["stage"]: stage for stage in stack.ask("runs", "show", found["name"])["stages"]}
    assert all(stages[stage]["ran"] for stage in STAGES), stages
    receipts = {stage: Receipt.load_file(stack.home / stages[stage]["receipt"]) for stage in STAGES}
    whole = {stage: receipt for stage, receipt in receipts.items() if receipt is not None}
    assert whole.keys() == set(STAGES), "a stage left no receipt"
    version = stages["export"]["version"][1]
    (status,) = stack.ask("rollout", "status", NAME)
    assert status["live"] == version
    own = LeaseLog(samples=[sample for sample in log.samples if sample.before >= asked_at])
    return Placed(version=version, receipts=whole, leases=check_leases(own, NAME, whole))


def _is_up(stack: Stack) -> bool:
    up = read_stack(stack.home)
    return up is not None and up.is_alive


def _gpus(stack: Stack) -> dict[str, Any]:
    found: dict[str, Any] = stack.ask("gpus")
    return found


@contextmanager
def asked(stack: Stack, folder: Path, *, requests_per_s: float) -> Iterator[list[LoadResult]]:
    """Requests to the live version through the gateway while the block runs; the result is there after it."""
    bundle = Store(str(stack.home / "store")).bundle(NAME, "live")
    schema = read_schema(Path(bundle.path))
    rows = pq.read_table(folder / "first" / "parcels.parquet").slice(0, 256).drop_columns(["hours"])
    url = running_stack(stack.home).gateway_url.removeprefix("http://")
    target = model_target(url, NAME, to_wire(rows, schema), schema)
    results: list[LoadResult] = []
    done = threading.Event()
    pace = Open(requests_per_s=requests_per_s)

    def ask() -> None:
        results.append(run_load(target, pace, seconds=LONGEST_S, stop=done.is_set))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    try:
        yield results
    finally:
        done.set()
        thread.join(60)
    assert results, "the load generator failed"


def _serves_only(stack: Stack, version: int, *, gpu: bool) -> bool:
    served = {release["release"] for device in _gpus(stack)["devices"] for release in device["releases"]}
    return served == ({f"{NAME}-v{version}"} if gpu else set())


def _spec(folder: Path, *, gpu: bool, seed: int) -> Path:
    """Each version has other rows, so that no stage finds what another left. On a GPU the steps take seconds."""
    folder.mkdir(parents=True)
    pq.write_table(parcels(1_000_000 if gpu else 3000, seed=seed), folder / "parcels.parquet")
    sections: dict[str, Any] = {
        "rollout": ROLLOUT,
        "champion": {"max_loss": 0.02},
        "objectives": {"latency_ms": 500},
    }
    if gpu:
        sections |= {
            "etl": {"engine": "cuda"},
            "model": {"hidden": [512, 256]},
            "training": {"epochs": 60, "batch_rows": 8192, "seed": seed},
            "export": {"target": "gpu", "variants": ["fp32", "fp16"]},
            "objectives": {"latency_ms": 500},
            "serving": {"device": "gpu"},
        }
    else:
        (folder / "train.py").write_text(TRAIN)
        sections |= {"model": {"script": "train.py", "options": {"steps": 60}}, "training": {"processes": 1}}
    return write_spec(folder, small_spec(folder, **sections))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.whole_chain", description=__doc__)
    parser.add_argument("--pretended", action="store_true", help="without a GPU")
    pretended = parser.parse_args().pretended
    with tempfile.TemporaryDirectory(prefix="serin-chain-") as place:
        stack = Stack(Path(place) / "home", gpus=("GPU-a",) if pretended else None)
        try:
            stack.serin("up")
            print(describe(run_chain(stack, Path(place), gpu=not pretended)))
            print(stack.serin("models", "show", NAME))
            stack.serin("down")
        finally:
            stack.kill()
    return 0


def describe(found: ChainResult) -> str:
    lines = [f"GPUs: {[device.name for device in inventory()]}"]
    for placed in (found.first, found.second):
        lines.append(f"version {placed.version}")
        lines += [f"  {receipt}" for receipt in placed.receipts.values()]
        lines += [f"  {line}" for line in placed.leases]
    load = found.load
    lines.append(
        f"{load.requests:,} requests at {load.requests_per_s:.0f}/s, {load.failed} failed {load.errors or ''}, "
        f"p50 {load.quantile_ms(0.5):.2f} ms, p99 {load.quantile_ms(0.99):.2f} ms"
    )
    lines.append(f"costs of version 2: {json.dumps({**found.costs, 'stages': list(found.costs['stages'])})}")
    lines.append(f"serin gpus: {len(found.log.answers)} answers, showed {sorted(found.log.shown_purposes())}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
