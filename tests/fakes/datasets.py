"""Dataset folders as the ETL leaves them, made from arrays: small, learnable, of any task."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from serin.formats.dataset import CategoricalColumn, DatasetDescription, SplitDescription, write_dataset
from serin.formats.schema import Task
from serin.formats.shards import Rows, count_parts, seal_part, write_rows
from serin.store.artifacts import Dataset

SIZES = (7, 40)


class ShardWriter:
    """Writes one split from beginning to end: `write` as often as there are rows, then `close`."""

    def __init__(self, folder: Path, numeric: Sequence[str], categorical: Sequence[str]) -> None:
        self._folder = folder
        self._numeric = tuple(numeric)
        self._categorical = tuple(categorical)
        self._rows = 0

    def write(self, rows: Rows) -> None:
        write_rows(self._folder, self._rows, rows)
        self._rows += len(rows)

    def close(self) -> list[str]:
        """Writes the headers; the digest of each part."""
        return [
            seal_part(self._folder, index, self._rows, self._numeric, self._categorical)
            for index in range(count_parts(self._rows))
        ]


def make_dataset(
    folder: Path,
    *,
    task: Task = "binary",
    rows: dict[str, int] | None = None,
    seed: int = 3,
    poison: bool = False,
    unit: float = 1.0,
    numbers: float = 1.0,
) -> Dataset:
    """Three numeric and two categorical columns. `poison` puts an infinity into one training row; the target is
    multiplied by `unit`, the numeric columns by `numbers`."""
    counts = {"train": 4000, "valid": 800, "test": 800} if rows is None else rows
    random = np.random.default_rng(seed)
    effect = random.normal(size=SIZES[1])
    for split, count in counts.items():
        num = random.normal(size=(count, 3)).astype(np.float32)
        cat = np.stack([random.integers(0, size, count) for size in SIZES], axis=1).astype(np.int32)
        signal = num[:, 0] - 0.5 * num[:, 1] * (cat[:, 0] > 3) + effect[cat[:, 1]]
        target = _target(task, signal + random.normal(size=count)) * np.float32(unit)
        if poison and split == "train":
            num[count // 2, 0] = np.inf
        writer = ShardWriter(folder / split, ["a", "b", "c"], ["d", "e"])
        writer.write(Rows(num=num * np.float32(numbers), cat=cat, target=target, rows=np.arange(count)))
        writer.close()
    description = DatasetDescription(
        task=task,
        target="y",
        numeric=("a", "b", "c"),
        categorical=(CategoricalColumn(name="d", size=SIZES[0]), CategoricalColumn(name="e", size=SIZES[1])),
        classes=("low", "middle", "high") if task == "multiclass" else None,
        splits={
            name: SplitDescription(rows=count, parts=count_parts(count)) for name, count in counts.items()
        },
        inputs=(),
        lookups=(),
        sources=(),
        digest=hashlib.sha256(repr((task, counts, seed, poison, unit, numbers)).encode()).hexdigest(),
    )
    write_dataset(folder, description)
    return Dataset(path=str(folder), digest=description.digest, rows=counts)


def _target(task: str, signal: np.ndarray) -> np.ndarray:
    match task:
        case "binary":
            return (signal > 0).astype(np.float32)
        case "multiclass":
            return np.digitize(signal, [-0.7, 0.7]).astype(np.float32)
        case _:
            return (40_000 + 9_000 * signal).astype(np.float32)
