"""Three hosts against one on the same cores: ETL with Dask workers, and training with as many ranks.

Hosts are network namespaces of this machine. Both contenders have three processes, on one host or one on each of three;
the dataset's digest and the weights must be equal. The store is a folder that all hosts see.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import distributed
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from benchmarks.child import ROOT, ContenderFailed
from benchmarks.race import Lap, Result, Role, Runner, Unequal, race
from tests.cluster.namespaces import Host, hosts
from tests.cluster.part import Missing
from tests.cluster.parts.namespaces import install

NAMES = ("a", "b", "c")
PREFIX = "198.18.80"
QUICK_ROWS, FULL_ROWS = 400_000, 3_000_000
TRAINED_ROWS = 600_000
_DASK = Path(sys.executable).with_name("dask")
_LIMIT_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCosts:
    """`training`: only of a full run, because every lap of it starts three processes or more with torch."""

    etl: Mapping[str, Result]
    training: Mapping[str, Result] | None = None

    @property
    def named(self) -> dict[str, Mapping[str, Result]]:
        return {"etl": self.etl} | ({} if self.training is None else {"training": self.training})

    @property
    def cases(self) -> dict[str, Mapping[str, Result]]:
        titles = {"etl": "ETL", "training": "training (a million rows)"}
        return {titles[name]: results for name, results in self.named.items()}


def measure_hosts(*, full: bool, say: Callable[[str], None]) -> HostCosts | str:
    """Returns the reason where this machine cannot have hosts."""
    try:
        install()
    except Missing as error:
        return str(error)
    with tempfile.TemporaryDirectory(prefix="serin-scale-") as made, hosts(*NAMES, prefix=PREFIX) as network:
        folder = Path(made)
        with dask_clusters(network, folder) as addresses:
            etl = _race_etl(network, folder, addresses, FULL_ROWS if full else QUICK_ROWS, say)
        training = _race_training(network, folder, TRAINED_ROWS, say) if full else None
    return HostCosts(etl=etl, training=training)


def _race_etl(
    network: Mapping[str, Host],
    folder: Path,
    addresses: Mapping[str, str],
    rows: int,
    say: Callable[[str], None],
) -> dict[str, Result]:
    write_table(folder / "data.parquet", rows)
    specs = {name: write_spec(folder, name, engine=address) for name, address in addresses.items()}
    laps: dict[str, tuple[Role, Runner]] = {
        "three hosts": ("ours", Stage(network, folder, "etl", specs["three"], ("a",))),
        "one host": ("peer", Stage(network, folder, "etl", specs["one"], ("a",))),
    }
    return race(laps, lambda *_: {}, _Equal("datasets"), say=lambda text: say(f"etl: {text}"))


def _race_training(
    network: Mapping[str, Host], folder: Path, rows: int, say: Callable[[str], None]
) -> dict[str, Result]:
    write_table(folder / "data.parquet", rows)
    three = write_spec(folder, "train-three", engine="process")
    one = write_spec(folder, "train-one", engine="process", processes=len(NAMES))
    laps: dict[str, tuple[Role, Runner]] = {
        "three hosts": ("ours", Stage(network, folder, "train", three, NAMES)),
        "one host": ("peer", Stage(network, folder, "train", one, ("a",))),
    }
    return race(laps, lambda *_: {}, _Equal("weights"), say=lambda text: say(f"training: {text}"))


class _Equal:
    """Accepts a lap whose result is that of all others."""

    def __init__(self, what: str) -> None:
        self._what, self._first = what, ""

    def __call__(self, name: str, _: Mapping[str, Any], lap: Lap) -> None:
        self._first = self._first or lap.answer["result"]
        if lap.answer["result"] != self._first:
            raise Unequal(f"{self._what} of {name} differ")


class Stage:
    """One stage, started on each of `places` at the same time, with homes and a store that were never used."""

    def __init__(
        self, network: Mapping[str, Host], folder: Path, stage: str, spec: Path, places: Sequence[str]
    ) -> None:
        self._network, self._folder, self._places = network, folder, places
        self._command = [
            sys.executable, "-m", "benchmarks.scale.stage", stage, str(spec), str(len(places)),
        ]  # fmt: skip
        self._dataset_first = stage == "train"
        self._spec = spec

    def run(self, request: Mapping[str, Any]) -> Lap:
        del request
        fresh = Path(tempfile.mkdtemp(dir=self._folder))
        try:
            if self._dataset_first:
                self._at("a", fresh, [*self._command[:3], "etl", str(self._spec)])
            running = [self._start(name, fresh, self._command) for name in self._places]
            facts = [self._end(*each) for each in running]
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
        receipts = [each["receipt"] for each in facts if each["receipt"] is not None]
        if not receipts:
            raise ContenderFailed("no host has a receipt: the stage was found, not done")
        # Of a training the work of the ranks alone, without the start of processes.
        seconds = 1e6 / receipts[0]["rows_per_s"] if self._dataset_first else receipts[0]["seconds"]
        results = {each["result"] for each in facts}
        if len(results) > 1:
            raise Unequal("hosts of one training end with different weights")
        return Lap(seconds=seconds, peak_bytes=0, answer={"result": results.pop(), "facts": facts})

    def _at(self, name: str, fresh: Path, command: list[str]) -> None:
        self._end(*self._start(name, fresh, command))

    def _start(self, name: str, fresh: Path, command: list[str]) -> tuple[subprocess.Popen[str], Path]:
        log = fresh / f"{name}.log"
        return self._network[name].popen(command, log=log, env=variables(fresh, name), cwd=ROOT), log

    def _end(self, process: subprocess.Popen[str], log: Path) -> dict[str, Any]:
        try:
            code = process.wait(_LIMIT_S)
        except subprocess.TimeoutExpired as error:
            process.kill()
            raise ContenderFailed(f"no result after {_LIMIT_S:g} s\n{log.read_text()[-3000:]}") from error
        text = log.read_text()
        if code:
            raise ContenderFailed(f"a stage exited with code {code}\n{text[-3000:]}")
        facts: dict[str, Any] = json.loads(text.strip().splitlines()[-1])
        return facts


def variables(fresh: Path, name: str) -> dict[str, str]:
    """The environment of a host: its own home, the common store, and one thread per process. Three hosts of these cores
    must not take each all of them, and the weights of a large step depend on the threads."""
    kept = {key: os.environ[key] for key in ("PATH", "HOME", "LANG", "PYTHONPATH") if key in os.environ}
    return {
        **kept,
        "SERIN_HOME": str(fresh / f"home-{name}"),
        "SERIN_STORE": str(fresh / "store"),
        "OMP_NUM_THREADS": "1",
        "SLURM_CPUS_ON_NODE": "1",  # as a node of Slurm gives a share of its cores
        "DO_NOT_TRACK": "1",
    }


@contextmanager
def dask_clusters(network: Mapping[str, Host], folder: Path) -> Iterator[dict[str, str]]:
    """Two schedulers on host a: one with three workers beside it, one with a worker on each host."""
    with ExitStack() as stack:
        addresses = {}
        for name, places in (("one", ("a", "a", "a")), ("three", NAMES)):
            port = network["a"].free_port()
            address = addresses[name] = f"tcp://{network['a'].address}:{port}"
            common = ["--no-dashboard", "--host"]
            commands = [("a", [_DASK, "scheduler", *common, network["a"].address, "--port", str(port)])]
            for number, place in enumerate(places):
                local = ["--local-directory", folder / f"dask-{name}-{number}"]
                limits = ["--nthreads", "1", "--no-nanny", "--memory-limit", "2GB"]
                commands.append(
                    (place, [_DASK, "worker", address, *common, network[place].address, *limits, *local])
                )
            for number, (place, command) in enumerate(commands):
                log = folder / f"dask-{name}-{number}.log"
                process = network[place].popen(command, env=variables(folder, place), log=log, cwd=ROOT)
                stack.callback(process.kill)
            with (
                network["a"].inside(),
                distributed.Client(address, timeout=60, set_as_default=False) as client,
            ):
                client.wait_for_workers(len(places), timeout=120)
        yield addresses


def write_table(path: Path, rows: int) -> None:
    """Numbers with nulls, words and a target that depends on both."""
    rng = np.random.default_rng(7)
    size, weight = rng.normal(size=rows), rng.gamma(2.0, size=rows)
    words = np.array([f"word-{number:04d}" for number in range(2000)])
    kind = words[rng.zipf(1.5, size=rows) % len(words)]
    late = (size + 0.5 * weight + rng.normal(scale=0.5, size=rows) > 1.5).astype(np.int64)
    columns = {
        "size": pa.array(size, mask=rng.random(rows) < 0.05),
        "weight": weight,
        "kind": kind,
        "late": late,
    }
    scratch = path.with_suffix(f".{time.monotonic_ns()}")
    pq.write_table(pa.table(columns), scratch, row_group_size=max(1, rows // 12))
    scratch.replace(path)


def write_spec(folder: Path, name: str, *, engine: str, processes: int | None = None) -> Path:
    """A spec beside data.parquet. Everything that is measured otherwise is set, so that results are equal."""
    training: dict[str, Any] = {
        "epochs": 3, "batch_rows": 3000, "precision": "fp32", "execution": "eager", "checkpoint_every_steps": 1000,
    }  # fmt: skip
    if processes:
        training["processes"] = processes
    spec = {
        "name": "parcels",
        "data": {
            "tables": {"parcels": "data.parquet"},
            "target": {"expression": "late", "task": "binary"},
            "split": {"train": 0.8, "valid": 0.1, "test": 0.1},
        },
        "features": [
            {"columns": ["size", "weight"], "steps": ["fill_median", "normalize"]},
            {"columns": ["kind"], "steps": [{"categorify": {"min_count": 2}}]},
        ],
        "model": {"kind": "mlp", "hidden": [256, 128]},
        "training": training,
        "etl": {"engine": engine},
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(spec, sort_keys=False), encoding="utf-8")
    return path
