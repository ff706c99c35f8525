"""A store and tables on Azure Blob Storage (Azurite): the same promises as on S3."""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from email.utils import formatdate
from pathlib import Path

import pytest

from serin.errors import ObjectChanged, ObjectExists, StoreUnreachable
from serin.machine.ports import free_ports
from serin.store.file_systems import file_system
from serin.store.open import check_conditional, open_objects
from serin.store.remote_retention import collect_remote_garbage
from serin.store.retention import Policy
from serin.store.store import Store
from tests.cluster.part import need
from tests.cluster.parts.azurite import PROGRAM
from tests.cluster.store_writer import LARGE_BYTES, publish_dataset, publish_version
from tests.unit.etl.trips import build, spec_of, trips

READY_S = 120.0
ACCOUNT = "devstoreaccount1"
ACCOUNT_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Both are in the emulator's manual."""
KEY, DIGEST = "a" * 64, "b" * 64


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    need("azurite")
    folder, port = tmp_path_factory.mktemp("azurite"), free_ports(1)[0]
    options = ["--blobHost", "127.0.0.1", "--blobPort", str(port), "--location", str(folder), "--silent"]
    running = subprocess.Popen(
        [PROGRAM, *options, "--disableTelemetry", "--skipApiVersionCheck"],
        stdout=(folder / "log").open("wb"),
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        running.kill()
        running.wait()


@pytest.fixture
def url(server: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("AZURE_STORAGE_USE_EMULATOR", "true")
    monkeypatch.setenv("AZURITE_BLOB_STORAGE_URL", server)
    container = f"tests-{secrets.token_hex(4)}"
    deadline = time.monotonic() + READY_S
    while True:
        try:
            make_container(server, container)
        except (urllib.error.URLError, ConnectionError):
            assert time.monotonic() < deadline, "Azurite is not ready"
            time.sleep(0.1)
        else:
            return f"az://{container}/some"


def make_container(server: str, name: str) -> None:
    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2023-11-03"}
    canonical = "".join(f"{key}:{value}\n" for key, value in sorted(headers.items()))
    text = "PUT" + "\n" * 12 + f"{canonical}/{ACCOUNT}/{ACCOUNT}/{name}\nrestype:container"
    digest = hmac.digest(base64.b64decode(ACCOUNT_KEY), text.encode(), hashlib.sha256)
    headers["Authorization"] = f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}"
    place = f"{server}/{ACCOUNT}/{name}?restype=container"
    urllib.request.urlopen(urllib.request.Request(place, method="PUT", headers=headers), timeout=10)


def test_objects_are_created_once_and_replaced_only_as_they_were_read(url: str) -> None:
    objects = open_objects(url)
    check_conditional(objects)
    first = objects.create("d/leader.json", b"one")
    with pytest.raises(ObjectExists):
        objects.create("d/leader.json", b"another")
    second = objects.replace("d/leader.json", b"two", first)
    with pytest.raises(ObjectChanged):
        objects.replace("d/leader.json", b"three", first)
    with pytest.raises(ObjectChanged):
        objects.replace("d/none.json", b"three", first)
    stored = objects.read("d/leader.json")
    assert (stored.content, stored.tag) == (b"two", second)
    objects.put("d/sub/more.json", b"x")
    assert objects.keys("d/") == ["d/leader.json", "d/sub/more.json"]
    assert objects.keys("d/", after="d/leader.json") == ["d/sub/more.json"]
    objects.remove("d/sub/more.json")
    objects.remove("d/sub/more.json")
    assert objects.read("d/sub/more.json") is None


def test_of_several_writers_one_wins_each_key(url: str) -> None:
    objects = open_objects(url)

    def won(writer: int) -> list[int]:
        numbers = []
        for number in range(5):
            try:
                objects.create(f"race/{number}", f"writer {writer}".encode())
            except ObjectExists:
                continue
            numbers.append(number)
        return numbers

    with ThreadPoolExecutor(4) as pool:
        assert sorted(number for numbers in pool.map(won, range(4)) for number in numbers) == list(range(5))


def test_a_container_that_is_missing_is_an_error(url: str) -> None:
    objects = open_objects(url.replace("tests-", "none-"))
    with pytest.raises(StoreUnreachable, match="ContainerNotFound"):
        objects.read("a")
    with pytest.raises(StoreUnreachable, match="ContainerNotFound"):
        objects.create("a", b"x")


def test_datasets_and_versions_are_found_by_another_host_and_removed_when_old(
    url: str, tmp_path: Path
) -> None:
    store = Store(url, cache=tmp_path / "here")
    publish_dataset(store, KEY, DIGEST)
    for _ in range(2):
        publish_version(store, "m", store.reserve_version("m"), "graph")
    store.set_alias("m", "live", 2)
    other = Store(url, cache=tmp_path / "there")
    found = other.find_dataset(KEY)
    assert (Path(found.path) / "train" / "large").stat().st_size == LARGE_BYTES  # in parts, with their digest
    assert Path(other.bundle("m", 2).path, "model.onnx").read_text() == "graph"
    policy = Policy(keep_versions=1, keep_days=-2)
    gone = collect_remote_garbage(store, tmp_path / "home", policy, remove=True)
    assert {(entry.kind, entry.name) for entry in gone} == {("version", "m-v1"), ("dataset", DIGEST)}
    assert (other.versions("m"), other.datasets()) == ([2], [])


def test_tables_give_what_local_ones_give(url: str, tmp_path: Path) -> None:
    rows = trips()
    for name, part in (("a", rows.iloc[:500]), ("b", rows.iloc[500:])):
        system, path = file_system(f"{url}/in/{name}.parquet")
        system.pipe_file(path, part.to_parquet(row_group_size=97))
    local, remote = (
        build(spec_of(tmp_path, tables={"trips": place}), Store(str(tmp_path / "store")))
        for place in (str(tmp_path / "trips.parquet"), f"{url}/in")
    )
    assert remote.digest == local.digest
