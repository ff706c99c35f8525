"""A table that grows file by file: what was converted before is found, and the dataset is that of a first build."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serin.errors import SourceUnreadable
from serin.etl.sources import tables
from serin.spec.pipeline import PipelineSpec
from serin.store import stage_keys
from serin.store.store import Store
from tests.logs import heard
from tests.unit.etl.trips import build, rates, spec_of, trips

FEATURES = [
    {"columns": ["fare", "rate", "earlier"], "steps": ["fill_median", {"clip": {"q": [0.01, 0.99]}}, "normalize"]},
    {"columns": ["people"], "steps": [{"bucketize": {"quantiles": 4}}]},
    {"columns": ["taxi"], "steps": ["target_encode"]},
    {"columns": ["zone"], "steps": ["categorify"]},
]  # fmt: skip
JOIN = {"with": "rates", "on": "zone", "as_of": {"column": "start", "there": "since"}, "columns": ["rate"],
        "source": "request"}  # fmt: skip
FORMS: dict[str, Callable[[pd.DataFrame, Path], None]] = {
    "csv": lambda frame, path: frame.to_csv(path, index=False),
    "jsonl": lambda frame, path: frame.astype({"start": str}).to_json(path, orient="records", lines=True),
    "parquet": lambda frame, path: frame.to_parquet(path, row_group_size=60),
}


def write(folder: Path, name: str, part: int) -> None:
    """A ninth of the trips; the form is the name's ending."""
    folder.mkdir(exist_ok=True)
    FORMS[name.rpartition(".")[2]](trips().iloc[part * 100 : (part + 1) * 100], folder / name)


def spec_over(folder: Path, *, windows: bool = True, normalize: bool = True) -> PipelineSpec:
    """With windows the split goes by time; without them by row id, and all that is checked is checked."""
    window = {"by": "taxi", "rows": 3, "make": {"earlier": "mean(fare)"}}
    checks = [{"column": "fare", "min": -1, "max": 20, "max_nulls": 0.5, "otherwise": "warn"},
              {"column": "people", "unique": True, "otherwise": "warn"}]  # fmt: skip
    own: dict[str, Any] = {"windows": [window]} if windows else {
        "derived": {"earlier": "fare / people"}, "split": {"kind": "random"}, "checks": checks, "id": "trip",
        "allow_leaks": ["trip"],
    }  # fmt: skip
    first = FEATURES[0] | {"steps": ["fill_median", "normalize" if normalize else "min_max"]}
    spec = spec_of(
        folder,
        tables={"trips": str(folder / "in"), "rates": str(folder / "rates.csv")},
        joins=[JOIN],
        features=[first, *FEATURES[1:]],
        **own,
    )
    if not (folder / "rates.csv").exists():
        rates().to_csv(folder / "rates.csv", index=False)
    return spec


def pieces_found(said: list[str]) -> str:
    return next((line.split(" pieces")[0] for line in said if "pieces were found" in line), "none")


@pytest.fixture
def converted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that are converted, as they are."""
    names: list[str] = []
    real = tables.convert

    def convert(file: Any, target: Path) -> None:
        names.append(Path(file.path).name)
        real(file, target)

    monkeypatch.setattr(tables, "convert", convert)
    return names


@pytest.mark.parametrize("windows", [True, False])
def test_added_files_give_what_a_first_build_of_all_gives(
    tmp_path: Path, converted: list[str], windows: bool
) -> None:
    for part, name in enumerate(("b.csv", "c.jsonl", "d.parquet", "e.csv")):
        write(tmp_path / "in", name, part)
    spec, store = spec_over(tmp_path, windows=windows), Store(str(tmp_path / "store"))
    build(spec, store)
    assert sorted(converted) == ["b.csv", "c.jsonl", "e.csv", "rates.csv"]
    steps: list[tuple[str, int, list[str], str]] = [
        ("f.csv", 5, ["f.csv"], "none"),  # newer: the cuts between splits move; pieces are kept from here on
        ("a.csv", 6, ["a.csv"], "none"),  # before all others: every row gets another id
        ("c.jsonl", 7, ["c.jsonl"], "5 of 6"),  # another content under a name that was there
        ("g.parquet", 8, [], "6 of 7"),
    ]
    for name, part, expected, found in steps:
        write(tmp_path / "in", name, part)
        converted.clear()
        said: list[str] = []
        with heard(said.append):
            grown = build(spec, store)
        assert converted == expected
        assert pieces_found(said) == found
        assert grown.digest == build(spec, Store(str(tmp_path / f"fresh-{part}"))).digest
    (tmp_path / "in" / "f.csv").unlink()
    converted.clear()
    with heard(said.append):
        fewer = build(spec, store)
    assert converted == []
    assert fewer.digest == build(spec, Store(str(tmp_path / "fresh-fewer"))).digest


def test_other_steps_find_the_pieces_and_other_partners_do_not(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "store"))

    def built(spec: PipelineSpec) -> str:
        said: list[str] = []
        with heard(said.append):
            made = build(spec, store)
        fresh = Store(str(tmp_path / f"fresh-{len(list(tmp_path.iterdir()))}"))
        assert made.digest == build(spec, fresh).digest
        return pieces_found(said)

    for part in range(3):
        write(tmp_path / "in", f"{part}.parquet", part)
    spec, other = spec_over(tmp_path), spec_over(tmp_path, normalize=False)
    assert [built(spec), built(other)] == ["none", "none"]
    write(tmp_path / "in", "3.parquet", 3)
    assert [built(spec), built(other)] == ["3 of 4", "4 of 4"]
    kept = sorted((tmp_path / "store" / "kept" / "pieces").rglob("*"))
    files = [path for path in kept if path.is_file()]
    files[0].write_bytes(files[0].read_bytes()[:-200])  # a checksum tells
    files[1].write_bytes(b"")
    write(tmp_path / "in", "4.parquet", 4)
    assert built(spec) == "4 of 5"
    rates().assign(rate=1.5).to_csv(tmp_path / "rates.csv", index=False)
    assert built(spec) == "none"
    left = [path for path in (tmp_path / "store" / "kept" / "pieces").rglob("*") if path.is_file()]
    assert len(left) == 5  # those of the old rates are gone


def test_other_code_or_libraries_find_nothing_that_was_kept(
    tmp_path: Path, converted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for part in range(3):
        write(tmp_path / "in", f"{part}.csv", part)
    spec, store, said = spec_over(tmp_path), Store(str(tmp_path / "store")), list[str]()
    build(spec, store)
    write(tmp_path / "in", "3.csv", 3)
    first = build(spec, store)  # pieces are kept from here on
    for name, value in (("versions", "numpy=99.0"), ("sources_digest", "other code")):
        monkeypatch.setattr(stage_keys, name, lambda _, value=value: value)
        converted.clear()
        with heard(said.append):
            again = build(spec, store)
        assert sorted(converted) == ["0.csv", "1.csv", "2.csv", "3.csv", "rates.csv"]
        assert pieces_found(said) == "none"
        assert again.digest == first.digest
        assert (
            again.path != first.path
        )  # nobody takes one for the other: columns that are not exact may differ
        first = again
    assert build(spec, store).path == first.path


def test_a_fresh_build_believes_nothing_that_was_kept_and_replaces_it(tmp_path: Path) -> None:
    for part in range(3):
        write(tmp_path / "in", f"{part}.csv", part)
    spec, store = spec_over(tmp_path), Store(str(tmp_path / "store"))
    right = build(spec, store)
    wrong = tmp_path / "wrong.parquet"
    trips().iloc[500:600].to_parquet(wrong)
    kept = sorted((tmp_path / "store" / "kept" / "converted").iterdir())
    for entry in kept:
        if "trip" in pq.read_schema(entry).names:
            shutil.copyfile(wrong, entry)
    assert build(spec, store) == right  # found as it was published
    assert build(spec, store, fresh=True) == right
    write(tmp_path / "in", "3.csv", 3)
    grown = build(spec, store)
    assert grown.digest == build(spec, Store(str(tmp_path / "fresh"))).digest


def test_a_build_killed_in_the_middle_leaves_its_finished_files_to_the_next(
    tmp_path: Path, converted: list[str]
) -> None:
    for part in range(4):
        write(tmp_path / "in", f"{part}.csv", part)
    spec, store = spec_over(tmp_path), Store(str(tmp_path / "store"))
    (tmp_path / "spec.json").write_text(spec.model_dump_json(by_alias=True))
    program = f"""
import os, signal, sys
from pathlib import Path
from serin.etl.sources import tables
from serin.etl.build import build_dataset
from serin.spec.pipeline import PipelineSpec
from serin.store.store import Store
real = tables.convert
def convert(file, target):
    if file.path.endswith("2.csv"):
        target.write_bytes(b"half a file")
        os.kill(os.getpid(), signal.SIGKILL)
    real(file, target)
tables.convert, tables._CONVERTED_AT_ONCE = convert, 1
spec = PipelineSpec.model_validate_json(Path({str(tmp_path / "spec.json")!r}).read_text())
build_dataset(spec.data, spec.features, spec.etl, store=Store({str(tmp_path / "store")!r}))
"""
    ended = subprocess.run([sys.executable, "-c", program], cwd=Path.cwd(), timeout=120, env=dict(os.environ))
    assert ended.returncode == -signal.SIGKILL
    assert store.datasets() == []
    resumed = build(spec, store)
    assert sorted(converted) == ["2.csv", "3.csv", "rates.csv"]
    assert resumed.digest == build(spec, Store(str(tmp_path / "fresh"))).digest


def test_a_file_that_changes_while_it_is_read_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "in", "a.csv", 0)
    spec, store = spec_over(tmp_path), Store(str(tmp_path / "store"))
    real = tables.convert

    def convert(file: Any, target: Path) -> None:
        real(file, target)
        write(tmp_path / "in", "a.csv", 1)

    monkeypatch.setattr(tables, "convert", convert)
    with pytest.raises(SourceUnreadable, match=r"a\.csv cannot be read: it changed while it was read"):
        build(spec, store)
    assert [path for path in (tmp_path / "store" / "kept").rglob("*") if path.is_file()] == []


def test_where_nothing_can_be_cached_the_build_continues(tmp_path: Path, converted: list[str]) -> None:
    for part in range(2):
        write(tmp_path / "in", f"{part}.csv", part)
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "kept").write_text("a file where a folder would be")
    spec = spec_over(tmp_path)
    for part in (2, 3):
        write(tmp_path / "in", f"{part}.csv", part)
        made = build(spec, Store(str(tmp_path / "store")))
    assert converted.count("0.csv") == 2
    assert made.digest == build(spec, Store(str(tmp_path / "fresh"))).digest


def test_a_file_that_moves_by_one_of_its_pieces_is_not_mistaken_for_itself(tmp_path: Path) -> None:
    frame, folder, store = trips(), tmp_path / "in", Store(str(tmp_path / "store"))
    folder.mkdir()
    for name, start in (("b", 0), ("c", 200)):
        frame.iloc[start : start + 200].to_parquet(folder / f"{name}.parquet", row_group_size=100)
    spec = spec_over(tmp_path, windows=False)
    build(spec, store, piece_rows=100)
    frame.iloc[400:500].to_parquet(folder / "d.parquet")
    build(spec, store, piece_rows=100)  # keeps its pieces
    (folder / "d.parquet").rename(folder / "a.parquet")  # in front: all others move by 100 rows
    moved = build(spec, store, piece_rows=100)
    assert moved.digest == build(spec, Store(str(tmp_path / "fresh")), piece_rows=100).digest


@settings(max_examples=3, deadline=None)
@given(st.data())
def test_whatever_happens_to_the_files_the_dataset_is_that_of_a_first_build(data: st.DataObject) -> None:
    frame, names = trips(300), [f"{letter}.{form}" for letter in "abcd" for form in ("parquet", "csv")]
    with tempfile.TemporaryDirectory() as place:
        home = Path(place)
        spec, store = spec_over(home, windows=data.draw(st.booleans())), Store(str(home / "store"))
        folder = home / "in"
        folder.mkdir()
        for lap in range(3):
            for name in data.draw(st.lists(st.sampled_from(names), min_size=2, max_size=3, unique=True)):
                start = data.draw(st.sampled_from([0, 50, 100, 150]))
                part = frame.iloc[start : start + 100]
                if (folder / name).exists() and data.draw(st.booleans()):
                    (folder / name).unlink()
                elif name.endswith("csv"):
                    part.to_csv(folder / name, index=False)
                else:
                    part.to_parquet(folder / name, row_group_size=data.draw(st.sampled_from([25, 50])))
            if any(folder.iterdir()):
                grown = build(spec, store, piece_rows=50)
                assert grown.digest == build(spec, Store(str(home / f"fresh-{lap}")), piece_rows=50).digest
