"""The table that every contender trains on: 13 numeric and 8 categorical columns, learnable, generated from a seed."""

from __future__ import annotations

from pathlib import Path

import numpy as np

NUMERIC, SIZES = 13, (1000,) * 8
EMBEDDING, CROSSES = 16, 3


def make_table(folder: Path, rows: int) -> None:
    """Writes `num.npy`, `cat.npy` and `target.npy`, ready to be memory-mapped."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(7)
    num = random.standard_normal((rows, NUMERIC), dtype=np.float32)
    cat = np.stack([random.integers(0, size, rows) for size in SIZES], axis=1).astype(np.int32)
    effects = [random.normal(size=size) for size in SIZES]
    signal = num[:, 0] - num[:, 1] * num[:, 2] + sum(effects[c][cat[:, c]] for c in range(len(SIZES)))
    target = (signal + random.logistic(size=rows) > 0).astype(np.float32)
    for name, array in (("num", num), ("cat", cat), ("target", target)):
        np.save(folder / f"{name}.npy", array)


def read_table(folder: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    num, cat, target = (np.load(Path(folder) / f"{name}.npy") for name in ("num", "cat", "target"))
    return num, cat, target
