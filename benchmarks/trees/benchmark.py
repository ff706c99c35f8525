"""The trees benchmark: XGBoost from the shards, on the CPU and on a GPU in the same run where there is one."""

from __future__ import annotations

import contextlib
import hashlib
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.child import Child
from benchmarks.machine import machine
from benchmarks.race import EVERYTHING, Choice, Lap, Result, Role, Unequal, race
from benchmarks.report import Report
from serin.formats.dataset import CategoricalColumn, DatasetDescription, SplitDescription, write_dataset
from serin.formats.shards import Rows, count_parts, seal_part, write_rows
from serin.models.trees import load_xgboost

ROLES: dict[str, Role] = {"ours": "ours", "pandas": "peer", "limit": "limit"}
NUMERIC, SIZES, ROUNDS = 13, (20,) * 4 + (1000,) * 4, 30
AUC_APART = (
    0.02  # of contenders: their bins come from other sketches, and 30 rounds are too few to have learned all
)


def measure(*, full: bool, say: Callable[[str], None], choice: Choice = EVERYTHING) -> Report:
    roles = choice.of(ROLES)
    on_gpu = bool(machine()["gpus"]) and bool(load_xgboost().build_info()["USE_CUDA"])
    rows = (8_000_000 if full else 500_000) if on_gpu else (1_000_000 if full else 100_000)
    rows = int(rows * choice.times_the_data)
    devices = ("cpu", "cuda") if on_gpu else ("cpu",)
    cases: dict[str, dict[str, Result]] = {}
    versions: dict[str, dict[str, str]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        dataset = Path(scratch) / "dataset"
        write_shards(dataset, rows)
        say(f"{rows:,} rows written")
        runners: dict[str, tuple[Role, Child]] = {}
        with contextlib.ExitStack() as stack:
            for device in devices:
                for name, role in _roles(roles, device, devices).items():
                    child = Child("benchmarks.trees.contenders", python=sys.executable, threads=choice.cores)
                    runners[f"{device} {name}"] = (role, stack.enter_context(child))
                    versions[name] = child.versions
            results = _race(runners, dataset, choice, say)
    for device in devices:
        cases[device] = {name: results[f"{device} {name}"] for name in _roles(roles, device, devices)}
    last = cases[devices[-1]]
    line = {name: last[name].times_as_long_as(last["ours"]) for name in roles if name != "ours"}
    if on_gpu:
        line["cpu"] = cases["cpu"]["ours"].times_as_long_as(cases["cuda"]["ours"])
    return Report(
        benchmark="trees",
        mode="full" if full else "quick",
        environment={"machine": machine(), "threads": choice.cores, "versions": versions, "rows": rows},
        cases=cases,
        line=line,
        notes=[] if on_gpu else ["no GPU that XGBoost can use: the CPU alone"],
    )


def _roles(roles: dict[str, Role], device: str, devices: tuple[str, ...]) -> dict[str, Role]:
    """All contenders on the last device; on a CPU beside a GPU only Serin, for the ratio of both."""
    return roles if device == devices[-1] else {"ours": "ours"}


def _race(
    runners: Mapping[str, tuple[Role, Child]], dataset: Path, choice: Choice, say: Callable[[str], None]
) -> dict[str, Result]:
    found: dict[str, float] = {}

    def request(name: str, _turn: int) -> Mapping[str, Any]:
        device, _, who = name.partition(" ")
        return {
            "who": who, "device": device, "dataset": str(dataset), "rounds": ROUNDS, "threads": choice.cores,
        }  # fmt: skip

    def accept(name: str, _asked: Mapping[str, Any], lap: Lap) -> None:
        found[name] = lap.answer["auc"]
        if max(found.values()) - min(found.values()) > AUC_APART:
            raise Unequal(f"the valid AUC differs by more than {AUC_APART}: {found}")

    return race(runners, request, accept, repetitions=choice.repetitions, say=say)


def write_shards(folder: Path, rows: int) -> None:
    """Writes a learnable dataset as the ETL does."""
    random = np.random.default_rng(7)
    effects = [random.normal(size=size) for size in SIZES]
    numeric, categorical = [f"n{i}" for i in range(NUMERIC)], [f"c{i}" for i in range(len(SIZES))]
    counts = {"train": rows, "valid": rows // 10}
    for split, count in counts.items():
        num = random.standard_normal((count, NUMERIC), dtype=np.float32)
        cat = np.stack([random.integers(0, size, count) for size in SIZES], axis=1).astype(np.int32)
        signal = num[:, 0] - num[:, 1] * num[:, 2] + sum(effects[c][cat[:, c]] for c in range(len(SIZES)))
        target = (signal + random.logistic(size=count) > 0).astype(np.float32)
        write_rows(folder / split, 0, Rows(num=num, cat=cat, target=target, rows=np.arange(count)))
        for part in range(count_parts(count)):
            seal_part(folder / split, part, count, numeric, categorical)
    description = DatasetDescription(
        task="binary",
        target="y",
        numeric=tuple(numeric),
        categorical=tuple(
            CategoricalColumn(name=name, size=size) for name, size in zip(categorical, SIZES, strict=True)
        ),
        classes=None,
        splits={
            name: SplitDescription(rows=count, parts=count_parts(count)) for name, count in counts.items()
        },
        inputs=(),
        lookups=(),
        sources=(),
        digest=hashlib.sha256(repr(counts).encode()).hexdigest(),
    )
    write_dataset(folder, description)
