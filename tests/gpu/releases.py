"""A network exported for a GPU, and its releases behind a gateway."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from serin.serving.envoy.gateway import PROCESS_NAME
from serin.serving.triton.releases import Releases
from serin.store.artifacts import Bundle, ModelRoute, Release
from serin.store.store import Store
from tests.e2e.serving_host import ChildHost, wait_for
from tests.e2e.serving_stack import start_gateway
from tests.unit.export.small_dataset import Trained, make_trained

NETWORK = {"kind": "mlp", "hidden": [2048, 1024, 512]}


def exported(folder: Path, store: Store, device: str, **serving: object) -> tuple[Trained, Bundle]:
    sections = {
        "model": NETWORK,
        "export": {"target": "gpu", "variants": ["fp32", "fp16"]},
        "objectives": {"latency_ms": 50},
        "serving": {**({} if device == "auto" else {"device": device}), **serving},
    }
    trained = make_trained(folder, "binary", **sections)
    return trained, trained.export(store)


@contextmanager
def serving_gateway(store: Store, *bundles: Bundle) -> Iterator[tuple[Releases, str]]:
    """The bundles as running releases behind one gateway; each can be asked by its version."""
    host, folder = ChildHost(), Path(tempfile.mkdtemp(prefix="serin-gpu-"))  # short: it holds unix sockets
    releases = Releases(folder / "releases", host=host, store=store)
    names = [Release(model=bundle.model, version=bundle.version) for bundle in bundles]
    try:
        for release in names:
            releases.start(release)
        gateway, port = start_gateway(folder, host)
        for release in names:
            _until_ready(releases, release, host)
        endpoints = {release.name: releases.endpoint(release) for release in names}
        gateway.apply([ModelRoute(model=names[0].model, epoch=1, stable=names[0])], endpoints)
        yield releases, f"127.0.0.1:{port}"
    finally:
        host.stop(PROCESS_NAME)  # Triton waits for open connections, and Envoy keeps some
        for release in releases.running():
            releases.stop(release)
        host.stop_all()
        shutil.rmtree(folder, ignore_errors=True)


def _until_ready(releases: Releases, release: Release, host: ChildHost) -> None:
    try:
        wait_for(release.name, lambda: releases.state(release) == "ready", host, release.name, within_s=180)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{releases.log(release).read_text()[-4000:]}") from error
