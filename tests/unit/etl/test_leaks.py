"""Columns that know the answer end the build by name, and pass by name."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from serin.errors import ColumnMissing, LeakFound
from serin.store.store import Store
from tests.unit.etl.trips import build, spec_of, trips


def frame(**columns: Any) -> pd.DataFrame:
    return trips().assign(**columns)


def built(folder: Path, table: pd.DataFrame, *columns: str, codes: bool = False, **data: Any) -> None:
    steps = ["categorify"] if codes else ["fill_median", "normalize"]
    spec = spec_of(folder, frame=table, features=[{"columns": [*columns], "steps": steps}], **data)
    build(spec, Store(str(folder / "store")))


TIP = trips()["tip"].to_numpy()
NOISE = np.random.default_rng(9).normal(size=len(TIP)) * 0.001


def test_a_table_without_leaks_passes(tmp_path: Path) -> None:
    built(tmp_path, trips(), "fare", "people")


@pytest.mark.parametrize(
    ("column", "values", "codes", "says"),
    [
        ("copy", TIP + NOISE, False, "alone predicts the target almost without error"),
        ("against", -TIP, False, "alone predicts the target almost without error"),
        ("word", np.where(TIP > 2, "good", "bad"), True, "alone predicts the target almost without error"),
        ("thanks", np.where(TIP > 2, 1.0, np.nan), False, "has nulls that predict the target"),
    ],
)
def test_a_column_that_tells_the_target_is_named_and_may_pass_by_name(
    tmp_path: Path, column: str, values: Any, codes: bool, says: str
) -> None:
    table = frame(**{column: values})
    with pytest.raises(LeakFound, match=rf"'{column}' {says}[\s\S]*allow_leaks: \[{column}\]") as caught:
        built(tmp_path, table, column, codes=codes)
    assert caught.value.columns == [column]
    assert not Store(str(tmp_path / "store")).datasets()
    built(tmp_path, table, column, codes=codes, allow_leaks=[column])


def test_without_a_time_nothing_is_armed(tmp_path: Path) -> None:
    built(tmp_path, frame(copy=TIP), "copy", time=None)


def test_a_different_id_in_every_row_predicts_nothing(tmp_path: Path) -> None:
    names = [f"trip {row}" for row in range(len(TIP))]
    built(tmp_path, frame(name=names), "name", codes=True)


def test_a_column_that_is_missing_with_the_target_is_named(tmp_path: Path) -> None:
    gone = np.arange(len(TIP)) % 9 == 0
    table = frame(tip=np.where(gone, np.nan, TIP), paid=np.where(gone, np.nan, 1.0 + NOISE))
    with pytest.raises(LeakFound, match=r"'paid' is missing in 100 of the 100 rows whose target is missing"):
        built(tmp_path, table, "paid")


def test_a_regression_and_a_multiclass_target_are_watched_too(tmp_path: Path) -> None:
    with pytest.raises(LeakFound, match="'copy' alone predicts"):
        built(tmp_path, frame(copy=TIP + NOISE), "copy", target={"expression": "tip", "task": "regression"})
    table = frame(
        kind=np.digitize(TIP, [1, 2, 4]), word=np.asarray(list("abcd"))[np.digitize(TIP, [1, 2, 4])]
    )
    with pytest.raises(LeakFound, match="'word' alone predicts"):
        built(tmp_path, table, "word", codes=True, target={"expression": "kind", "task": "multiclass"})


def test_one_thing_in_two_splits_is_named_with_its_rows(tmp_path: Path) -> None:
    says = r"'trip' names the same thing in two splits \d+ times: \d+ is in train \(row \d+\) and in"
    with pytest.raises(LeakFound, match=says):
        built(tmp_path, trips(), "fare", id="trip")
    built(tmp_path, trips(), "fare", id="trip", split={"kind": "group", "group": "trip"})
    built(tmp_path, trips(), "fare", id="trip", allow_leaks=["trip"])


def test_a_name_that_no_column_has_cannot_be_let_pass(tmp_path: Path) -> None:
    with pytest.raises(
        ColumnMissing, match=r"data\.allow_leaks: column 'fair' is not in 'trips'; did you mean 'fare'"
    ):
        built(tmp_path, trips(), "fare", allow_leaks=["fair"])
