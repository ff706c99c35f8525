"""The ugly CSV: from `serin init` to a dataset and a model without an edit by hand."""

from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from serin.draft.guess import guess_spec
from serin.etl.sources.convert import convert
from serin.etl.sources.find import find_table
from serin.formats.dataset import read_dataset
from serin.formats.shards import read_split
from serin.pipeline.check import check_spec
from serin.spec.load import load_spec
from serin.spec.pipeline import PipelineSpec
from serin.store.store import Store
from tests.fakes.ugly_csv import LEAK, TARGET, write_ugly_csv
from tests.unit.etl.trips import build

ROWS = 8000


@pytest.fixture(scope="module")
def ugly(tmp_path_factory: pytest.TempPathFactory) -> tuple[PipelineSpec, pd.DataFrame, str]:
    """The drafted spec, the clean rows, and the spec's text."""
    folder = tmp_path_factory.mktemp("ugly")
    clean = write_ugly_csv(folder / "ugly.csv", ROWS)
    text = guess_spec(folder / "ugly.csv", TARGET, path_in_spec="ugly.csv")
    (folder / "pipeline.yaml").write_text(text, encoding="utf-8")
    return load_spec(folder / "pipeline.yaml"), clean, text


def test_every_cell_is_read_as_it_is_meant(
    tmp_path: Path, ugly: tuple[PipelineSpec, pd.DataFrame, str]
) -> None:
    spec, clean, _ = ugly
    (file,) = find_table("main", spec.data.tables["main"])
    convert(file, tmp_path / "t.parquet")
    found = pq.read_table(tmp_path / "t.parquet").to_pandas()
    assert list(found.columns) == list(clean.columns)
    assert (found["kundennr"] == clean["kundennr"]).all()
    assert found["kundennr"].max() > 2**53
    assert (found["datum"] == clean["datum"]).all()
    for name in ("betrag", "alter", "versuche", LEAK):
        assert np.array_equal(found[name].astype(float), clean[name].astype(float), equal_nan=True), name
    for name in ("stadt", "kanal", TARGET):
        assert found[name].fillna("").tolist() == clean[name].fillna("").tolist(), name


def test_a_drafted_spec_passes_the_check_and_gives_a_dataset(
    tmp_path: Path, ugly: tuple[PipelineSpec, pd.DataFrame, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, clean, text = ugly
    monkeypatch.setenv("SERIN_HOME", str(tmp_path / "home"))
    inputs = {column.name: column for column in check_spec(spec).inputs}
    assert not {LEAK, "kundennr", TARGET} & inputs.keys()
    assert inputs["stadt"].null_texts == ("NA", "None")
    assert (inputs["betrag"].kind, inputs["alter"].kind, inputs["datum"].kind) == (
        "float",
        "int",
        "timestamp",
    )
    assert f"#   {LEAK}: alone gives the answer away" in text
    dataset = build(spec, Store(str(tmp_path / "store")))
    assert sum(dataset.rows.values()) == ROWS  # each of the repeated rows once
    targets = np.concatenate([read_split(dataset.path, split).whole().target for split in dataset.rows])
    assert targets.sum() == (clean.drop_duplicates()[TARGET] == "ja").sum()
    assert read_dataset(dataset.path).sources[0].csv is not None
