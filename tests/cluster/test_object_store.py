"""The store on a real S3 server (SeaweedFS): writers that race, die in the middle, and networks that fail."""

import json
import os
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from serin.errors import StoreUnreachable
from serin.store.bucket import Timing
from serin.store.checkpoints import fetch_checkpoint, publish_checkpoint
from serin.store.store import Store
from tests.cluster.fault_proxy import Fault, Request, fault_proxy
from tests.cluster.seaweedfs import BUCKET, running_seaweedfs
from tests.cluster.store_writer import LARGE_BYTES, SMALL, publish_dataset, publish_version

WRITERS, VERSIONS, SHARED = 8, 500, 20
KEY, DIGEST = "a" * 64, "b" * 64


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with running_seaweedfs(tmp_path_factory.mktemp("seaweedfs") / "server") as variables:
        yield variables


@pytest.fixture
def url(server: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> str:
    """An empty store, which SERIN_STORE names."""
    for name, value in server.items():
        monkeypatch.setenv(name, value)
    empty = f"s3://{BUCKET}/{secrets.token_hex(4)}"
    monkeypatch.setenv("SERIN_STORE", empty)
    return empty


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A transfer that is silent for 2 s is given up and tried again."""
    monkeypatch.setattr(
        "serin.store.bucket.PATIENT", Timing(connect_s=2, read_s=2, attempts=3, patience_s=60)
    )


def writer(home: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.cluster.store_writer", *arguments],
        env={**os.environ, "SERIN_HOME": str(home)},
        stdout=subprocess.PIPE,
        text=True,
    )


def test_eight_writers_publish_500_versions_none_lost_none_doubled(url: str, tmp_path: Path) -> None:
    counts = [VERSIONS // WRITERS + (number < VERSIONS % WRITERS) for number in range(WRITERS)]
    began = time.monotonic()
    running = [
        writer(tmp_path / str(number), "race", f"writer-{number}", str(count), str(SHARED))
        for number, count in enumerate(counts)
    ]
    said = [process.communicate(timeout=600)[0] for process in running]
    assert [process.returncode for process in running] == [0] * WRITERS
    lines = [json.loads(line) for text in said for line in text.splitlines()]
    published = {line["version"]: line["content"] for line in lines if "version" in line}
    won = [line["won"] for line in lines if "won" in line]
    print(f"{VERSIONS} versions by {WRITERS} writers in {time.monotonic() - began:.1f} s")
    assert sorted(line["version"] for line in lines if "version" in line) == list(range(1, VERSIONS + 1))
    assert sorted(won) == list(range(1, SHARED + 1))
    reader = Store(url, cache=tmp_path / "reader")
    assert reader.versions("race") == list(range(1, VERSIONS + 1))
    assert reader.versions("shared") == list(range(1, SHARED + 1))
    for version in range(1, VERSIONS + 1, 17):
        bundle = Path(reader.bundle("race", version).path)
        assert (bundle / "model.onnx").read_text() == published[version]
    for number in range(1, SHARED + 1):
        bundle = Path(reader.bundle("shared", number).path)
        content = (bundle / "model.onnx").read_text()
        assert json.loads((bundle / "manifest.json").read_text()) == {"content": content}


WRITES = {
    **{f"part-{number}": ("PUT", f"/train/part-{number}") for number in range(SMALL)},
    "dataset.json": ("PUT", r"/dataset\.json"),
    "begin of the large file": ("POST", r"/train/large\?uploads"),
    **{f"part {number} of it": ("PUT", rf"/train/large\?.*partNumber={number}\b") for number in (1, 2, 3)},
    "end of it": ("POST", r"/train/large\?uploadId="),
    "marker": ("PUT", f"/published/datasets/{DIGEST}.json"),
    "key": ("PUT", f"/keys/{KEY}"),
}


@pytest.mark.parametrize("write", list(WRITES))
def test_a_writer_that_is_killed_in_the_middle_of_any_upload_leaves_nothing_visible(
    write: str, url: str, server: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    victims: list[subprocess.Popen[str]] = []
    begun = threading.Event()

    def choose(request: Request) -> Fault | None:
        method, part = WRITES[write]
        if request.method != method or not re.search(part, request.path):
            return None
        assert begun.wait(60)
        return Fault(halfway=lambda: victims[0].send_signal(signal.SIGKILL), cut="request")

    with fault_proxy(server["AWS_ENDPOINT_URL"], choose) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        victims.append(writer(tmp_path / "victim", "dataset", KEY, DIGEST))
        begun.set()
        victims[0].communicate(timeout=300)
    assert victims[0].returncode == -signal.SIGKILL
    monkeypatch.setenv("AWS_ENDPOINT_URL", server["AWS_ENDPOINT_URL"])
    store = Store(url, cache=tmp_path / "next")
    assert store.datasets() == ([DIGEST] if write == "key" else [])  # it was whole before its key was written
    assert store.find_dataset(KEY) is None
    assert_whole(Path(publish_dataset(store, KEY, DIGEST).path))
    found = Store(url, cache=tmp_path / "reader").find_dataset(KEY)
    assert_whole(Path(found.path))


def assert_whole(folder: Path) -> None:
    assert (folder / "train" / "large").stat().st_size == LARGE_BYTES
    assert sorted(path.name for path in folder.rglob("*") if path.is_file()) == sorted(
        ["dataset.json", "large", *(f"part-{number}" for number in range(SMALL))]
    )


FAULTS = {
    "throttled": Fault(status=503, code="SlowDown"),
    "reset while sending": Fault(cut="request"),
    "reset while receiving": Fault(cut="response"),
    "stalled": Fault(stall_s=6.0),
    "slow": Fault(bytes_per_s=4e6),
}


@pytest.mark.parametrize("kind", list(FAULTS))
@pytest.mark.usefixtures("impatient")
def test_publishing_and_reading_succeed_over_a_network_that_fails(
    kind: str, url: str, server: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def every_third(request: Request) -> Fault | None:
        return FAULTS[kind] if request.number % 3 == 0 else None

    with fault_proxy(server["AWS_ENDPOINT_URL"], every_third) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        store = Store(url, cache=tmp_path / "here")
        publish_dataset(store, KEY, DIGEST)
        version = store.reserve_version("m")
        publish_version(store, "m", version, "graph")
        store.set_alias("m", "live", version)
        found = Store(url, cache=tmp_path / "there").find_dataset(KEY)
        assert (store.versions("m"), store.aliases("m")) == ([version], {"live": version})
    assert_whole(Path(found.path))
    assert len(proxy.failed) >= 5
    print(f"{kind}: {len(proxy.failed)} of {len(proxy.seen)} requests failed")


@pytest.mark.usefixtures("impatient")
def test_a_store_that_always_throttles_is_a_clear_error_and_shows_nothing(
    url: str, server: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def files(request: Request) -> Fault | None:
        return FAULTS["throttled"] if "/train/" in request.path else None

    with fault_proxy(server["AWS_ENDPOINT_URL"], files) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        with pytest.raises(StoreUnreachable, match="SlowDown"):
            publish_dataset(Store(url, cache=tmp_path / "here"), KEY, DIGEST)
    monkeypatch.setenv("AWS_ENDPOINT_URL", server["AWS_ENDPOINT_URL"])
    store = Store(url, cache=tmp_path / "here")
    assert store.datasets() == []
    assert store.find_dataset(KEY) is None
    assert_whole(Path(publish_dataset(store, KEY, DIGEST).path))


@pytest.mark.parametrize("renewed", [True, False])
def test_credentials_that_expire_in_the_middle(
    renewed: bool, url: str, server: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program rewrites the credentials file, as SSO tools do; or nobody does."""
    file = tmp_path / "credentials"

    def write(access: str) -> None:
        secret = server["AWS_SECRET_ACCESS_KEY"]
        file.write_text(f"[default]\naws_access_key_id = {access}\naws_secret_access_key = {secret}\n")

    def expire(request: Request) -> Fault | None:
        """The first five requests of these credentials pass."""
        if request.number <= 5 or "Credential=serin-tests/" not in request.headers.get("authorization", ""):
            return None
        if renewed and "= serin-tests\n" in file.read_text():
            file.write_text("")  # as many tools do: for a moment it is empty
            threading.Timer(0.2, write, ["serin-tests-2"]).start()
        return Fault(status=400, code="ExpiredToken")

    write("serin-tests")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    for number in range(12):
        (folder / f"rank-{number}").write_bytes(bytes(1000))
    with fault_proxy(server["AWS_ENDPOINT_URL"], expire) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        store = Store(url, cache=tmp_path / "here")
        if renewed:
            publish_checkpoint(store, "train-a/step-1", folder)
            assert fetch_checkpoint(store, "train-a/step-1", tmp_path / "there")
        else:
            with pytest.raises(StoreUnreachable, match="credentials have expired"):
                publish_checkpoint(store, "train-a/step-1", folder)
    assert proxy.failed
