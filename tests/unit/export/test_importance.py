"""Permutation importance: by raw column, the same in every run, read back from the bundle."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from serin.export import importance as measured
from serin.export.importance import measure_importance
from serin.formats.bundle import write_document
from serin.formats.explain import FeatureColumns
from serin.formats.importance import FILE, read_importance
from tests.fakes.datasets import make_dataset

# Features a, b, c (numbers), d, e (codes). The target is a - 0.5 b (d > 3) + an effect of e; c says nothing.
COLUMNS = FeatureColumns(
    numeric=("raw", "b", "c"), categorical=("raw", "e"), sources=dict.fromkeys(("raw", "b", "c", "e"), "request")
)  # fmt: skip


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(make_dataset(tmp_path_factory.mktemp("dataset")).path)


def logits(num: np.ndarray, cat: np.ndarray) -> np.ndarray:
    """A model that knows the first number and the first code of the column `raw`, a little of b, nothing of c and e."""
    return (num[:, 0] - 0.5 * num[:, 1] * (cat[:, 0] > 3)).astype(np.float32)[:, None]


def test_a_column_is_as_important_as_what_the_model_loses_without_it(dataset: Path) -> None:
    found = measure_importance(logits, dataset, COLUMNS, "binary")
    assert found is not None
    losses = {each.column: each.loss for each in found.columns}
    assert [each.column for each in found.columns][:2] == ["raw", "b"]
    assert losses["raw"] > 3 * losses["b"] > 0
    assert losses["c"] == losses["e"] == 0
    assert all(each.low <= each.loss <= each.high for each in found.columns)
    assert (found.metric, found.rows, found.repeats) == ("auc", 800, 5)
    assert measure_importance(logits, dataset, COLUMNS, "binary") == found


def test_a_slow_model_gets_fewer_repeats_of_the_same(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = measure_importance(logits, dataset, COLUMNS, "binary")
    monkeypatch.setattr(measured, "_SECONDS", -1.0)
    short = measure_importance(logits, dataset, COLUMNS, "binary")
    assert whole is not None
    assert short is not None
    assert short.repeats == 1
    bands = {each.column: (each.low, each.high) for each in whole.columns}
    assert all(bands[each.column][0] <= each.loss <= bands[each.column][1] for each in short.columns)


def test_a_bundle_gives_it_back_and_an_older_one_has_none(dataset: Path, tmp_path: Path) -> None:
    assert read_importance(tmp_path) is None
    found = measure_importance(logits, dataset, COLUMNS, "binary", "logloss")
    assert found is not None
    write_document(tmp_path / FILE, found.to_json())
    assert read_importance(tmp_path) == found
