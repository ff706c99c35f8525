"""The digests of a new dataset's files are computed beside the work, and nobody sees the difference."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from serin.etl import build as building
from serin.etl.build import build_dataset
from serin.etl.sources import late_digests
from serin.etl.sources.late_digests import Sources
from serin.formats.dataset import read_dataset
from serin.spec.etl import EtlSpec
from serin.spec.load import load_spec
from serin.store import file_digests
from serin.store.artifacts import Dataset
from serin.store.store import Store
from tests.logs import heard


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A table that had not changed for a while."""
    monkeypatch.setattr(file_digests, "_SETTLED_NS", 0)
    path = tmp_path / "t.parquet"
    write(path, seed=1)
    return path


def write(path: Path, *, seed: int) -> None:
    draw = np.random.default_rng(seed)
    pq.write_table(pa.table({"a": draw.random(200), "b": draw.integers(0, 2, 200)}), path)


def build(path: Path, store: Store, *, name: str = "t") -> Dataset:
    data = {"tables": {"t": str(path)}, "target": {"expression": "b == 1", "task": "binary"}}
    spec = load_spec({"name": name, "data": data, "features": [{"columns": ["a"], "steps": ["normalize"]}]})
    return build_dataset(spec.data, spec.features, EtlSpec(), store=store, name=name)


def test_a_dataset_is_the_same_with_digests_before_and_beside(
    tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside = build(file, Store(str(tmp_path / "beside")))
    monkeypatch.setattr(building, "find_settled", lambda _: None)
    before = build(file, Store(str(tmp_path / "before")))
    assert beside.digest == before.digest
    sources = [read_dataset(Path(made.path)).sources for made in (beside, before)]
    assert sources[0] == sources[1]
    assert sources[0][0].content.startswith("sha256-tree:")


def test_a_dataset_is_found_again_also_under_another_name(file: Path, store: Store) -> None:
    first = build(file, store)
    for name in ("t", "other"):
        said: list[str] = []
        with heard(said.append):
            assert build(file, store, name=name).path == first.path
        assert any("is there already" in line for line in said)
    write(file, seed=2)  # of the same size
    assert build(file, store, name="third").digest != first.digest


def test_a_file_that_is_replaced_while_it_is_read_is_read_again(
    tmp_path: Path, file: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def replaced(compute: Callable[[], Sources]) -> AbstractContextManager[Callable[[], Sources]]:
        write(tmp_path / "new", seed=3)
        (tmp_path / "new").replace(file)  # after the files were found, before their digests
        return late_digests.computed_beside(compute)

    monkeypatch.setattr(building, "computed_beside", replaced)
    said: list[str] = []
    with heard(said.append):
        made = build(file, store)
    assert any("building again" in line for line in said)
    assert made.digest == build(file, Store(str(tmp_path / "other"))).digest


def test_a_file_of_a_moment_ago_is_hashed_first(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert late_digests.find_settled({"t": str(file)}) is not None
    monkeypatch.setattr(file_digests, "_SETTLED_NS", 2 * 10**9)
    write(file, seed=4)
    assert late_digests.find_settled({"t": str(file)}) is None
