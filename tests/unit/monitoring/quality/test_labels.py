from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pytest

from serin.errors import StoreNotWritable
from serin.monitoring.capture.read import records_in
from serin.monitoring.quality.follow import Follower, Hooks, QualityState, count_again, forget_rows
from serin.monitoring.quality.keys import KeyIndex
from serin.monitoring.quality.labels import Added, Columns, TruthOf, add_labels
from serin.monitoring.quality.scan import Found, Watched, search
from serin.monitoring.quality.store import label_files, quality_folder
from tests.fakes.labelled import BEGAN, MODEL, data, record, requests, schema, truth_of, watched
from tests.kit.recorded_parts import write_part

NOW = BEGAN + 2 * 86_400


def add(home: Path, table: pa.Table, of: TruthOf | None = None, *, now: float = NOW, **columns: Any) -> Added:
    return add_labels(home, of or truth_of(), table, Columns(**columns), now)


class Followed:
    """A follower that remembers what it was given."""

    def __init__(self, home: Path, *versions: Watched) -> None:
        known = {each.version: each for each in versions or (watched(1),)}
        self.recorded = 0
        self.labelled: list[pa.Table] = []
        self.home = home
        self.follower = Follower(home, MODEL, known.get, Hooks(recorded=self._record, labelled=self._label))

    def _record(self, watched: Watched, rows: pa.Table, state: QualityState) -> None:
        self.recorded += rows.num_rows

    def _label(self, watched: Watched, rows: pa.Table, state: QualityState) -> None:
        self.labelled.append(rows)

    def run(self) -> Self:
        while self.follower.advance(records_in(self.home)):
            pass
        return self

    def joined(self, version: int = 1) -> dict[tuple[str, int], Any]:
        table = self.follower.joined.read(version)
        if table is None:
            return {}
        keys = zip(table.column("_id").to_pylist(), table.column("_row").to_pylist(), strict=True)
        return dict(sorted(zip(keys, table.column("label").to_pylist(), strict=True)))


def expected(recorded: Any, rows: Any = slice(None)) -> dict[tuple[str, int], Any]:
    table = recorded.labels(rows)
    keys = zip(table.column("_id").to_pylist(), table.column("_row").to_pylist(), strict=True)
    return dict(zip(keys, table.column("_label").to_pylist(), strict=True))


def test_shuffled_labels_of_requests_with_several_rows_find_their_rows(home: Path) -> None:
    made = record(home, 60, each=3)
    order = np.random.default_rng(1).permutation(60)
    add(home, made.labels(order))
    followed = Followed(home).run()
    assert followed.joined() == expected(made)
    assert (followed.recorded, sum(each.num_rows for each in followed.labelled)) == (60, 60)


def test_a_label_that_comes_before_its_record_is_kept_and_joined_later(home: Path) -> None:
    early = record(home, 5)
    later = {"_id": ["7-1-0", "never"], "_label": [1, 0]}
    add(home, pa.table(later))
    followed = Followed(home).run()
    assert (followed.joined(), followed.follower.waiting()) == ({}, 2)
    record(home, 1, seed=7)
    add(home, early.labels(), now=NOW + 1)
    again = Followed(home).run()  # a restart in the meantime
    assert again.joined() == {**expected(early), ("7-1-0", 0): 1.0}
    assert again.follower.waiting() == 1
    assert again.recorded == 1


@pytest.mark.parametrize("by", ["arrival", "time"])
def test_the_last_correction_wins(home: Path, by: str) -> None:
    made = record(home, 4)
    first = pa.table({"_id": made.table.column("_id"), "_label": [0, 0, 0, 0], "at": [_us(9)] * 4})
    second = pa.table({"_id": ["0-1-0", "0-1-1"], "_label": [1, 1], "at": [_us(10), _us(8)]})
    time = "at" if by == "time" else None
    for now, table in enumerate((first, second)):
        add(home, table, now=NOW + now, time=time)
    followed = Followed(home).run()
    newer = 1.0 if by == "arrival" else 0.0  # by its own time the second one is older
    assert list(followed.joined().values()) == [1.0, newer, 0.0, 0.0]
    assert sum(each.num_rows for each in followed.labelled) == 4  # a correction is not a new label


def _us(hour: int) -> Any:
    return np.datetime64(f"2026-03-02T{hour:02d}:00:00", "us")


def test_the_same_labels_twice_change_nothing(home: Path) -> None:
    made = record(home, 10)
    assert add(home, made.labels()).file is not None
    assert add(home, made.labels(), now=NOW + 1).file is None
    add(home, made.labels(slice(3)), now=NOW + 2)  # a part of them once more
    followed = Followed(home).run()
    assert followed.joined() == expected(made)
    assert sum(each.num_rows for each in followed.labelled) == 10


def test_repeated_rows_of_a_table_count_once_and_rows_without_a_label_are_missing(home: Path) -> None:
    table = pa.table({"_id": ["a", "a", "b", "c", None], "_label": [0, 1, None, 1, 1]})
    added = add(home, table)
    assert (added.stored, added.repeated, added.missing, added.without_key) == (2, 1, 1, 1)
    (file,) = label_files(home, MODEL)
    assert file.read().column("label").to_pylist() == [1.0, 1.0]


def test_a_client_s_id_that_two_requests_share_is_counted_and_not_guessed(home: Path) -> None:
    made = record(home, 3)
    shared = requests(1, seed=5).table.set_column(2, "_client_id", pa.array(["client-0-1"]))
    write_part(home, MODEL, 1, shared)
    add(home, pa.table({"order": made.table.column("_client_id"), "_label": [1, 1, 1]}), client_id="order")
    followed = Followed(home).run()
    assert set(followed.joined()) == {("0-1-0", 0), ("0-1-2", 0)}
    assert (followed.follower.state.ambiguous, followed.follower.waiting()) == (1, 0)


@pytest.mark.parametrize("row", [None, 0])
def test_a_client_s_id_of_two_requests_is_not_guessed_by_their_numbers_of_rows(
    home: Path, row: int | None
) -> None:
    shared = [requests(3, seed=1, each=3).table, requests(1, seed=2).table]
    for table in shared:
        same = pa.array(["same"] * table.num_rows)
        write_part(home, MODEL, 1, table.set_column(2, "_client_id", same))
    labels = {"_client_id": ["same"], "_row": pa.array([row], pa.int32()), "_label": [1]}
    add(home, pa.table(labels))
    followed = Followed(home).run()
    state = followed.follower.state
    assert followed.joined() == {}
    assert (state.ambiguous, state.unclear, followed.follower.waiting()) == (1, 0, 0)


def test_a_client_s_id_used_again_after_the_label_came_is_another_request(home: Path) -> None:
    record(home, 1)
    add(home, pa.table({"_client_id": ["client-0-0"], "_label": [1]}))
    followed = Followed(home).run()
    again = requests(1, seed=5, began=NOW + 60).table
    write_part(home, MODEL, 1, again.set_column(2, "_client_id", pa.array(["client-0-0"])))
    followed.run()
    assert (followed.joined(), followed.recorded) == ({("0-1-0", 0): 1.0}, 2)


def test_a_label_without_a_row_is_not_used_for_a_request_with_several(home: Path) -> None:
    record(home, 4, each=2)
    add(home, pa.table({"_id": ["0-1-0", "0-1-1"], "_row": [None, 1.0], "_label": [1, 1]}))
    followed = Followed(home).run()
    assert set(followed.joined()) == {("0-1-1", 1)}
    assert followed.follower.state.unclear == 1


def test_labels_by_the_spec_s_key_and_time_hold_for_every_request_about_it(home: Path) -> None:
    spec = data(id="flight", time="day")
    known = watched(1, data=spec)
    record(home, 3)
    labels = {
        "flight": ["F0", "F2", "F2"],
        "day": ["2026-03-01", "2026-03-01", "2026-03-09"],
        "arr_delay": [20, 3, 99],
    }
    added = add(home, pa.table(labels), truth_of(data=spec))
    assert added.key.by == ("flight", "day")
    followed = Followed(home, known).run()
    record(home, 1, seed=3)  # F0 is asked about again, on the same day
    followed.run()
    assert followed.joined() == {("0-1-0", 0): 1.0, ("0-1-2", 0): 0.0, ("3-1-0", 0): 1.0}


def test_labels_join_by_request_columns_that_the_caller_names(home: Path) -> None:
    made = record(home, 3)
    labels = made.table.select(["flight", "distance"]).append_column("late", pa.array([True, False, True]))
    add(home, labels, on=("flight", "distance"), value="late")
    followed = Followed(home).run()
    assert list(followed.joined().values()) == [1.0, 0.0, 1.0]


def test_labels_of_another_target_are_not_used_for_a_version(home: Path) -> None:
    made = record(home, 3)
    add(home, made.labels())
    followed = Followed(home, watched(1, data=data("arr_delay > 30"))).run()
    assert followed.joined() == {}


def test_the_target_is_computed_from_raw_and_derived_columns(home: Path) -> None:
    spec = data("late", derived={"late": "delay_h * 60 > 15"})
    add(home, pa.table({"_id": ["a", "b", "c"], "delay_h": [0.1, 1.0, None]}), truth_of(data=spec))
    (file,) = label_files(home, MODEL)
    assert file.read().column("label").to_pylist() == [0.0, 1.0]


def test_a_class_is_stored_by_its_name(home: Path) -> None:
    classes = truth_of(data=data("stars", "multiclass"), schema=schema("multiclass", ("1", "2", "3")))
    add(home, pa.table({"_id": ["a", "b"], "stars": [3, 1]}), classes)
    (file,) = label_files(home, MODEL)
    assert file.read().column("label").to_pylist() == ["3", "1"]


@pytest.mark.parametrize("recorded_first", [True, False])
def test_a_row_that_a_recorded_request_does_not_have_is_counted_and_does_not_wait(
    home: Path, recorded_first: bool
) -> None:
    labels = pa.table({"_id": ["0-1-0", "0-1-0", "later"], "_row": [1, 2, 7], "_label": [1, 1, 1]})
    followed = Followed(home)
    for step in ("record", "label") if recorded_first else ("label", "record"):
        if step == "record":
            record(home, 4, each=2)
        else:
            add(home, labels)
        followed.run()
    assert set(followed.joined()) == {("0-1-0", 1)}
    assert (followed.follower.state.beyond, followed.follower.waiting()) == (1, 1)


def test_labels_that_cannot_be_written_are_an_error_that_names_the_folder(home: Path) -> None:
    home.mkdir()
    (home / "labels").write_text("a file where the folder should be")
    with pytest.raises(StoreNotWritable, match="labels"):
        add(home, pa.table({"_id": ["a"], "_label": [1]}))


def test_labels_go_with_the_records_of_their_rows(home: Path) -> None:
    made = record(home, 4)
    add(home, made.labels())
    add(home, pa.table({"_client_id": ["client-0-2", "other"], "_label": [1, 1]}), now=NOW + 1)
    followed = Followed(home).run()
    kept = expected(made, [0, 1, 3])
    gone = forget_rows(home, MODEL, {1: made.table.slice(2, 1)}, {1: watched(1)}.get)
    assert gone == 2  # by its id and by the client's
    assert followed.joined() == kept
    assert [file.rows for file in label_files(home, MODEL)] == [3, 1]


def test_unfinished_files_of_killed_processes_go_with_the_labels(home: Path) -> None:
    made = record(home, 4)
    add(home, made.labels())
    add(home, pa.table({"_id": ["unknown"], "_label": [1]}), now=NOW + 1)  # waits for its record
    Followed(home).run()
    folders = {path.parent for path in home.rglob("*.parquet") if "captures" not in path.parts}
    assert len(folders) == 3, "labels, those that wait, and labelled rows"
    for folder in folders:
        path = next(folder.glob("*.parquet"))
        path.with_name(f".{path.name}.0123456789ab").write_bytes(path.read_bytes()[:-9])
    count_again(home, MODEL)
    assert not list(home.rglob(".*.parquet.*"))
    assert len(label_files(home, MODEL)) == 2


def test_rows_that_share_a_label_by_their_columns_keep_it_when_another_of_them_is_forgotten(
    home: Path,
) -> None:
    first, again = record(home, 1), record(home, 1, seed=3)  # both about flight F0
    add(home, pa.table({"flight": ["F0"], "_label": [1]}), on=("flight",))
    followed = Followed(home).run()
    assert len(followed.joined()) == 2
    forget_rows(home, MODEL, {1: first.table}, {1: watched(1)}.get)
    followed.run()
    assert set(followed.joined()) == {(again.table.column("_id")[0].as_py(), 0)}


def test_a_label_that_is_forgotten_while_it_is_being_joined_does_not_come_back(home: Path) -> None:
    made = record(home, 4)
    add(home, made.labels())
    followed = Followed(home)
    assert followed.follower.advance(records_in(home))  # the records
    assert followed.follower.advance(records_in(home))  # the labels are read, and the first rows are found
    forget_rows(home, MODEL, {1: made.table.slice(2, 1)}, {1: watched(1)}.get)
    followed.run()
    assert followed.joined() == expected(made, [0, 1, 3])


def test_old_labels_are_deleted_with_old_records(home: Path) -> None:
    made = record(home, 2)
    late = record(home, 1, seed=2, began=NOW)
    add(home, made.labels(), now=BEGAN + 60)
    add(home, late.labels(), now=NOW + 60)
    followed = Followed(home).run()
    followed.follower.delete_before(NOW - 3600)
    assert followed.joined() == expected(late)
    assert len(label_files(home, MODEL)) == 1


def test_work_that_was_interrupted_is_done_again_with_the_same_result(home: Path) -> None:
    made = record(home, 30)
    add(home, made.labels(slice(20)))
    Followed(home).run()
    (quality_folder(home, MODEL) / "state.json").unlink()  # killed before it was written
    again = Followed(home).run()
    assert again.joined() == expected(made, slice(20))
    assert again.labelled == []  # a label is evidence once


def test_a_search_says_which_labels_have_a_row(home: Path) -> None:
    made = record(home, 3)
    table = pa.concat_tables(
        [made.labels(), pa.table({"_id": ["new"], "_row": pa.array([0], pa.int32()), "_label": [1.0]})]
    )
    added = add(home, table)
    assert added.file is not None
    found = Found()
    labels, known = added.file.read(), {1: watched(1)}.get
    for found in search(records_in(home), MODEL, added.file, labels, known, KeyIndex()):  # noqa: B007
        pass
    assert found.labels == {0, 1, 2}
