"""Once keys were asked for, only a command stops that: whatever becomes of the files, the gateway never opens."""

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from serin.errors import KeyFileBroken
from serin.host.guard import read_guard
from serin.host.wiring import build_gateway, key_file, key_trouble
from serin.serving.envoy.guard import asks_for_keys
from serin.serving.envoy.keys import KeyFile, KeyRing
from serin.stack.doctor import examine


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:40])


DAMAGES: dict[str, Callable[[Path], object]] = {
    "lost": lambda path: path.unlink(missing_ok=True),
    "empty": lambda path: path.write_bytes(b""),
    "truncated": truncate,
    "corrupt": lambda path: path.write_bytes(b"\xff\x00{]"),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "untouched": lambda _: None,
}


def published(home: Path) -> Path:
    return home / "gateway" / "keys" / "keys.json"


def start(home: Path) -> bool:
    """Whether a gateway that starts now asks for keys."""
    build_gateway(home).write_bootstrap(1)
    return asks_for_keys(published(home).read_bytes())


@pytest.mark.parametrize("before", ["a key", "a key that was revoked", "no key yet"])
@pytest.mark.parametrize("damage", [name for name in DAMAGES if name != "untouched"])
def test_a_ring_that_is_lost_or_broken_closes_the_gateway_and_is_reported(
    tmp_path: Path, damage: str, before: str
) -> None:
    keys = key_file(tmp_path)
    if before == "no key yet":
        keys.require(True)
    else:
        keys.create("ada")
    if before == "a key that was revoked":
        keys.revoke("ada")
    DAMAGES[damage](keys.path)
    with pytest.raises(KeyFileBroken, match="the gateway is closed"):
        keys.read()
    for _ in range(2):  # a start writes the gateway's document, the next one reads it
        assert start(tmp_path)
    assert "the gateway is closed" in (key_trouble(tmp_path) or "")
    assert "NOT OPEN: the gateway is closed" in read_guard(tmp_path).words
    (finding,) = [finding for finding in examine(tmp_path) if finding.what == "API keys"]
    assert (finding.verdict, "serin keys create" in finding.advice) == ("missing", True)


def test_one_of_three_witnesses_is_enough_to_keep_the_gateway_closed(tmp_path: Path) -> None:
    """The ring, the mark beside it and the gateway's own document: every damage to each, in every combination."""
    whole = tmp_path / "whole"
    key_file(whole).create("ada")
    assert start(whole)
    for number, damages in enumerate(itertools.product(DAMAGES, repeat=3)):
        home = tmp_path / str(number)
        shutil.copytree(whole / "gateway" / "keys", home / "gateway" / "keys")
        keys = key_file(home)
        for path in (keys.path, keys.mark):
            shutil.copyfile(whole / path.name, path)
        for path, damage in zip((keys.path, keys.mark, published(home)), damages, strict=True):
            DAMAGES[damage](path)
        asks = damages != ("lost", "lost", "lost")  # which is a home where keys were never asked for
        try:
            assert keys.read().required == asks, damages
        except KeyFileBroken:
            assert asks


def test_a_ring_of_an_older_serin_or_from_an_old_backup_does_not_open_the_gateway(tmp_path: Path) -> None:
    keys = key_file(tmp_path)
    keys.require(False)
    old = keys.path.read_bytes()
    keys.create("ada")
    keys.mark.unlink()
    assert start(tmp_path)
    assert keys.mark.exists(), "what was asked for without a mark gets one"
    keys.path.write_bytes(old)
    assert keys.read().required
    assert start(tmp_path)


@pytest.mark.parametrize("damage", ["lost", "untouched"])
def test_a_command_makes_new_keys_or_stops_asking_also_when_the_ring_is_lost(
    tmp_path: Path, damage: str
) -> None:
    keys = key_file(tmp_path)
    keys.create("ada")
    start(tmp_path)
    DAMAGES[damage](keys.path)
    keys.create("bob")
    assert [key.name for key in keys.read().keys] == (["bob"] if damage == "lost" else ["ada", "bob"])
    assert keys.read().required
    DAMAGES[damage](keys.path)
    keys.require(False)
    assert not keys.read().required
    assert not start(tmp_path)
    keys.path.unlink()
    assert keys.read() == KeyRing(), "nobody asks for keys any more"
    assert not start(tmp_path)


def test_a_broken_ring_is_not_replaced_by_a_command(tmp_path: Path) -> None:
    keys = key_file(tmp_path)
    keys.create("ada")
    truncate(keys.path)
    for command in (lambda: keys.create("bob"), lambda: keys.require(False), lambda: keys.revoke("ada")):
        with pytest.raises(KeyFileBroken, match="is not a file of API keys"):
            command()
    assert len(keys.path.read_bytes()) == 40


def test_an_interruption_while_keys_are_turned_on_or_off_leaves_a_gateway_that_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = KeyFile(path=tmp_path / "keys.json")

    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(json, "dumps", stop)  # the ring is not written
        keys.create("ada")
    with pytest.raises(KeyFileBroken, match="is lost, and keys are required"):
        keys.read()
    keys.create("ada")
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Path, "unlink", stop)
        keys.require(False)
    assert keys.read().required
