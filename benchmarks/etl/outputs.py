"""Reads, writes and compares the contenders' outputs: per split a folder of parts with raw arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.race import Unequal

SPLITS = ("train", "valid", "test")
TOLERANCE = 2e-5  # of a z-score: the peers sum in another order than ours

Arrays = dict[str, npt.NDArray[Any]]


def write_split(
    folder: Path,
    split: str,
    *,
    numeric: npt.NDArray[Any],
    codes: npt.NDArray[Any],
    target: npt.NDArray[Any],
    rows: Any,
) -> None:
    """Writes one part as the peers do; `numeric` and `codes` are [rows, columns]."""
    part = folder / split / "part-00000"
    part.mkdir(parents=True)
    np.ascontiguousarray(numeric, dtype="<f4").tofile(part / "num.f32")
    np.ascontiguousarray(codes, dtype="<i4").tofile(part / "cat.i32")
    np.ascontiguousarray(target, dtype="<f4").tofile(part / "target.f32")
    np.ascontiguousarray(rows, dtype="<i8").tofile(part / "rows.i64")


def split_ends(rows: int) -> tuple[int, int]:
    """Returns where train and valid end when rows are ordered by time: 80%, 10%, 10%, the spec's default."""
    return (8 * rows + 5) // 10, (9 * rows + 5) // 10


def read_outputs(answer: Mapping[str, Any]) -> dict[str, Arrays]:
    """Returns per split `rows`, `target` and one array per feature."""
    return {split: _read_split(Path(answer["path"]) / split, answer) for split in SPLITS}


def _read_split(folder: Path, answer: Mapping[str, Any]) -> Arrays:
    parts = sorted(path for path in folder.iterdir() if path.is_dir())
    arrays: Arrays = {
        "rows": np.concatenate([np.fromfile(part / "rows.i64", "<i8") for part in parts]),
        "target": np.concatenate([np.fromfile(part / "target.f32", "<f4") for part in parts]),
    }
    for file, dtype, columns in (
        ("num.f32", "<f4", answer["numeric"]),
        ("cat.i32", "<i4", answer["categorical"]),
    ):
        whole = np.concatenate([np.fromfile(part / file, dtype) for part in parts]).reshape(-1, len(columns))
        arrays |= {name: whole[:, index] for index, name in enumerate(columns)}
    return arrays


def check_equal(
    name: str, found: Mapping[str, Arrays], expected: Mapping[str, Arrays], numeric: Sequence[str]
) -> None:
    """Raises Unequal unless rows, splits, order and codes are the same and z-scores are within the tolerance."""
    for split in SPLITS:
        if set(found[split]) != set(expected[split]):
            raise Unequal(
                f"{name}, {split}: columns {sorted(set(found[split]) ^ set(expected[split]))} are on one side only"
            )
        for column, right in expected[split].items():
            left = found[split][column]
            if left.shape != right.shape:
                raise Unequal(f"{name}, {split}: {len(left):,} values in {column}, ours has {len(right):,}")
            difference = np.abs(left - right)
            allowed = TOLERANCE if column in numeric else 0
            if len(left) and not difference.max() <= allowed:
                row = int(difference.argmax())
                raise Unequal(
                    f"{name}, {split}: {column} at position {row} is {left[row]}, ours has {right[row]}"
                )


def output_bytes(path: Path) -> int:
    return sum(file.stat().st_size for split in SPLITS for file in (path / split).rglob("*.[fi]*"))
