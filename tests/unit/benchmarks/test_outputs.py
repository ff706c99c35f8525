from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.etl.outputs import SPLITS, check_equal, output_bytes, read_outputs, write_split
from benchmarks.race import Unequal

ANSWER = {"numeric": ["distance"], "categorical": ["origin", "dest"]}


def outputs(folder: Path, *, distance: float = 0.5, code: int = 3) -> dict[str, object]:
    for split in SPLITS:
        write_split(
            folder,
            split,
            numeric=np.array([[distance], [1.5]]),
            codes=np.array([[code, 1], [2, 0]]),
            target=np.array([1, 0]),
            rows=np.array([4, 9]),
        )
    return {**ANSWER, "path": str(folder)}


def test_what_a_peer_writes_is_read_back_column_by_column(tmp_path: Path) -> None:
    read = read_outputs(outputs(tmp_path / "a"))
    assert {name: column.tolist() for name, column in read["test"].items()} == {
        "rows": [4, 9],
        "target": [1.0, 0.0],
        "distance": [0.5, 1.5],
        "origin": [3, 2],
        "dest": [1, 0],
    }
    assert output_bytes(tmp_path / "a") == 3 * (2 * 4 + 4 * 4 + 2 * 4 + 2 * 8)


def test_the_last_bits_of_a_z_score_may_differ(tmp_path: Path) -> None:
    ours = read_outputs(outputs(tmp_path / "a"))
    check_equal("polars", read_outputs(outputs(tmp_path / "b", distance=0.500001)), ours, ["distance"])


@pytest.mark.parametrize("other", [{"distance": 0.51}, {"distance": float("nan")}, {"code": 4}])
def test_another_answer_is_refused_with_its_place(tmp_path: Path, other: dict[str, float]) -> None:
    ours = read_outputs(outputs(tmp_path / "a"))
    theirs = read_outputs(outputs(tmp_path / "b", **other))  # type: ignore[arg-type]
    with pytest.raises(Unequal, match=r"polars, train: (distance|origin) at position 0"):
        check_equal("polars", theirs, ours, ["distance"])


def test_rows_in_another_order_are_refused(tmp_path: Path) -> None:
    ours = read_outputs(outputs(tmp_path / "a"))
    theirs = read_outputs(outputs(tmp_path / "b"))
    theirs["valid"]["rows"] = theirs["valid"]["rows"][::-1]
    with pytest.raises(Unequal, match="polars, valid: rows"):
        check_equal("polars", theirs, ours, ["distance"])
