"""A model in two, as for a GPU, on a real Triton: the wheel's has the Python backend alone, which runs both parts.

And what another user of the machine can do to it: ask it, and nothing else.
"""

import base64
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from serin.errors import PredictionFailed
from serin.serving.client.client import predict
from serin.serving.triton.releases import Releases
from serin.serving.triton.repository import build_repository
from serin.store.artifacts import Bundle, Release
from serin.store.store import Store
from tests.e2e import stranger
from tests.e2e.serving_host import ChildHost, wait_for
from tests.kit.waiting import until
from tests.kit.web import ask
from tests.unit.serving import bundles
from tests.unit.serving.bundles import MODEL, SCHEMA

SHARED_MEMORY = Path("/dev/shm")


def metrics(releases: Releases, release: Release) -> str:
    place = releases._place(release)
    return ask(place.metrics_port, "/metrics").text


@dataclass(frozen=True)
class Served:
    host: ChildHost
    releases: Releases
    release: Release
    bundle: Bundle
    folder: Path


@pytest.fixture(scope="module")
def ensemble(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("ensemble")
    store, host = Store(str(folder / "store")), ChildHost()
    releases = Releases(folder / "releases", host=host, store=store, devices=lambda: ())
    bundle = bundles.publish(store, bias=-1.0, in_two=True, spec="serving: {backend: ensemble}\n")
    release = Release(model=bundle.model, version=bundle.version)
    try:
        releases.start(release)
        wait_for(release.name, lambda: releases.state(release) == "ready", host, release.name)
        yield Served(host, releases, release, bundle, folder)
    finally:
        host.kill(release.name)  # that it goes in peace is shown elsewhere
        releases.stop(release)
        host.stop_all()


def test_an_ensemble_answers_as_the_whole_graph_and_refuses_in_the_same_words(ensemble: Served) -> None:
    releases, release, columns = ensemble.releases, ensemble.release, bundles.rows(40)
    wanted = bundles.score(ensemble.bundle.path, columns)
    releases.verify(release)
    for protocol, batch_rows in (("http", 1), ("grpc", 40)):
        address = getattr(releases.endpoint(release), protocol)
        found = predict(address, MODEL, columns, SCHEMA, protocol, release.version, batch_rows=batch_rows)
        np.testing.assert_allclose(found["score"], wanted, rtol=1e-6)
    found = bundles.asked_in_json(releases.endpoint(release).http, release.version, columns)
    np.testing.assert_allclose(found, wanted.ravel(), rtol=1e-6)
    bad = {**bundles.rows(2), "carrier": np.array([[b"AA"], [b"\xff"]], dtype=object)}
    with pytest.raises(PredictionFailed, match="input 'carrier': row 1 is not UTF-8"):
        predict(releases.endpoint(release).http, MODEL, bad, SCHEMA, "http", release.version)
    counted = metrics(releases, release)
    log = releases.log(release).read_text()
    assert f"{release.name} is served as ensemble on the CPU: named in the spec" in log
    assert f'release="{release.name}"' in counted
    assert 'backend="ensemble"' in counted


def test_requests_in_shared_memory_are_for_the_owner_alone(ensemble: Served) -> None:
    place = ensemble.releases._place(ensemble.release)
    assert place is not None
    regions = [path for path in SHARED_MEMORY.iterdir() if path.name.startswith(place.shared_memory_prefix)]
    assert regions, "its Python parts talk to Triton there"
    assert {oct(path.stat().st_mode & 0o777) for path in regions} == {"0o600"}


def shown_header(ensemble: Served, option: str) -> tuple[bytes, bytes]:
    """The header that opens Triton's restricted calls, as any user reads it from the process's command line."""
    place = Path(f"/proc/{ensemble.host.pid(ensemble.release.name)}/cmdline")
    arguments = stranger.read([place])[str(place)].split(b"\0")
    (given,) = [word for word in arguments if word.startswith(f"--{option}=".encode())]
    name, _, value = given.partition(b":")[2].partition(b"=")
    return name, value


@stranger.needs_root
def test_another_user_of_the_machine_cannot_load_code_into_a_release(ensemble: Served) -> None:
    """A model.py inside the request, with every header that the command line of the server gives away."""
    loaded, place = ensemble.folder / "loaded", ensemble.releases._place(ensemble.release)
    assert place is not None
    config = json.dumps({"name": "evil", "backend": "python", "max_batch_size": 1})
    code = f"open({str(loaded)!r}, 'w')\n".encode()

    name, value = shown_header(ensemble, "http-restricted-api")
    files = {"config": config, "file:1/model.py": base64.b64encode(code).decode()}
    body = json.dumps({"parameters": files}).encode()
    for header in (
        b"",
        name + b": " + value,
        name + b": " + value.replace(b"\n", b"\r\n "),
        name.replace(b"\n", b" ") + b": " + value.strip(),
    ):
        for call in (b"index", b"models/evil/load"):
            asked = [b"POST /v2/repository/" + call + b" HTTP/1.1", b"host: x", b"connection: close"]
            asked += [header] if header else []
            asked += [f"content-length: {len(body)}".encode(), b"", body]
            answer = stranger.send(place.http_port, b"\r\n".join(asked))
            assert not answer or answer.startswith(b"HTTP/1.1 403"), header

    message = service_pb2.RepositoryModelLoadRequest(model_name="evil")
    message.parameters["config"].string_param = config
    message.parameters["file:1/model.py"].bytes_param = code
    name, value = shown_header(ensemble, "grpc-restricted-protocol")
    name = b"triton-grpc-protocol-" + name
    for headers in (
        [],
        [(name, value)],
        [(name.lower(), value)],
        [(name.lower().replace(b"\n", b"").replace(b" ", b"-"), value)],
        [(name + b"-bin", base64.b64encode(value))],
    ):
        for method, sent in (("RepositoryIndex", b""), ("RepositoryModelLoad", message.SerializeToString())):
            status = stranger.grpc_status(place.grpc_port, method, sent, headers)
            assert status in (None, 14), headers  # Triton says UNAVAILABLE, gRPC resets what is illegal

    regions = list(Path("/dev/shm").glob(f"{place.shared_memory_prefix}*"))
    assert regions
    assert not stranger.read(regions), "rows of requests are in there"
    assert not loaded.exists(), "somebody else's code ran as the owner of the stack"
    assert ensemble.releases.state(ensemble.release) == "ready", "and it still answers"


def test_a_release_that_cannot_score_its_warm_up_never_becomes_ready(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "store"))
    bundle = bundles.publish(store, bias=0.0)
    release = Release(model=bundle.model, version=bundle.version)
    repository = build_repository(bundle, tmp_path / "releases" / release.name / "repository")
    golden = repository / MODEL / "warmup" / "0-0.bin"
    golden.chmod(0o644)
    golden.write_bytes(b"\x01\x00\x00\x00\xff")
    host, seen = ChildHost(), set()
    releases = Releases(tmp_path / "releases", host=host, store=store, devices=lambda: ())

    def dead() -> bool:
        seen.add(releases.state(release))
        return "dead" in seen

    try:
        releases.start(release)
        until(dead, "its end", within_s=120.0)
    finally:
        releases.stop(release)
        host.stop_all()
    print(releases.log(release).read_text()[-600:])  # Triton 2.51 says why, or falls over before it can
    assert seen <= {"starting", "dead"}
