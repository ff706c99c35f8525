"""Objects with conditional writes: the same promises of a folder and of S3 (moto)."""

import os
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from serin.errors import NameInvalid, ObjectChanged, ObjectExists, StoreNotConditional, StoreUnreachable
from serin.machine.ports import free_ports
from serin.store.objects import Objects
from serin.store.open import open_objects


@pytest.fixture(params=["folder", "s3"])
def objects(request: pytest.FixtureRequest, tmp_path: Path) -> Objects:
    if request.param == "folder":
        return open_objects(str(tmp_path / "store"))
    return open_objects(request.getfixturevalue("bucket"))


def test_an_object_is_created_once(objects: Objects) -> None:
    assert objects.read("a/b.json") is None
    tag = objects.create("a/b.json", b"one")
    with pytest.raises(ObjectExists, match=r"a/b\.json"):
        objects.create("a/b.json", b"two")
    stored = objects.read("a/b.json")
    assert (stored.content, stored.tag) == (b"one", tag)


def test_an_object_is_replaced_only_as_it_was_read(objects: Objects) -> None:
    first = objects.create("leader.json", b"one")
    second = objects.replace("leader.json", b"two", first)
    with pytest.raises(ObjectChanged):
        objects.replace("leader.json", b"three", first)
    assert objects.replace("leader.json", b"four", second) != second
    with pytest.raises(ObjectChanged):
        objects.replace("absent.json", b"five", first)


def test_keys_are_listed_in_order_after_a_place(objects: Objects) -> None:
    for number in (3, 1, 2):
        objects.put(f"d/{number:03d}.json", b"x")
    objects.put("e/001.json", b"x")
    assert objects.keys("d/") == ["d/001.json", "d/002.json", "d/003.json"]
    assert objects.keys("d/", after="d/001.json") == ["d/002.json", "d/003.json"]
    objects.remove("d/002.json")
    objects.remove("d/002.json")
    assert objects.keys("d/") == ["d/001.json", "d/003.json"]
    assert objects.keys("none/") == []


def test_of_several_writers_one_wins_each_key(objects: Objects) -> None:
    def write(writer: int) -> list[int]:
        won = []
        for number in range(40):
            try:
                objects.create(f"race/{number}", f"writer {writer}".encode())
            except ObjectExists:
                continue
            won.append(number)
        return won

    with ThreadPoolExecutor(4) as pool:
        won = [number for numbers in pool.map(write, range(4)) for number in numbers]
    assert sorted(won) == list(range(40))


@pytest.mark.parametrize("key", ["../out", "a//b", "/a", ".hidden", ""])
def test_a_key_stays_below_its_url(objects: Objects, key: str) -> None:
    with pytest.raises(NameInvalid):
        objects.put(key, b"x")


def test_a_store_that_is_not_there_is_reported_as_unreachable(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_ports(1)[0]}")
    objects = open_objects("s3://bucket")
    with pytest.raises(StoreUnreachable, match="s3://bucket"):
        objects.create("a", b"")
    with pytest.raises(StoreUnreachable, match="s3://bucket"):
        objects.keys("a")


def test_a_store_without_conditional_writes_is_refused() -> None:
    with pytest.raises(StoreNotConditional, match="sftp://bucket"):
        open_objects("sftp://bucket/x")


def test_a_forked_process_gets_an_error_and_does_not_wait_forever(bucket: str) -> None:
    """The threads of the library are not in it."""
    objects = open_objects(bucket)
    objects.put("a", b"x")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # this process has threads
        child = os.fork()
    if child == 0:
        try:
            objects.read("a")
        except StoreUnreachable:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
