"""A folder that is kept in a store: what the next writer finds, and what a writer that was replaced can still do."""

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from serin.errors import FileBroken, LeadershipLost, StoreUnreachable
from serin.store.mirror import Mirror, fetch
from serin.store.objects import FolderObjects

PREFIX = "cluster/watch"


class Cut(FolderObjects):
    """A store that breaks off when something is written for which `at` is true."""

    at: Callable[[str], bool] = staticmethod(lambda _: False)

    def put(self, key: str, content: bytes) -> None:
        if self.at(key):
            raise StoreUnreachable(url=self.url, reason="it went away")
        super().put(key, content)


@pytest.fixture
def store(tmp_path: Path) -> Cut:
    return Cut(tmp_path / "store")


def writer(store: FolderObjects, folder: Path, term: int) -> Mirror:
    made = Mirror(store, PREFIX, folder, ("alerts", "watch"))
    made.adopt(term)
    return made


def write(folder: Path, name: str, text: str) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)


def seen(store: FolderObjects, folder: Path, *folders: str) -> dict[str, str]:
    """What somebody who reads has."""
    fetch(store, PREFIX, folder, *folders)
    paths = [path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".")]
    return {path.relative_to(folder).as_posix(): path.read_text() for path in paths}


def test_the_next_writer_has_what_the_last_one_left_and_nothing_of_its_own_from_before(
    store: Cut, tmp_path: Path
) -> None:
    one = writer(store, tmp_path / "a", 1)
    write(tmp_path / "a", "watch/drift/taxis.json", "counted")
    write(tmp_path / "a", "watch/drift/.scratch", "half")
    write(tmp_path / "a", "captures/taxis/rows", "not kept")
    one.push(1)
    write(tmp_path / "b", "watch/drift/flights.json", "of an earlier term")
    write(tmp_path / "b", "captures/flights/rows", "its own")
    writer(store, tmp_path / "b", 2)
    found = sorted(path.relative_to(tmp_path / "b").as_posix() for path in (tmp_path / "b").rglob("*.json"))
    assert found == ["watch/drift/taxis.json"]
    assert (tmp_path / "b" / "watch" / "drift" / "taxis.json").read_text() == "counted"
    assert (tmp_path / "b" / "captures" / "flights" / "rows").read_text() == "its own"


def test_an_upload_that_breaks_off_leaves_the_state_before_it(store: Cut, tmp_path: Path) -> None:
    one = writer(store, tmp_path / "a", 1)
    for name in ("alerts/book", "watch/state"):
        write(tmp_path / "a", name, "first")
    one.push(1)
    for name in ("alerts/book", "watch/state"):
        write(tmp_path / "a", name, f"second {name}")
    count = iter([False, True])
    store.at = lambda _: next(count, False)
    with pytest.raises(StoreUnreachable):
        one.push(1)
    assert seen(store, tmp_path / "copy") == {"alerts/book": "first", "watch/state": "first"}
    two = writer(store, tmp_path / "b", 2)
    assert (tmp_path / "b" / "watch" / "state").read_text() == "first"
    two.push(2)
    named = len(store.keys(f"{PREFIX}/files/"))
    assert named == 1, "what was uploaded and never named is gone"  # both files had the same content
    with pytest.raises(LeadershipLost):
        one.push(1)


def test_a_late_write_of_an_earlier_writer_is_refused_and_destroys_nothing(
    store: Cut, tmp_path: Path
) -> None:
    one = writer(store, tmp_path / "a", 1)
    write(tmp_path / "a", "alerts/book", "old")
    one.push(1)
    write(tmp_path / "a", "alerts/book", "newer")
    one.push(1)
    two = writer(store, tmp_path / "b", 2)
    write(tmp_path / "b", "alerts/book", "old")  # as it was once: the content that the first one would remove
    two.push(2)
    write(tmp_path / "a", "alerts/book", "late")
    for _ in range(2):
        with pytest.raises(LeadershipLost):
            one.push(1)
    assert seen(store, tmp_path / "copy") == {"alerts/book": "old"}
    with pytest.raises(LeadershipLost):
        Mirror(store, PREFIX, tmp_path / "a", ("alerts", "watch")).adopt(1)
    assert seen(store, tmp_path / "copy") == {"alerts/book": "old"}


def test_a_part_is_pushed_and_fetched_without_the_rest(store: Cut, tmp_path: Path) -> None:
    one = writer(store, tmp_path / "a", 1)
    write(tmp_path / "a", "alerts/book", "fired")
    write(tmp_path / "a", "watch/large", "rows")
    one.push(1, "alerts")
    assert seen(store, tmp_path / "copy") == {"alerts/book": "fired"}
    one.push(1)
    write(tmp_path / "a", "alerts/book", "resolved")
    one.push(1, "alerts")
    assert seen(store, tmp_path / "copy", "watch") == {"alerts/book": "fired", "watch/large": "rows"}
    assert seen(store, tmp_path / "other", "watch/large", "watch/none") == {"watch/large": "rows"}
    (tmp_path / "a" / "watch" / "large").unlink()
    one.push(1)
    assert seen(store, tmp_path / "copy") == {"alerts/book": "resolved"}


def test_a_database_is_copied_as_it_was_at_one_moment_while_it_is_written(store: Cut, tmp_path: Path) -> None:
    one = writer(store, tmp_path / "a", 1)
    path = tmp_path / "a" / "alerts" / "book.sqlite"
    path.parent.mkdir(parents=True, exist_ok=True)
    with closing(sqlite3.connect(path, isolation_level=None)) as book:
        book.execute("PRAGMA journal_mode = WAL")
        book.execute("CREATE TABLE alerts (key TEXT)")
        for number in range(3):
            book.execute("BEGIN IMMEDIATE")
            book.execute("INSERT INTO alerts VALUES (?)", (str(number),))
            one.push(1)  # in the middle of a transaction
            copy = fetch(store, PREFIX, tmp_path / "copy")
            with closing(sqlite3.connect(copy / "alerts" / "book.sqlite")) as read:
                assert read.execute("SELECT count(*) FROM alerts").fetchone() == (number,)
            book.execute("COMMIT")
    assert not list((tmp_path / "copy").rglob("*-wal"))


def test_what_changed_little_is_uploaded_once_and_what_nobody_names_is_removed(
    store: Cut, tmp_path: Path
) -> None:
    one = writer(store, tmp_path / "a", 1)
    write(tmp_path / "a", "watch/fixed", "stays")
    for number in range(10):
        write(tmp_path / "a", "alerts/book", str(number))
        one.push(1)
    kept = store.keys(f"{PREFIX}/files/")
    assert len(kept) == 3, "the content of now, of the state before, and what stays"


def test_a_content_that_is_missing_or_changed_is_named(store: Cut, tmp_path: Path) -> None:
    one = writer(store, tmp_path / "a", 1)
    write(tmp_path / "a", "alerts/book", "whole")
    one.push(1)
    (key,) = store.keys(f"{PREFIX}/files/")
    store.put(key, b"another")
    with pytest.raises(FileBroken, match="alerts/book is missing"):
        fetch(store, PREFIX, tmp_path / "copy")
    store.put(f"{PREFIX}/state.json", b"{}")
    with pytest.raises(FileBroken, match="use the same one on all hosts"):
        fetch(store, PREFIX, tmp_path / "copy")
