"""python -m benchmarks.quality.gates [--jobs N]: what each optional part of a network gains, on data sets for
development.

Every variant is trained on three folds of the train and valid rows; the figure is the mean metric over the rows that
were left out. Test rows are not read, and the benchmark does not use these data sets.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import threading
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.quality.benchmark import PEERS
from benchmarks.quality.data_sets import DATA, DEVELOPMENT, fetch_tables, table_spec
from benchmarks.quality.score import score
from serin.etl.build import build_dataset
from serin.formats.dataset import read_dataset
from serin.formats.shards import read_split
from serin.models.build import open_margins
from serin.models.trees import scores
from serin.spec.model import ModelSpec
from serin.spec.training import TrainingSpec
from serin.store.store import Store
from serin.training.launch.job import TrainingJob
from serin.training.programs.auto import fit_candidate, fold_numbers, pooled, write_fold
from serin.training.programs.auto_portfolio import Candidate, candidates

FOLDS = 3
_ROBUST, _WAVES = {"numeric_scaling": "robust"}, {"numeric_embedding": "periodic"}
_PIECES = {"numeric_embedding": "piecewise_linear"}
_MLP = {"kind": "mlp", "dropout": 0.2}
_TABM = {"kind": "tabm", "dropout": 0.1}
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "mlp": (_MLP, {}),
    "mlp robust": ({**_MLP, **_ROBUST}, {}),
    "mlp periodic": ({**_MLP, **_WAVES}, {}),
    "mlp robust periodic": ({**_MLP, **_ROBUST, **_WAVES}, {}),
    "mlp robust pieces": ({**_MLP, **_ROBUST, **_PIECES}, {}),
    "mlp 3x256": ({**_MLP, **_ROBUST, **_WAVES, "hidden": [256, 256, 256]}, {}),
    "mlp 30 epochs": ({**_MLP, **_ROBUST, **_WAVES}, {"epochs": 30}),
    "mlp rate 0.005": ({**_MLP, **_ROBUST, **_WAVES}, {"learning_rate": 5e-3}),
    "mlp decay 0.2": ({**_MLP, **_ROBUST, **_WAVES}, {"weight_decay": 0.2}),
    "tabm": (_TABM, {}),
    "tabm robust periodic": ({**_TABM, **_ROBUST, **_WAVES}, {}),
    "tabm robust pieces": ({**_TABM, **_ROBUST, **_PIECES}, {}),
    "dcn robust periodic": ({"kind": "dcn", "dropout": 0.2, **_ROBUST, **_WAVES}, {}),
    "trees": ({}, {}),
    "trees-shallow": ({}, {}),
    "trees-wide": ({}, {}),
}
"""Settings of `model` and changes of auto's `training`; without settings it is auto's candidate of that name."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quality.gates", description=__doc__)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument(
        "--peers", type=Path, default=PEERS, help="the peers' interpreter, which has the tables"
    )
    parser.add_argument("--only", default="", help="data sets, separated by commas")
    given = parser.parse_args()
    names = given.only.split(",") if given.only else list(DEVELOPMENT)
    if not all((DATA / f"{name}.parquet").exists() for name in names):
        fetch_tables(given.peers)
    table: dict[str, dict[str, float]] = {name: {} for name in VARIANTS}
    with tempfile.TemporaryDirectory() as scratch:
        sets = {name: _write_folds(Path(scratch), name) for name in names}
        pairs = [(data, variant) for variant in VARIANTS for data in names]
        begin = time.monotonic()
        with ProcessPoolExecutor(given.jobs) as pool:
            asked = {pool.submit(_measure, sets[data], variant): (data, variant) for data, variant in pairs}
            for future in as_completed(asked):
                data, variant = asked[future]
                table[variant][data], seconds = future.result()
                at = f"[{time.monotonic() - begin:4.0f} s]"
                print(
                    f"{at} {data}, {variant}: {table[variant][data]:.4f} in {seconds:.0f} s", file=sys.stderr
                )
    print(f"{'':<22}" + "".join(f"{data:>15}" for data in names) + f"{'mean':>10}")
    for variant, found in table.items():
        cells = "".join(f"{found[data]:>15.4f}" for data in names)
        print(f"{variant:<22}{cells}{statistics.mean(found.values()):>10.4f}")


def _write_folds(scratch: Path, name: str) -> tuple[str, list[Path]]:
    spec = table_spec(name)
    made = build_dataset(spec.data, spec.features, spec.etl, store=Store(str(scratch / "store")))
    data, rows = read_dataset(made.path), pooled(made.path)
    numbers = fold_numbers(rows.target, data.task, FOLDS, seed=0)
    places = [scratch / name / str(number) for number in range(FOLDS)]
    for number, place in enumerate(places):
        write_fold(place, data, rows, numbers == number)
    return made.path, places


def _measure(dataset: tuple[str, list[Path]], variant: str) -> tuple[float, float]:
    """Returns the mean metric over the folds, and the seconds."""
    path, folds = dataset
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[os.getpid() % len(cores)]})
    data, begin = read_dataset(path), time.monotonic()
    job = TrainingJob(
        model=ModelSpec(kind="auto"), training=TrainingSpec(seed=1), dataset=path, dataset_digest="", processes=1,
        gpu=False, test=False,
    )  # fmt: skip
    model, changes = VARIANTS[variant]
    known = {each.name: each for each in candidates(job, read_dataset(folds[0]))}
    usual = known.get(variant, known["mlp"])
    chosen = Candidate(
        name="variant",
        model=ModelSpec.model_validate(model) if model else usual.model,
        training=usual.training.model_copy(update=changes),
    )
    with tempfile.TemporaryDirectory() as scratch:
        fitted = fit_candidate(job, chosen, folds, Path(scratch), threading.Event())
        found = []
        for fold, result in zip(folds, fitted.results, strict=True):
            rows = read_split(fold, "valid").whole()
            answers = scores(open_margins(result)(np.asarray(rows.num), np.asarray(rows.cat)), data.task)
            found.append(score(np.asarray(rows.target), answers, data.task))
    return statistics.mean(found), time.monotonic() - begin


if __name__ == "__main__":
    main()
