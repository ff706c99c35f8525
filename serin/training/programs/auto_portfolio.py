"""Lists the candidates of `model.kind: auto`, in the order in which they are tried. Pure; does not import torch.

The settings come from published defaults (RealMLP and the tuned trees of Holzmüller et al., 2024) and were compared on
data sets that the benchmark does not use; docs/log/train.md has the figures.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from pydantic import JsonValue

from serin.formats.dataset import DatasetDescription
from serin.machine.hardware import core_count
from serin.spec.model import ModelSpec
from serin.spec.training import TrainingSpec
from serin.training.launch.job import TrainingJob

_ATTENTION_CELLS = 2_000_000  # of the train rows: above, a transformer takes longer than all others together
_EPOCHS_BELOW_ROWS = {10_000: 30, 50_000: 20}  # a network needs more passes over few rows
_FEW_ROWS = 50_000
_SETTLED: dict[str, Any] = {"precision": "fp32", "execution": "eager"}  # nothing worth measuring
_ROWS_PER_STEP = {3_000: 64, 10_000: 128, _FEW_ROWS: 256}  # below so many train rows
_MANY_ROWS = 100_000  # above, boosting takes longer steps and fewer of them
_WIDE_ROWS = 10_000  # above, trees with many leaves gain most
_SLOW_S = 4e-3  # of the budget for each row and output: below, too
_MANY_OUTPUTS = 4  # each is a tree in every round: a network comes before the second trees
_ROBUST, _WAVES = {"numeric_scaling": "robust"}, {"numeric_embedding": "periodic"}
_PIECES = {"numeric_embedding": "piecewise_linear"}
_NETWORK_SHARE = 0.35  # of the budget, for one network on all folds
_ROWS_PER_S = 25_000  # of a small network on one core
_MOST_CORES = 4  # that a small network makes use of
_SLOWER = {"tabm": 3, "ft_transformer": 10}  # times a perceptron
_LEAST_EPOCHS = 4
_TREES: dict[str, dict[str, JsonValue]] = {
    "trees": {
        "max_depth": 5, "subsample": 0.7, "colsample_bynode": 0.5, "min_child_weight": 3, "max_cat_to_onehot": 32,
    },
    "trees-shallow": {"max_depth": 3, "subsample": 0.8, "colsample_bytree": 0.8},
    "trees-wide": {
        "grow_policy": "lossguide", "max_depth": 0, "max_leaves": 48, "subsample": 0.75, "colsample_bytree": 0.6,
        "min_child_weight": 5, "lambda": 5,
    },
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    name: str
    model: ModelSpec
    training: TrainingSpec

    @property
    def is_trees(self) -> bool:
        return self.model.kind == "xgboost"

    def for_all_rows(self, amount: int) -> Candidate:
        """Returns the same without early stopping: `amount` boosting rounds, or epochs of a network."""
        if self.is_trees:
            return replace(self, model=self.model.model_copy(update={"rounds": amount}))
        return replace(self, training=self.training.model_copy(update={"epochs": amount, "patience": None}))


def candidates(job: TrainingJob, data: DatasetDescription, folds: int = 1) -> list[Candidate]:
    """Returns what is tried: kinds that differ most come first, variations of them later. Trees on few rows take little
    time, so two of them come before the first network; between few and many rows wide ones come first. The first one
    does not depend on `folds`, the number of trainings of each; networks have fewer epochs, or are left out, where
    these would take too much of the budget."""
    trees, networks = [*_trees(job, data)], [*_networks(job, data, folds)]
    if _WIDE_ROWS < data.rows["train"] <= _MANY_ROWS:
        trees.sort(key=lambda each: each.name != "trees-wide")
    first = 1 if data.rows["train"] > _MANY_ROWS or data.outputs >= _MANY_OUTPUTS else 2
    return [*trees[:first], *networks[:1], *trees[first:], *networks[1:]]


def _trees(job: TrainingJob, data: DatasetDescription) -> Iterator[Candidate]:
    rows = data.rows["train"]
    fast = rows > _MANY_ROWS or job.model.auto.budget < _SLOW_S * rows * data.outputs
    pace: dict[str, JsonValue] = {"eta": 0.1 if fast else 0.05}
    training = TrainingSpec(
        seed=job.training.seed,
        class_weights=job.training.class_weights,
        processes=job.processes,
        patience=50 if fast else 100,
    )
    for name, options in _TREES.items():
        model = ModelSpec(kind="xgboost", rounds=1000 if fast else 2000, options={**pace, **options})
        yield Candidate(name=name, model=model, training=training)


def _settled(job: TrainingJob, rows: int) -> dict[str, Any]:
    """Returns the settings that a training would otherwise measure, for few rows on a CPU."""
    sizes = [size for below, size in _ROWS_PER_STEP.items() if rows < below]
    return {**_SETTLED, "batch_rows": sizes[0]} if sizes and not job.gpu and job.processes == 1 else {}


def _epochs(job: TrainingJob, rows: int, folds: int, kind: str) -> int:
    """Returns how many epochs a network has; on a CPU no more than end within its share of the budget."""
    enough = [epochs for below, epochs in _EPOCHS_BELOW_ROWS.items() if rows < below]
    wanted = max([job.training.epochs, *enough])
    if job.gpu:
        return wanted
    speed = _ROWS_PER_S * min(core_count(), _MOST_CORES) / _SLOWER.get(kind, 1)
    return min(wanted, int(_NETWORK_SHARE * job.model.auto.budget * speed / (rows * folds)))


def _networks(job: TrainingJob, data: DatasetDescription, folds: int) -> Iterator[Candidate]:
    given, rows = job.training, data.rows["train"]
    training = TrainingSpec(
        seed=given.seed,
        class_weights=given.class_weights,
        processes=job.processes,
        learning_rate=2e-3,
        weight_decay=0.2,
        **_settled(job, rows),
    )
    settings: dict[str, dict[str, Any]] = {
        "mlp": {"kind": "mlp", "dropout": 0.2, **_ROBUST, **_WAVES},
        "mlp-pieces": {"kind": "mlp", "dropout": 0.2, **_ROBUST, **_PIECES},
        "tabm": {"kind": "tabm", "dropout": 0.1, **_ROBUST, **_WAVES},
    }
    if rows * (len(data.numeric) + len(data.categorical)) <= _ATTENTION_CELLS:
        settings["ft_transformer"] = {"kind": "ft_transformer", "embedding": 32, "heads": 4, **_ROBUST}
    for name, model in settings.items():
        epochs = _epochs(job, rows, folds, model["kind"])
        if epochs >= min(_LEAST_EPOCHS, given.epochs):
            changed = training.model_copy(update={"epochs": epochs})
            yield Candidate(name=name, model=ModelSpec.model_validate(model), training=changed)
