"""Files that are whole or as they were before, and closed to other users of the machine."""

import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from serin.draft.guess import draft_table
from serin.etl.raw_rows import read_test_rows
from serin.machine.durable import Syncs, make_private, write_secret, write_whole
from serin.machine.in_memory import socket_folder
from serin.pipeline.check import check_spec
from serin.prefect.login import login_file, make_login
from serin.serving.envoy.keys import KeyFile
from serin.spec.load import load_spec
from serin.store.runs import run_folder
from serin.store.store import Store
from tests.fakes.small_pipeline import small_spec
from tests.unit.etl.trips import build, spec_of
from tests.unit.serving import bundles


def test_text_and_bytes_replace_what_was_there(tmp_path: Path) -> None:
    file = tmp_path / "it"
    write_whole(file, "grün\n")
    assert file.read_text(encoding="utf-8") == "grün\n"
    write_whole(file, b"\xff")
    assert file.read_bytes() == b"\xff"
    assert list(tmp_path.iterdir()) == [file]


def test_a_secret_and_its_name_are_on_the_disk_before_anybody_relies_on_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[tuple[bool, str]] = []  # a folder or not, and what was in the file then
    real = os.fsync

    def fsync(descriptor: int) -> None:
        place = Path(f"/proc/self/fd/{descriptor}").readlink()
        synced.append((place.is_dir(), "" if place.is_dir() else place.read_text()))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    write_secret(tmp_path / "it", "secret")
    assert synced == [(False, "secret"), (True, "")]
    assert (tmp_path / "it").stat().st_mode & 0o777 == 0o600
    synced.clear()
    login = make_login(tmp_path)
    assert synced == [(False, f"{login}\n"), (True, "")]
    assert login_file(tmp_path).read_text().strip() == login


def test_a_full_disk_leaves_the_old_file_and_nothing_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "it"
    write_whole(file, "old")

    def full(_: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="disk full"):
        write_whole(file, "new")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"it": "old"}


def test_files_are_synced_in_the_background_in_the_order_of_each_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(
        os, "fsync", lambda descriptor: synced.append(Path(f"/proc/self/fd/{descriptor}").readlink())
    )
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    with Syncs() as syncs:
        for name in "ab":
            syncs.add(tmp_path / name / "file", tmp_path / name)
        syncs.wait()
        for name in "ab":
            assert [path for path in synced if name in path.relative_to(tmp_path).parts] == [
                tmp_path / name / "file",
                tmp_path / name,
            ]
        syncs.add(tmp_path / "lost")
        with pytest.raises(FileNotFoundError, match="lost"):
            syncs.wait()
        syncs.add(tmp_path / "lost")
        syncs.drop()
        syncs.wait()


def open_to_others(folder: Path) -> list[str]:
    """All that another user could list, read or connect to, from `folder` down."""
    mode = folder.lstat().st_mode
    if stat.S_ISLNK(mode):
        return []
    found = [f"{stat.filemode(mode)} {folder}"] if mode & 0o077 else []
    if stat.S_ISDIR(mode) and mode & 0o011:
        found += [each for inside in sorted(folder.iterdir()) for each in open_to_others(inside)]
    return found


@dataclass
class Machine:
    """A temporary folder that everybody may use, and a home that is not there yet."""

    temporary: Path
    home: Path
    removed: list[str] = field(default_factory=list)  # what others could have read before it was removed

    def open_to_others(self) -> list[str]:
        found = [each for path in sorted(self.temporary.iterdir()) for each in open_to_others(path)]
        return found + (open_to_others(self.home) if self.home.exists() else []) + self.removed

    def removing(self, remove: Callable[..., None]) -> Callable[..., None]:
        def look_first(path: Any, *arguments: Any, **options: Any) -> None:
            if self._is_reached(Path(path)):
                self.removed += open_to_others(Path(path))
            remove(path, *arguments, **options)

        return look_first

    def _is_reached(self, path: Path) -> bool:
        """By others, who may enter the temporary folder and the folder that the home is in."""
        tops = [top for top in (self.temporary, self.home.parent) if path.is_relative_to(top)]
        above = [
            each for top in tops[:1] for each in path.parents if each.is_relative_to(top) and each != top
        ]
        return path.exists() and bool(tops) and all(each.stat().st_mode & 0o011 for each in above)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    temporary.chmod(0o1777)
    found = Machine(temporary, tmp_path / "user" / "home")
    monkeypatch.setenv("SERIN_HOME", str(found.home))
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setattr(shutil, "rmtree", found.removing(shutil.rmtree))
    before = os.umask(0o022)
    yield found
    os.umask(before)


def build_in(variable: str) -> Callable[[Path], None]:
    """`variable`: names the store; where it is not set, it is in the home."""

    def run(folder: Path) -> None:
        url = os.environ.get(variable) or str(Path(os.environ["SERIN_HOME"], "store"))
        spec, chosen = spec_of(folder), Store(url)
        dataset = build(spec, chosen)
        assert read_test_rows(spec.data, spec.features, dataset, max_rows=9).table.num_rows == 9
        bundle = bundles.publish(chosen, bias=0.0)
        assert Path(chosen.bundle(bundle.model, 1).path, "golden.parquet").is_file()

    return run


def look_at_a_table(folder: Path) -> None:
    check_spec(load_spec(small_spec(folder, rows=300)))
    (folder / "t.csv").write_text("a,y\n" + "".join(f"{n % 7},{n % 2}\n" for n in range(60)))
    assert "target" in draft_table(folder / "t.csv", "y").text


def make_what_a_stack_needs(_: Path) -> None:
    home = Path(os.environ["SERIN_HOME"])
    make_login(home)
    KeyFile(path=home / "keys.json").create("team")
    (socket_folder(home) / "admin.sock").touch()
    (run_folder(home, "train-1f9c2a") / "model.json").write_text("{}")


RUNS = {
    "a build in a remote store": build_in("BUCKET_OF_THE_TEST"),
    "a build in the home": build_in(""),
    "looking at a table": look_at_a_table,
    "the stack's own": make_what_a_stack_needs,
}


@pytest.mark.parametrize("name", RUNS)
def test_nothing_of_a_run_is_open_to_other_users(
    name: str, machine: Machine, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BUCKET_OF_THE_TEST", bucket)
    data = tmp_path / "data"
    data.mkdir()
    RUNS[name](data)
    assert machine.open_to_others() == []


def test_the_walk_finds_what_is_open(machine: Machine) -> None:
    (machine.temporary / "closed").mkdir(mode=0o700)
    (machine.temporary / "closed" / "rows").write_text("1")
    (machine.temporary / "open").mkdir()
    (machine.temporary / "open" / "rows").write_text("1")
    (machine.temporary / "gone").mkdir()
    shutil.rmtree(machine.temporary / "gone")
    shutil.rmtree(machine.temporary / "closed")
    found = [each.rpartition("/")[2] for each in machine.open_to_others()]
    assert found == ["open", "rows", "gone"]


def test_a_folder_that_is_there_keeps_the_mode_its_owner_gave_it(machine: Machine) -> None:
    shared = machine.temporary / "shared"
    shared.mkdir()
    assert stat.S_IMODE(make_private(shared).stat().st_mode) == 0o755
    assert stat.S_IMODE(make_private(machine.temporary / "a" / "b").stat().st_mode) == 0o700


def test_what_is_published_has_the_mode_of_the_umask(machine: Machine, tmp_path: Path) -> None:
    """Several users may share a store."""
    bundle = bundles.publish(Store(str(tmp_path / "shared")), bias=0.0)
    assert stat.S_IMODE(Path(bundle.path).stat().st_mode) == 0o755
    assert stat.S_IMODE(Path(bundle.path, "model.onnx").stat().st_mode) == 0o644
