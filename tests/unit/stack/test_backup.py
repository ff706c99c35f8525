"""A backup holds what cannot be made again, is of one moment, and is restored completely or not at all."""

import contextlib
import io
import itertools
import json
import re
import sqlite3
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import serin
from serin.errors import BackupBroken, BackupRefused
from serin.host.windows import state_folder
from serin.rollout.decide.plan import Plan
from serin.rollout.decide.state import Hold, Phase, Rollout
from serin.rollout.run.access import home_rollouts
from serin.rollout.run.commands import Command
from serin.rollout.run.record import decision2rollout, rollout2decision
from serin.stack.backup import create
from serin.stack.backup.contents import MANIFEST, is_known
from serin.stack.backup.create import create_backup
from serin.stack.backup.restore import restore_backup
from serin.store.artifacts import Release
from serin.store.store import Store
from serin.store.trust import Trust
from serin.windows.events import OnlineWindows
from serin.windows.lmdb_state import LmdbState
from tests.fakes.rollout import home_inbox, home_journals
from tests.unit.serving import bundles
from tests.unit.windows.test_step import NOW, plan

SHIFTING = Rollout(
    id="r1",
    candidate=Release(model=bundles.MODEL, version=2),
    stable=Release(model=bundles.MODEL, version=1),
    previous=None,
    plan=Plan(),
    phase=Phase.SHIFTING,
    step=0,
    began=1.0,
    since=1.0,
    evidence_from=1.0,
)

KEPT = (
    *("keys.json", "prefect-login", "metrics-token", "alerts/receivers.json", "watch/drift/delays.json"),
    *("issuers/sso.json", "console/operator-secret", "labels/delays/1.parquet"),
)


@pytest.fixture
def stack(tmp_path: Path) -> tuple[Path, Store]:
    """A home and a store in it, as a stack with an open rollout leaves them."""
    home = tmp_path / "home"
    store = Store(str(home / "store"), cache=tmp_path / "cache")
    home.mkdir(mode=0o700)
    for bias in (0.0, 1.0):
        bundles.publish(store, bias=bias)
    store.set_alias(bundles.MODEL, "live", 1)
    decide(home, SHIFTING)
    for name in KEPT:
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(f"the content of {name}")
    for name in ("logs/prefect.log", "gateway/tls/key.pem", "locks/x", "cache/x", "runs/train-1/weights"):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text("not for a backup")
    return home, store


def test_a_restored_home_has_the_events_of_online_windows(stack: tuple[Path, Store], tmp_path: Path) -> None:
    home, store = stack
    state = LmdbState(state_folder(home))
    row = {"at": [NOW], "id": ["a"], "card": ["c1"], "amount": [1.5]}
    OnlineWindows("pay", plan(), state).answer(row, [NOW])
    state.close()
    create_backup(home, store, tmp_path / "b.tar")
    new_home, new_store = target(tmp_path)
    restore_backup(new_home, new_store, tmp_path / "b.tar")
    restored = LmdbState(state_folder(new_home))
    later = {**row, "at": [NOW + 1], "id": ["b"]}
    answered = OnlineWindows("pay", plan(), restored).answer(later, [NOW + 1])
    restored.close()
    assert answered.columns == {"n": [1], "spent": [1.5]}


def decide(home: Path, rollout: Rollout) -> None:
    home_journals(home).open(bundles.MODEL).append(rollout2decision(rollout, 2.0))


def target(tmp_path: Path) -> tuple[Path, Store]:
    home = tmp_path / "elsewhere" / "home"
    return home, Store(str(home / "store"), cache=tmp_path / "cache-2")


def test_a_restored_home_serves_the_same_versions_and_holds_the_rollout_that_was_open(
    stack: tuple[Path, Store], tmp_path: Path
) -> None:
    home, store = stack
    made = create_backup(home, store, tmp_path / "b.tar")
    assert (tmp_path / "b.tar").stat().st_mode & 0o777 == 0o600
    assert (dict(made.live), made.open_rollouts) == ({bundles.MODEL: 1}, (bundles.MODEL,))
    new_home, new_store = target(tmp_path)
    restore_backup(new_home, new_store, tmp_path / "b.tar")
    assert new_home.stat().st_mode & 0o777 == 0o700
    for name in KEPT:
        assert (new_home / name).read_text() == f"the content of {name}"
        assert (new_home / name).stat().st_mode & 0o077 == 0
    for name in ("logs", "gateway", "locks", "cache", "runs"):
        assert not (new_home / name).exists()
    assert new_store.versions(bundles.MODEL) == [1, 2]
    assert new_store.aliases(bundles.MODEL) == {"live": 1}
    assert new_store.reserve_version(bundles.MODEL) == 3
    for version in (1, 2):
        old, new = (Path(each.bundle(bundles.MODEL, version).path) for each in (store, new_store))
        assert {file.name: file.read_bytes() for file in new.iterdir()} == {
            file.name: file.read_bytes() for file in old.iterdir()
        }
    last = home_rollouts(new_home).last(bundles.MODEL)
    assert last is not None
    held = decision2rollout(last)
    assert (held.phase, held.hold, held.step, held.live) == (Phase.PENDING, Hold.PAUSED, 0, SHIFTING.stable)
    assert "restored from a backup" in held.reason
    assert home_inbox(new_home).pending() == []


def test_a_command_that_waits_is_not_obeyed_after_a_restore(
    stack: tuple[Path, Store], tmp_path: Path
) -> None:
    home, store = stack
    home_rollouts(home).mailbox.submit(Command(kind="promote", model=bundles.MODEL, by="ada"))
    new_home, new_store = target(tmp_path)
    create_backup(home, store, tmp_path / "b.tar")
    restore_backup(new_home, new_store, tmp_path / "b.tar")
    assert home_inbox(new_home).pending() == []


def test_a_rollout_that_had_ended_is_left_alone(stack: tuple[Path, Store], tmp_path: Path) -> None:
    home, store = stack
    decide(home, replace(SHIFTING, phase=Phase.PROMOTED))
    made = create_backup(home, store, tmp_path / "b.tar")
    restore_backup(*target(tmp_path), tmp_path / "b.tar")
    assert made.open_rollouts == ()
    last = home_rollouts(target(tmp_path)[0]).last(bundles.MODEL)
    assert last == home_rollouts(home).last(bundles.MODEL)


def test_a_database_in_use_is_copied_as_of_its_last_transaction(
    stack: tuple[Path, Store], tmp_path: Path
) -> None:
    home, store = stack
    with contextlib.closing(sqlite3.connect(home / "alerts" / "book.sqlite")) as book:
        book.execute("PRAGMA journal_mode = WAL")
        book.execute("CREATE TABLE alerts (name TEXT)")
        book.execute("INSERT INTO alerts VALUES ('committed')")
        book.commit()
        book.execute("INSERT INTO alerts VALUES ('never committed')")
        create_backup(home, store, tmp_path / "b.tar")
        book.rollback()
    new_home, new_store = target(tmp_path)
    restore_backup(new_home, new_store, tmp_path / "b.tar")
    with contextlib.closing(sqlite3.connect(new_home / "alerts" / "book.sqlite")) as copy:
        assert copy.execute("SELECT name FROM alerts").fetchall() == [("committed",)]
    assert not list((new_home / "alerts").glob("book.sqlite-*"))


def test_journal_and_aliases_are_read_again_when_the_controller_decided_in_between(
    stack: tuple[Path, Store], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, store = stack
    read, left = (
        create._read,
        [replace(SHIFTING, phase=Phase.BAKING), replace(SHIFTING, phase=Phase.PROMOTED)],
    )

    def deciding(*places: Any) -> dict[str, bytes]:
        """The journal is read, and then the controller decides and moves the alias."""
        found = read(*places)
        if left:
            decide(home, left.pop(0))
            store.set_alias(bundles.MODEL, "live", 2)
        return found

    monkeypatch.setattr(create, "_read", deciding)
    made = create_backup(home, store, tmp_path / "b.tar")
    assert (dict(made.live), made.open_rollouts) == ({bundles.MODEL: 2}, ())
    new_home, new_store = target(tmp_path)
    restore_backup(new_home, new_store, tmp_path / "b.tar")
    decision = home_rollouts(new_home).last(bundles.MODEL)
    assert decision.phase == Phase.PROMOTED
    assert new_store.aliases(bundles.MODEL) == {"live": 2}


def test_journals_that_never_settle_are_not_backed_up(
    stack: tuple[Path, Store], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = itertools.count()
    monkeypatch.setattr(create, "_read", lambda *_: {"home/rollouts/x": str(next(numbers)).encode()})
    with pytest.raises(BackupRefused, match="changes faster than it can be read; pause the rollouts"):
        create_backup(*stack, tmp_path / "b.tar")
    assert not list(tmp_path.glob("*.tar*"))


def test_versions_in_an_object_store_stay_there_and_must_be_found_when_it_is_restored(
    stack: tuple[Path, Store], bucket: str, tmp_path: Path
) -> None:
    home, local = stack
    del local
    remote = Store(bucket, cache=tmp_path / "remote-cache")
    bundles.publish(remote, bias=0.0)
    remote.set_alias(bundles.MODEL, "live", 1)
    made = create_backup(home, remote, tmp_path / "b.tar")
    assert not [name for name in made.files if name.startswith("store/")]
    new_home = tmp_path / "elsewhere"
    with pytest.raises(BackupRefused, match=r"has no delays version 1; set SERIN_STORE .*some/where"):
        restore_backup(new_home, Store(f"{bucket}/another", cache=tmp_path / "c"), tmp_path / "b.tar")
    assert not new_home.exists()
    restore_backup(new_home, remote, tmp_path / "b.tar")
    assert (new_home / "keys.json").exists()


def test_a_home_or_store_that_is_not_empty_is_left_as_it_is(
    stack: tuple[Path, Store], tmp_path: Path
) -> None:
    home, store = stack
    create_backup(home, store, tmp_path / "b.tar")
    with pytest.raises(BackupRefused, match="it is not empty; restore into an empty SERIN_HOME"):
        restore_backup(home, store, tmp_path / "b.tar")
    new_home = tmp_path / "elsewhere"
    with pytest.raises(BackupRefused, match="name an empty folder in SERIN_STORE"):
        restore_backup(new_home, store, tmp_path / "b.tar")
    assert not new_home.exists()
    with pytest.raises(BackupRefused, match="it exists; name a new file"):
        create_backup(home, store, tmp_path / "b.tar")
    with pytest.raises(BackupRefused, match="there is no stack here"):
        create_backup(tmp_path / "nothing", store, tmp_path / "c.tar")


def test_a_damaged_backup_restores_nothing(stack: tuple[Path, Store], tmp_path: Path) -> None:
    home, store = stack
    create_backup(home, store, tmp_path / "b.tar")
    data = (tmp_path / "b.tar").read_bytes()
    broken = tmp_path / "broken.tar"
    for damaged in (data[: len(data) // 2], data.replace(b"of keys.json", b"of keys.JSON"), b"", data[512:]):
        assert damaged != data
        broken.write_bytes(damaged)
        with pytest.raises(BackupBroken):
            restore_backup(*target(tmp_path), broken)
    assert not target(tmp_path)[0].exists()
    assert [path.name for path in (tmp_path / "elsewhere").iterdir()] == []


@pytest.mark.parametrize("name", ["../evil", "/evil", "home/../../evil", "other/evil", "home"])
def test_a_backup_writes_nowhere_but_into_the_home(tmp_path: Path, name: str) -> None:
    path = tmp_path / "b.tar"
    with tarfile.open(path, "w") as archive:
        entry = tarfile.TarInfo(name)
        entry.size = 4
        archive.addfile(entry, io.BytesIO(b"evil"))
    with pytest.raises(BackupBroken, match="does not belong in it"):
        restore_backup(*target(tmp_path), path)
    assert not list(tmp_path.rglob("evil"))


def test_links_and_files_behind_the_manifest_are_refused(stack: tuple[Path, Store], tmp_path: Path) -> None:
    home, store = stack
    create_backup(home, store, tmp_path / "b.tar")
    with tarfile.open(tmp_path / "b.tar", "a") as archive:
        entry = tarfile.TarInfo("home/more")
        archive.addfile(entry, io.BytesIO(b""))
    with pytest.raises(BackupBroken, match="'home/more' does not belong in it"):
        restore_backup(*target(tmp_path), tmp_path / "b.tar")
    with tarfile.open(tmp_path / "link.tar", "w") as archive:
        link = tarfile.TarInfo("home/link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    with pytest.raises(BackupBroken, match="'home/link' does not belong in it"):
        restore_backup(*target(tmp_path), tmp_path / "link.tar")


def test_a_backup_of_another_format_is_refused(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "b.tar", "w") as archive:
        data = json.dumps({"format": "serin.backup", "version": 99}).encode()
        entry = tarfile.TarInfo(MANIFEST)
        entry.size = len(data)
        archive.addfile(entry, io.BytesIO(data))
    with pytest.raises(BackupBroken, match=r"not a serin\.backup document of version 1"):
        restore_backup(*target(tmp_path), tmp_path / "b.tar")


EMPTY: dict[str, Any] = {
    "format": "serin.backup", "version": 1, "created": 1.0, "serin": "1", "store": "s", "with_store": True,
    "owns_prefect": True, "signed": False, "live": {}, "open_rollouts": [], "files": {},
}  # fmt: skip
ODD: list[Any] = [
    None, "x", "", -1, 1e300, True, [], ["a/../b"], [None], {}, {"x": None}, {"": {"size": "1"}}, {"m": -1},
]  # fmt: skip


def hand_made(path: Path, manifest: bytes, **files: bytes) -> Path:
    with tarfile.open(path, "w") as archive:
        for name, content in {**files, MANIFEST: manifest}.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def test_a_manifest_by_hand_is_restored_or_refused_in_a_sentence(tmp_path: Path) -> None:
    """Every key without a value, and with values of every other type."""
    changed = [{name: value for name, value in EMPTY.items() if name != left_out} for left_out in EMPTY]
    changed += [{**EMPTY, name: value} for name in (*EMPTY, "more") for value in ODD]
    documents = [json.dumps(each).encode() for each in changed] + [b"[" * 100_000, b"[]", b"", b"\xff"]
    refused = 0
    for number, document in enumerate(documents):
        home = tmp_path / f"home-{number}"
        path = hand_made(tmp_path / "backup.tar", document)
        try:
            restore_backup(home, Store(str(home / "store"), cache=tmp_path / "cache"), path)
        except (BackupBroken, BackupRefused):
            refused += 1
            assert not home.exists()
    print(f"{refused} of {len(documents)} refused")
    assert refused > 0.8 * len(documents)


def test_files_of_a_backup_by_hand_are_refused_in_a_sentence(tmp_path: Path) -> None:
    rollout = json.dumps({**EMPTY, "open_rollouts": ["m"]}).encode()
    home, store = target(tmp_path)
    with pytest.raises(BackupBroken, match="no journal of the open rollout of m"):
        restore_backup(home, store, hand_made(tmp_path / "a.tar", rollout))
    plain = json.dumps(EMPTY).encode()
    for names in (["home/a", "home/a/b"], ["home/" + "x" * 300], ["home/a\x01", "home/a\x01"]):
        files = dict.fromkeys(names, b"x")
        with pytest.raises(BackupBroken):
            restore_backup(home, store, hand_made(tmp_path / "a.tar", plain, **files))
    assert not home.exists()


def test_a_stack_that_asked_for_signatures_asks_for_them_again(
    stack: tuple[Path, Store], tmp_path: Path
) -> None:
    """Also without a trusted key: the folder itself is what asks."""
    home, store = stack
    (home / "trusted-keys").mkdir()
    new_home, new_store = target(tmp_path)
    create_backup(home, store, tmp_path / "b.tar")
    restore_backup(new_home, new_store, tmp_path / "b.tar")
    assert Trust(new_home / "trusted-keys").is_required


def test_it_was_decided_of_everything_in_a_home_whether_it_is_backed_up() -> None:
    sources = list(Path(serin.__file__).parent.rglob("*.py"))
    found = {name for file in sources for name in re.findall(r'home(?:\(\))? / "([^"{]+)"', file.read_text())}
    assert len(found) > 20
    beside = {name for file in sources for name in re.findall(r'with_name\("([^"{]+)"\)', file.read_text())}
    elsewhere = {
        ".receivers.lock",
        ".start",
        "peers.json",
        "prefect.db.new",
        "template.db",
    }
    found |= beside - elsewhere - {"refusals.jsonl", "engines"}  # beside files in folders of the home
    assert {"issuers", ".keys-required"} <= found
    assert {name for name in found if not is_known(name)} == {"store"}
