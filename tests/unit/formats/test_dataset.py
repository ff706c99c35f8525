import json
from dataclasses import replace
from pathlib import Path

import pytest

from serin.errors import BundleBroken
from serin.formats.dataset import (
    CategoricalColumn,
    DatasetDescription,
    LookupDescription,
    SourceFile,
    SplitDescription,
    read_dataset,
    write_dataset,
)
from serin.formats.schema import input_columns

DESCRIPTION = DatasetDescription(
    task="multiclass",
    target="grade",
    numeric=("x", "größe"),
    categorical=(CategoricalColumn(name="city", size=5),),
    classes=("bad", "good"),
    splits={"train": SplitDescription(rows=8, parts=1), "test": SplitDescription(rows=2, parts=1)},
    inputs=input_columns([{"name": "x", "kind": "float", "dtype": "FP32"}]),
    lookups=(
        LookupDescription(name="towns", key="city", columns={"size": "INT64"}, file="lookups/towns.parquet"),
    ),
    sources=(SourceFile(table="t", path="/data/t.parquet", size=3, modified="17"),),
    digest="ab" * 32,
    dropped={"null_target": 4},
)


def test_a_description_comes_back_as_it_was_written(tmp_path: Path) -> None:
    write_dataset(tmp_path, DESCRIPTION)
    assert read_dataset(tmp_path) == DESCRIPTION
    write_dataset(tmp_path, replace(DESCRIPTION, task="binary", classes=None))
    assert read_dataset(tmp_path).classes is None
    assert read_dataset(tmp_path).rows == {"train": 8, "test": 2}


@pytest.mark.parametrize("change", [{"version": 2}, {"format": "x"}, {"task": "ranking"}, {"splits": None}])
def test_a_document_that_is_none_of_ours_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    write_dataset(tmp_path, DESCRIPTION)
    file = tmp_path / "dataset.json"
    file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | change), encoding="utf-8")
    with pytest.raises(BundleBroken, match=r"dataset\.json"):
        read_dataset(tmp_path)


def test_a_folder_without_a_description_is_not_a_dataset(tmp_path: Path) -> None:
    with pytest.raises(BundleBroken, match="FileNotFoundError"):
        read_dataset(tmp_path)
