"""The servers of the GPU benchmark: one bundle in one Triton process for each backend and setting."""

from __future__ import annotations

import http.client
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.child import ContenderFailed
from serin.errors import ReleaseNotReady
from serin.export.build import export_model
from serin.machine.hardware import inventory
from serin.machine.ports import free_ports
from serin.serving.children import Children
from serin.serving.native.onnx_backend import SETTINGS
from serin.serving.triton.backends import Server
from serin.serving.triton.gpu_memory import estimate_need
from serin.serving.triton.installation import find_triton
from serin.serving.triton.process import TritonPorts, new_place, triton_process
from serin.serving.triton.repository import build_repository, choose_for, serving_settings
from serin.store.artifacts import Bundle, Release
from serin.store.store import Store
from tests.e2e.serving_host import is_ready
from tests.e2e.split_triton import SERVER, on_the_host
from tests.unit.export.small_dataset import make_trained

START_S = 60.0
MAX_ROWS = 4096
NETWORK = {"kind": "mlp", "hidden": [2048, 1024, 512]}
_SPLIT = ("provider", "arena", "graphs", "workers", "piece_rows", "sizes")  # of the line in native.txt
_COUNTERS = {
    "requests": "nv_inference_request_success",
    "batches": "nv_inference_exec_count",
    "queue_us": "nv_inference_queue_duration_us",
    "read_us": "nv_inference_compute_input_duration_us",
    "score_us": "nv_inference_compute_infer_duration_us",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A server. `serving`: settings of the spec; `split`: words that replace those of the native settings."""

    name: str
    serving: Mapping[str, object]
    split: Mapping[str, str]

    @classmethod
    def parse(cls, text: str) -> Wanted:
        """Reads `name:key=value,...`, a variant of the native backend: instances, and the words of its line `split`."""
        name, _, rest = text.partition(":")
        words = dict(word.split("=", 1) for word in rest.split(",") if word)
        instances = int(words.pop("instances", "1"))
        if unknown := set(words) - set(_SPLIT):
            raise ContenderFailed(f"{text}: what is {', '.join(sorted(unknown))}? Known: {', '.join(_SPLIT)}")
        serving = {"backend": "onnx_native", "device": "gpu", "instances": instances}
        return cls(name=name, serving=serving, split={**words, **_commas(words)})


def _commas(words: Mapping[str, str]) -> dict[str, str]:
    return {"sizes": words["sizes"].replace("+", ",")} if "sizes" in words else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    wanted: Wanted
    place: TritonPorts

    @property
    def url(self) -> str:
        return self.place.endpoint.http

    def counters(self) -> dict[str, float]:
        """Returns Triton's counters: requests and batches, and where their time went."""
        connection = http.client.HTTPConnection("127.0.0.1", self.place.metrics_port, timeout=10)
        try:
            connection.request("GET", "/metrics")
            text = connection.getresponse().read().decode()
        finally:
            connection.close()
        found = {
            key: re.findall(rf"^{name}{{.*}} (\S+)$", text, re.MULTILINE) for key, name in _COUNTERS.items()
        }
        return {key: sum(map(float, values)) for key, values in found.items()}


def flights_bundle(store: Path | None, folder: Path) -> Bundle:
    """Returns the bundle in `store`, or exports one: 7 raw columns with strings, times and a lookup, and a network."""
    if store is not None:
        found = Store(str(store))
        return found.bundle("flights", max(found.versions("flights")))
    sections = {
        "model": NETWORK,
        "export": {"target": "gpu", "variants": ["fp32"]},
        "objectives": {"latency_ms": 50},
        "serving": {"max_batch_rows": MAX_ROWS},
    }
    trained = make_trained(folder / "work", "binary", **sections)
    made = Store(str(folder / "store"))
    return export_model(trained.spec, trained.checkpoint, trained.dataset, store=made, lineage={})


@contextmanager
def serving(
    bundle: Bundle, folder: Path, all_wanted: Sequence[Wanted], *, rehearsal: bool = False
) -> Iterator[dict[str, Running]]:
    """Starts all of them on the first GPU, or the CPU where they want that. `rehearsal`: the host plays the GPU."""
    with Children() as host:
        machines = {gpus: find_triton().describe(gpus=gpus) for gpus in (False, not rehearsal)}
        running = {
            wanted.name: _start(host, bundle, folder, wanted, machines, rehearsal) for wanted in all_wanted
        }
        for name, server in list(running.items()):
            try:
                host.wait_for(name, lambda server=server: is_ready(server.url), within_s=START_S)  # type: ignore[misc]
            except ReleaseNotReady as error:
                log = (folder / name / "log.txt").read_text()[-3000:]
                print(f"{name} did not start: {error}\n{log}", flush=True)
                del running[name]
        yield running


def _start(
    host: Children,
    bundle: Bundle,
    folder: Path,
    wanted: Wanted,
    machines: Mapping[bool, Server],
    rehearsal: bool,
) -> Running:
    install, own = find_triton(), folder / wanted.name
    own.mkdir(parents=True)
    spec = serving_settings(bundle).model_copy(update=dict(wanted.serving))
    on_host = rehearsal and spec.backend == "onnx_native"
    if rehearsal and not on_host:
        spec = spec.model_copy(update={"device": "cpu"})
    devices = inventory()[:1] if spec.device == "gpu" else ()
    server, gpus = (SERVER, (0,)) if on_host else (machines[bool(devices)], (0,) * len(devices))
    choice = choose_for(bundle, server=server, serving=spec, gpus=len(gpus))
    print(f"{wanted.name}: {choice}", flush=True)
    arena = estimate_need(Path(bundle.path), choice, spec).arena_bytes if devices else None
    repository = build_repository(
        bundle, own / "repository", server=server, serving=spec, gpus=gpus, gpu_bytes=arena
    )
    if on_host:
        on_the_host(repository / bundle.model, bundle.version, workers=2, piece_rows=256)
    if wanted.split:
        _change(repository / bundle.model / str(bundle.version) / SETTINGS, wanted.split)
    http_port, grpc_port, metrics_port = free_ports(3)
    release = Release(model=bundle.model, version=bundle.version)
    place = new_place(release, (http_port, grpc_port, metrics_port))
    ids = [device.id for device in devices]
    process = triton_process(install, release, repository, place, own / "log.txt", ids)
    host.start(replace(process, name=wanted.name))
    return Running(wanted=wanted, place=place)


def _change(settings: Path, words: Mapping[str, str]) -> None:
    lines = settings.read_text().splitlines()
    (at,) = [number for number, line in enumerate(lines) if line.startswith("split ")]
    now = dict(zip(_SPLIT, lines[at].split()[1:], strict=True))
    lines[at] = " ".join(["split", *{**now, **words}.values()])
    settings.chmod(0o644)
    settings.write_text("\n".join([*lines, ""]))
