"""python -m benchmarks.serving.gpu: the native backend on this machine's GPU, beside the Python backend, the CPU and
ONNX Runtime in this process.

All servers are up at the same time and are called in turn, directly over HTTP, in a closed loop. The load comes from
several processes, so that it is not the load generator that is measured. Figures are medians over the rounds; variants
that are asked for with `--also` take part in the first round alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path

from benchmarks.child import ContenderFailed
from benchmarks.machine import machine
from benchmarks.serving.gpu_limit import InProcess, difference
from benchmarks.serving.gpu_servers import MAX_ROWS, Running, Wanted, flights_bundle, serving
from serin.formats.schema import Schema, read_schema
from serin.formats.wire import Array, to_wire
from serin.machine.hardware import core_count
from serin.scoring.session import Device
from serin.serving.client.client import predict
from serin.serving.tuning.load import Closed, LoadResult, model_target, quantile_ms, run_load
from serin.serving.tuning.load_connections import Target
from serin.store.artifacts import Bundle
from tests.unit.export.small_dataset import flights

BEFORE, AFTER, CPU = "python", "native", "cpu"
GOALS = {"limit": 0.7, "before": 5.0, "one_row_ms": 0.3}
TOLERANCE = 1e-3  # products on a GPU use TF32
DIFFERENT = 8  # requests of each size


@dataclass(slots=True)
class Figures:
    """Of one server at one size: medians over laps."""

    rows_per_s: list[float] = field(default_factory=list)
    p50_ms: list[float] = field(default_factory=list)
    p99_ms: list[float] = field(default_factory=list)
    counters: list[dict[str, float]] = field(default_factory=list)

    def median(self, figure: str) -> float:
        return statistics.median(getattr(self, figure))

    def per_batch(self) -> str:
        """Triton adds a batch's times up for each of its requests."""
        total = {key: sum(lap[key] for lap in self.counters) for key in self.counters[0]}
        requests, batches = max(total["requests"], 1), max(total["batches"], 1)
        queue, read, score = (total[key] / requests for key in ("queue_us", "read_us", "score_us"))
        return (
            f"{requests / batches:5.1f} requests: queue {queue:,.0f}, read {read:,.0f}, score {score:,.0f} us"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """What all laps have in common."""

    bundle: Bundle
    schema: Schema
    rows: Mapping[str, Array]
    pool: ProcessPoolExecutor
    processes: int
    seconds: float

    def lap(self, server: Running, figures: Figures, size: int, clients: int) -> None:
        some = {name: values[: DIFFERENT * size] for name, values in self.rows.items()}
        target = model_target(server.url, self.bundle.model, some, self.schema, rows_per_request=size)
        before = server.counters()
        results = self._load(target, clients)
        after = server.counters()
        latencies: list[float] = []
        for result in results:
            if result.failed or not result.requests:
                raise ContenderFailed(f"{server.wanted.name}, {size} rows: {result.outcomes}")
            latencies += result.latencies
        figures.rows_per_s.append(size * sum(result.requests_per_s for result in results))
        figures.p50_ms.append(quantile_ms(latencies, 0.5))
        figures.p99_ms.append(quantile_ms(latencies, 0.99))
        figures.counters.append({key: after[key] - before[key] for key in after})

    def _load(self, target: Target, clients: int) -> list[LoadResult]:
        shares = [clients // self.processes + (at < clients % self.processes) for at in range(self.processes)]
        futures = [self.pool.submit(load, target, share, self.seconds) for share in shares if share]
        return [future.result() for future in futures]


def load(target: Target, clients: int, seconds: float) -> LoadResult:
    return run_load(target, Closed(clients=clients), seconds=seconds, warm_up_s=0.2)


def main() -> int:
    asked = _asked()
    wanted = [
        Wanted(name=AFTER, serving={"backend": "onnx_native", "device": "gpu"}, split={}),
        Wanted(name=BEFORE, serving={"backend": "onnx_python", "device": "gpu"}, split={}),
        Wanted(name=CPU, serving={"device": "cpu"}, split={}),
        *map(Wanted.parse, asked.also),
    ]
    with tempfile.TemporaryDirectory(prefix="serin-bench-") as scratch:
        folder = Path(scratch)
        bundle = flights_bundle(asked.store, folder)
        rows = to_wire(flights(DIFFERENT * MAX_ROWS), read_schema(Path(bundle.path)))
        device: Device = "cpu" if asked.rehearse else "cuda"
        limit = InProcess(Path(bundle.path), threads=asked.limit_threads, device=device)
        with (
            serving(bundle, folder, wanted, rehearsal=asked.rehearse) as servers,
            ProcessPoolExecutor(asked.processes, mp_context=get_context("spawn")) as pool,
        ):
            bench = Bench(
                bundle=bundle, schema=read_schema(Path(bundle.path)), rows=rows, pool=pool,
                processes=asked.processes, seconds=asked.seconds,
            )  # fmt: skip
            if missing := {AFTER, BEFORE, CPU} - set(servers):
                raise ContenderFailed(f"{', '.join(sorted(missing))} did not start")
            _check(bench, servers, limit)
            document = _measure(bench, servers, limit, asked)
    print(json.dumps({"machine": machine(), "figures": document}))
    print(" ".join(f"{key}={value:.4g}" for key, value in _line(document, asked.sizes).items()))
    return 0


def _measure(
    bench: Bench, servers: Mapping[str, Running], limit: InProcess, asked: argparse.Namespace
) -> dict[str, dict[str, float]]:
    """Returns rows per second by size and contender, and the latencies of one row with one client."""
    document: dict[str, dict[str, float]] = {}
    for size in asked.sizes:
        names = [name for name in servers if name != CPU or size == 1]
        feeds = [
            {name: values[at * size : (at + 1) * size] for name, values in bench.rows.items()}
            for at in range(DIFFERENT)
        ]
        found = {name: Figures() for name in names}
        limits: dict[int, list[float]] = {1: [], asked.clients: []}
        for turn in range(asked.rounds):
            for name in _of_turn(names, turn):
                bench.lap(servers[name], found[name], size, asked.clients)
            for callers, laps in limits.items():
                laps.append(limit.rows_per_s(feeds, callers=callers, seconds=asked.seconds))
        medians = {f"limit, {callers} callers": statistics.median(laps) for callers, laps in limits.items()}
        document[str(size)] = {name: each.median("rows_per_s") for name, each in found.items()} | medians
        _print_size(size, asked.clients, found, medians, limit.parts_us(feeds[0]))
    alone = {name: Figures() for name in servers}
    for turn in range(asked.rounds):
        for name in _of_turn(list(alone), turn):
            bench.lap(servers[name], alone[name], 1, 1)
    document["p50_ms"] = {name: figures.median("p50_ms") for name, figures in alone.items()}
    print("\n1 row, 1 client: p50, p99 ms")
    for name, figures in alone.items():
        print(
            f"  {name:<22}{figures.median('p50_ms'):8.3f}{figures.median('p99_ms'):8.3f}   {figures.per_batch()}"
        )
    return document


def _of_turn(names: list[str], turn: int) -> list[str]:
    """Returns the servers of a round, in another order each time."""
    taking_part = [name for name in names if name in (AFTER, BEFORE, CPU)] if turn else names
    start = turn % len(taking_part)
    return taking_part[start:] + taking_part[:start]


def _print_size(
    size: int,
    clients: int,
    found: Mapping[str, Figures],
    limits: Mapping[str, float],
    parts: tuple[float, float],
) -> None:
    best = max(limits.values())
    print(
        f"\n{size:,} rows, {clients} clients{'':17}rows/s  requests/s  / limit  / before   p50 ms   p99 ms   per batch"
    )
    before = found[BEFORE].median("rows_per_s")
    for name, each in sorted(found.items(), key=lambda item: -item[1].median("rows_per_s")):
        speed = each.median("rows_per_s")
        print(
            f"  {name:<22}{speed:>16,.0f}{speed / size:>12,.0f}{speed / best:>9.2f}{speed / before:>10.2f}"
            f"{each.median('p50_ms'):>9.2f}{each.median('p99_ms'):>9.2f}   {each.per_batch()}"
        )
    for name, speed in limits.items():
        print(f"  {name:<22}{speed:>16,.0f}{speed / size:>12,.0f}{speed / best:>9.2f}{speed / before:>10.2f}")
    print(f"  in this process, one request: front {parts[0]:,.0f} us, core {parts[1]:,.0f} us", flush=True)


def _line(document: Mapping[str, Mapping[str, float]], sizes: Sequence[int]) -> dict[str, float]:
    """Returns the ratios that the goals are about, and whether all of them are met."""
    line: dict[str, float] = {}
    for size in sizes:
        figures = document[str(size)]
        limit = max(value for name, value in figures.items() if name.startswith("limit"))
        line[f"limit_{size}"] = figures[AFTER] / limit
        line[f"before_{size}"] = figures[AFTER] / figures[BEFORE]
    p50 = document["p50_ms"]
    line["one_row_ms"] = p50[AFTER] - p50[CPU]
    met = [line[f"limit_{size}"] >= GOALS["limit"] for size in sizes if size >= 64]
    met += [line[f"before_{size}"] >= GOALS["before"] for size in sizes if size >= 512]
    met.append(line["one_row_ms"] <= GOALS["one_row_ms"])
    return {**line, "goals_met": sum(met), "goals": len(met)}


def _check(bench: Bench, servers: Mapping[str, Running], limit: InProcess) -> None:
    """Raises unless every server gives the scores of this process."""
    rows = {name: values[:300] for name, values in bench.rows.items()}
    wanted = limit.score(rows)
    for name, server in servers.items():
        for size in (1, 7, 300):
            found = predict(server.url, bench.bundle.model, rows, bench.schema, batch_rows=size)["score"]
            apart = difference(found, wanted)
            print(f"{name}: {apart:.2g} from this process's scores, {size} rows at once", flush=True)
            if not apart <= TOLERANCE:
                raise ContenderFailed(f"{name} gives other scores")


def _asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving.gpu", description=__doc__)
    parser.add_argument("--store", type=Path, help="a store with the exported model (default: export it)")
    parser.add_argument("--seconds", type=float, default=1.0, help="of one lap")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--processes", type=int, default=4, help="of the load generator")
    parser.add_argument(
        "--sizes", type=lambda text: [int(size) for size in text.split(",")], default=[1, 64, 512, 4096]
    )
    parser.add_argument(
        "--limit-threads", type=int, default=max(1, core_count() // 2), help="of the front, in this process"
    )
    parser.add_argument(
        "--also", action="append", default=[],
        help="a variant of the native backend, such as two:instances=2,workers=4,graphs=0",
    )  # fmt: skip
    parser.add_argument("--rehearse", action="store_true", help="without a GPU: the figures mean nothing")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
