"""One long string among many rows: what reads data needs memory for the strings, not for rows times the longest."""

import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from serin.columns.segments import group_masks
from serin.export.drift.choose_bins import _categories
from serin.expressions import Masked, evaluate, parse
from serin.formats.captures import METADATA, bytes_in_memory, captures_folder
from serin.formats.drift import BinnedColumn
from serin.formats.schema import InputColumn
from serin.models.foreign.own_inputs import _wire
from serin.monitoring.capture import merge
from serin.monitoring.capture.forget import forget
from serin.monitoring.capture.read import captured, captured_tables
from serin.monitoring.capture.retention import HomeHours
from serin.monitoring.quality.labels import Columns, add_labels
from tests.fakes.labelled import data, schema, truth_of
from tests.kit.recorded_parts import write_part

ROWS, LONG = 3000, "x" * 60_000
NAMES = pa.array([LONG, *(f"n{number % 7}" for number in range(ROWS - 1))])
BOUND = 40e6  # as fixed-width texts: 720 MB
NOON = 1772366400.0


def peak(act: Callable[[], object]) -> int:
    """The most bytes that Python and numpy had at once, beyond those from before."""
    tracemalloc.start()
    try:
        act()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def records(home: Path, names: pa.Array = NAMES) -> None:
    count = len(names)
    table = pa.table(
        {
            "_id": [f"id-{number}" for number in range(count)],
            "_row": pa.array([0] * count, pa.int32()),
            "_t": pa.array([round(NOON * 1e6)] * count, pa.int64()).cast(METADATA["_t"]),
            "name": names,
        }
    )
    write_part(home, "taxis", 1, table)


def test_a_person_is_forgotten_beside_a_long_string(tmp_path: Path) -> None:
    records(tmp_path)
    assert peak(lambda: forget(HomeHours(tmp_path, "taxis"), "name = 'n3' or name > 'xx'")) < BOUND
    names = captured(tmp_path, "taxis")["name"].to_pylist()
    assert len(names) == ROWS - 1 - sum(name == "n3" for name in NAMES.to_pylist())
    assert LONG not in names


COMPARED: dict[str, Callable[[str], bool]] = {
    "name == 'n3'": lambda name: name == "n3",
    "name < 'n5'": lambda name: name < "n5",
    "name in ('n1', 'n2')": lambda name: name in ("n1", "n2"),
    "name != other": lambda _: False,
    "'a' < 'b'": lambda _: True,
}


@pytest.mark.parametrize("text", COMPARED)
def test_expressions_compare_long_strings(text: str) -> None:
    values = np.asarray(NAMES.to_pylist(), dtype=object)
    columns = {each: Masked(values, np.zeros(ROWS, bool)) for each in ("name", "other")}
    found: list[Masked] = []
    assert peak(lambda: found.append(evaluate(parse(text), columns))) < BOUND
    assert found[0].values.tolist() == list(map(COMPARED[text], values))


def test_segments_of_long_strings() -> None:
    found: list[dict[str, np.ndarray[tuple[int], np.dtype[np.bool_]]]] = []
    assert peak(lambda: found.append(group_masks(pa.table({"name": NAMES}), ["name"]))) < BOUND
    assert [(name, int(mask.sum())) for name, mask in found[0].items()][:2] == [
        ("name=n0", 429),
        ("name=n1", 429),
    ]
    assert list(found[0])[-1] == f"name={LONG}"


def test_bins_of_long_strings() -> None:
    column = BinnedColumn(name="name", field="name", source="request", kind="category")
    period = np.zeros(ROWS, np.int64)
    names = pa.array([LONG, *(f"n{number}" for number in range(ROWS - 1))])
    assert peak(lambda: _categories(column, pa.chunked_array([names]), period)) < BOUND


def test_golden_rows_with_long_strings() -> None:
    column = InputColumn(name="name", dtype="BYTES", kind="string", null="")
    values = np.asarray(NAMES.to_pylist(), dtype=object)
    assert peak(lambda: _wire(values, column, Path("golden.npz"), "the model")) < BOUND


def test_labels_with_a_long_string(home: Path) -> None:
    classes = tuple(NAMES.unique().to_pylist())
    of = truth_of(data=data("carrier", "multiclass"), schema=schema("multiclass", classes))
    table = pa.table({"_id": [f"id-{number}" for number in range(ROWS)], "_label": NAMES})
    assert peak(lambda: add_labels(home, of, table, Columns(), NOON)) < BOUND


def test_files_of_records_are_merged_only_as_far_as_memory_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merge, "_LARGE_BYTES", 4_000_000)
    for _ in range(8):
        records(
            tmp_path, pa.array([LONG] * 20)
        )  # 1.2 MB in memory; on disk a string that is repeated is there once
    merge.merge_parts(tmp_path, "taxis", NOON + 86_400)
    files = list(captures_folder(tmp_path, "taxis").rglob("*.parquet"))
    assert len(files) == 3
    assert max(map(bytes_in_memory, files)) < 4_000_000
    assert sum(path.stat().st_size for path in files) < 1_000_000
    tables = list(captured_tables(tmp_path, "taxis"))
    assert [table.num_rows for table in tables] == [60, 60, 40], "read a file at a time"
