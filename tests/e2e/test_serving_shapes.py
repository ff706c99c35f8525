"""A model in two, as for a GPU, on a real Triton: the wheel's has the Python backend alone, which runs both parts."""

from __future__ import annotations

import http.client
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from serin.artifacts import Bundle, Release
from serin.errors import PredictionFailed
from serin.serving.client import predict
from serin.serving.releases import Releases
from serin.serving.repository import build_repository
from serin.store import Store
from tests.e2e.serving_host import ChildHost, wait_for
from tests.unit.serving import bundles
from tests.unit.serving.bundles import MODEL, SCHEMA


@contextmanager
def served(store: Store, bundle: Bundle) -> Iterator[tuple[Releases, Release]]:
    host, folder = ChildHost(), Path(tempfile.mkdtemp(prefix="serin-e2e-"))
    releases = Releases(folder / "releases", host=host, store=store, devices=lambda: ())
    release = Release(model=bundle.model, version=bundle.version)
    try:
        releases.start(release)
        wait_for(release.name, lambda: releases.state(release) == "ready", host, release.name)
        yield releases, release
    finally:
        for each in releases.running():
            host.kill(each.name)  # that it goes in peace is shown elsewhere
            releases.stop(each)
        host.stop_all()
        shutil.rmtree(folder, ignore_errors=True)


def metrics(releases: Releases, release: Release) -> str:
    place = releases._place(release)
    assert place is not None
    connection = http.client.HTTPConnection("127.0.0.1", place.metrics_port, timeout=10)
    try:
        connection.request("GET", "/metrics")
        return connection.getresponse().read().decode()
    finally:
        connection.close()


def test_an_ensemble_answers_as_the_whole_graph_and_refuses_in_the_same_words(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "store"))
    bundle = bundles.publish(store, bias=-1.0, in_two=True, spec="serving: {shape: ensemble}\n")
    columns = bundles.rows(40)
    wanted = bundles.score(bundle.path, columns)
    with served(store, bundle) as (releases, release):
        releases.verify(release)
        for protocol, batch_rows in (("http", 1), ("grpc", 40)):
            address = getattr(releases.endpoint(release), protocol)
            found = predict(address, MODEL, columns, SCHEMA, protocol, release.version, batch_rows=batch_rows)
            np.testing.assert_allclose(found["score"], wanted, rtol=1e-6)
        bad = {**bundles.rows(2), "carrier": np.array([[b"AA"], [b"\xff"]], dtype=object)}
        with pytest.raises(PredictionFailed, match="input 'carrier': row 1 is not UTF-8"):
            predict(releases.endpoint(release).http, MODEL, bad, SCHEMA, "http", release.version)
        counted = metrics(releases, release)
        log = releases.log(release).read_text()
    assert f"{release.name} is served as ensemble on the CPU: named in the spec" in log
    assert f'release="{release.name}"' in counted
    assert 'shape="ensemble"' in counted


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
        wait_for("its end", dead, host)
    finally:
        releases.stop(release)
        host.stop_all()
    print(releases.log(release).read_text()[-600:])  # Triton 2.51 says why, or falls over before it can
    assert seen <= {"starting", "dead"}
