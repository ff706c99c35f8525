"""Every way in which a table's file can change makes another key; a file that says the same keeps it."""

import os
import shutil
import time
from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path

import pytest

from serin.errors import SourceUnreadable
from serin.etl import compute
from serin.etl.build import build_dataset, find_dataset
from serin.etl.identity import current_key
from serin.spec.etl import EtlSpec
from serin.spec.pipeline import PipelineSpec
from serin.store import file_digests
from serin.store.file_digests import digest_of
from serin.store.store import Store
from tests.kit.web import Handler, web_server
from tests.logs import heard
from tests.unit.etl.trips import table_spec

FIRST, SECOND = (
    "a,b\n" + "".join(f"{row % 7},{row % 2}\n" for row in range(120)),
    "a,b\n" + "".join(f"{row % 5},{row % 2}\n" for row in range(120)),
)
LONG_AGO = 1_600_000_000


def spec_over(path: str) -> PipelineSpec:
    return table_spec(path, "b == 1", {"columns": ["a"], "steps": ["normalize"]})


def key_of(path: str, store: Store) -> str | None:
    spec = spec_over(path)
    return current_key(spec.data, spec.features, store)


def write_in_place(file: Path, _: Path) -> None:
    with file.open("r+") as stream:
        stream.write(SECOND)


def copy_with_its_times(file: Path, other: Path) -> None:
    shutil.copy2(other, file)  # cp -p


def rename_over(file: Path, other: Path) -> None:
    other.rename(file)


def append(file: Path, _: Path) -> None:
    with file.open("a") as stream:
        stream.write("1,1\n")


def truncate(file: Path, _: Path) -> None:
    os.truncate(file, file.stat().st_size - 4)


def link_to_another(file: Path, other: Path) -> None:
    file.unlink()
    file.symlink_to(other)


CHANGES: list[Callable[[Path, Path], None]] = [
    write_in_place,
    copy_with_its_times,
    rename_over,
    append,
    truncate,
    link_to_another,
]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A table, and another one of the same size and times beside it."""
    for name, text in (("t.csv", FIRST), ("other", SECOND)):
        (tmp_path / name).write_text(text)
        os.utime(tmp_path / name, (LONG_AGO, LONG_AGO))
    assert len(FIRST) == len(SECOND)
    return tmp_path / "t.csv"


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_file_with_other_content_has_another_key(
    file: Path, store: Store, change: Callable[[Path, Path], None]
) -> None:
    keys = {key_of(str(file), store)}
    change(file, file.with_name("other"))
    os.utime(file, (LONG_AGO, LONG_AGO))
    keys.add(key_of(str(file), store))
    assert len(keys) == 2


def test_a_linked_file_that_changes_has_another_key(file: Path, store: Store, tmp_path: Path) -> None:
    link = tmp_path / "link.csv"
    link.symlink_to(file)
    before = key_of(str(link), store)
    write_in_place(file, file)
    os.utime(file, (LONG_AGO, LONG_AGO))
    assert key_of(str(link), store) != before


def test_a_file_that_says_the_same_keeps_its_key(file: Path, store: Store) -> None:
    before = key_of(str(file), store)
    file.touch()
    assert key_of(str(file), store) == before
    shutil.copyfile(file, file.with_name("copy"))
    file.with_name("copy").rename(file)
    assert key_of(str(file), store) == before


def test_a_file_is_read_once_while_its_stat_stays(
    file: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_digests, "_SETTLED_NS", 0)
    read: list[int] = []

    def counted(stream: FileIO) -> bytes:
        read.append(stream.fileno())
        return digest_of(stream)

    monkeypatch.setattr(file_digests, "digest_of", counted)
    assert key_of(str(file), store) == key_of(str(file), store)
    assert len(read) == 1
    for entry in (store.kept_folder() / "digests").iterdir():
        entry.write_text("damaged")
    key_of(str(file), store)
    assert len(read) == 2


def test_what_was_hashed_in_the_moment_of_a_change_is_hashed_again(
    file: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within one tick of a clock a file can change twice, and its stat says nothing of the second time."""
    seen = file.stat()
    monkeypatch.setattr(file_digests, "_stat", lambda _: f"{seen.st_size} {seen.st_ino}")
    before = key_of(str(file), store)
    write_in_place(file, file)
    assert key_of(str(file), store) != before
    monkeypatch.setattr(time, "time_ns", lambda: 2**62)  # long after: from here on the stat is believed
    after = key_of(str(file), store)
    file.write_text(FIRST)
    assert key_of(str(file), store) == after


def test_a_large_file_is_known_by_its_stat(file: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_digests, "HASHED_BYTES", 10)
    before = key_of(str(file), store)
    assert key_of(str(file), store) == before
    copy_with_its_times(file, file.with_name("other"))
    assert key_of(str(file), store) != before


def test_a_file_that_changes_while_it_is_read_makes_no_dataset(
    file: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = spec_over(str(file))
    real = compute.lay_out

    def change_and_go_on(*given: object) -> object:
        found = real(*given)  # type: ignore[arg-type]
        copy_with_its_times(file, file.with_name("other"))
        return found

    monkeypatch.setattr(compute, "lay_out", change_and_go_on)
    with pytest.raises(SourceUnreadable, match="changed while"):
        build_dataset(spec.data, spec.features, EtlSpec(engine="process", workers=1), store=store)
    assert find_dataset(spec.data, spec.features, store) is None


class _Served(Handler):
    content, headers_sent = b"", dict[str, str]()

    def do_GET(self) -> None:
        self.send_response(200)
        for name, value in {**self.headers_sent, "Content-Length": str(len(self.content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(self.content)

    do_HEAD = do_GET  # noqa: N815


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with web_server(_Served) as port:
        yield f"http://127.0.0.1:{port}/t.csv"


OLD, NEWER = "Mon, 05 Jan 2026 10:00:00 GMT", "Mon, 05 Jan 2026 10:00:01 GMT"


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"ETag": '"1"'}, {"ETag": '"2"'}),
        ({"Last-Modified": OLD}, {"Last-Modified": NEWER}),
        ({"ETag": 'W/"1"', "Last-Modified": OLD}, {"ETag": 'W/"1"', "Last-Modified": NEWER}),
        ({"ETag": 'W/"1"', "Last-Modified": OLD}, {"ETag": 'W/"2"', "Last-Modified": OLD}),
        ({"Content-MD5": "x"}, {"Content-MD5": "y"}),
    ],
    ids=["strong ETag", "Last-Modified alone", "weak ETag, other time", "weak ETag changed", "MD5"],
)
def test_a_served_file_is_known_by_what_its_server_promises(
    server: str, store: Store, first: dict[str, str], second: dict[str, str]
) -> None:
    _Served.content, _Served.headers_sent = FIRST.encode(), first
    before = key_of(server, store)
    assert before is not None
    assert key_of(server, store) == before
    _Served.content, _Served.headers_sent = SECOND.encode(), second
    assert key_of(server, store) != before


@pytest.mark.parametrize(
    "headers", [{}, {"ETag": 'W/"1"'}, {"Last-Modified": "now"}, {"Last-Modified": "soon"}]
)
def test_a_served_file_without_a_reliable_mark_is_never_taken_for_known(
    server: str, store: Store, headers: dict[str, str]
) -> None:
    """`now`: a second has not ended in which it could change again; `soon` is no time at all."""
    now = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime())
    _Served.content = FIRST.encode()
    _Served.headers_sent = {name: now if value == "now" else value for name, value in headers.items()}
    spec = spec_over(server)
    said: list[str] = []
    engine = EtlSpec(engine="process", workers=1)
    with heard(said.append):
        first = build_dataset(spec.data, spec.features, engine, store=store)
    assert any("no reliable digest" in line for line in said)
    assert find_dataset(spec.data, spec.features, store) is None
    assert key_of(server, store) is None
    _Served.content = SECOND.encode()
    assert build_dataset(spec.data, spec.features, engine, store=store).digest != first.digest


def test_all_of_a_dataset_is_on_the_disk_before_it_is_published(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: set[Path] = set()
    late: list[Path] = []
    real_fsync, real_rename = os.fsync, Path.rename

    def fsync(descriptor: int) -> None:
        real_fsync(descriptor)
        synced.add(Path(f"/proc/self/fd/{descriptor}").readlink())

    def rename(self: Path, target: Path) -> Path:
        if self.name == "dataset":
            found = [self, *self.rglob("*")]
            assert len(found) > 20  # three splits with a part of five files each, and more
            late.extend(path for path in found if path not in synced)
        return real_rename(self, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", rename)
    file = tmp_path / "t.csv"
    file.write_text(FIRST)
    spec = spec_over(str(file))
    build_dataset(spec.data, spec.features, EtlSpec(), store=store)
    assert late == []
