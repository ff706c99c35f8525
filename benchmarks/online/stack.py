"""Two models with the same graph behind one gateway: one whose clients send everything, one with online windows."""

from __future__ import annotations

import json
import os
import random
import struct
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil

from benchmarks.child import ContenderFailed
from benchmarks.serving.servers import START_S
from serin.cluster.version_settings import stored_timeouts
from serin.errors import StateUnavailable
from serin.formats.schema import DTYPE_OF_KIND, InputColumn, Kind
from serin.formats.windows import OnlineColumn, OnlineWindow, WindowPlan
from serin.host.windows import WINDOWS, ask_windows, plans_folder, state_folder
from serin.machine.in_memory import remove_sockets, socket_folder
from serin.machine.ports import free_ports
from serin.machine.process import Process
from serin.serving.children import Children
from serin.serving.client.address import Address
from serin.serving.client.tensors import HEADER_BYTES
from serin.serving.envoy.gateway import PROCESS_NAME, Gateway
from serin.serving.triton.installation import find_request_filter
from serin.serving.triton.releases import Releases
from serin.serving.tuning.load import http_request
from serin.serving.tuning.load_connections import Target
from serin.store.artifacts import ModelRoute, Release
from serin.store.store import Store
from serin.windows.events import OnlineWindows, window_key
from serin.windows.lmdb_state import LmdbState
from serin.windows.state import MemoryState
from tests.unit.serving import bundles

PLAIN, WINDOWED = "plain", "windowed"
EVENTS_A_KEY: Final = 20
SPEC: Final = "objectives: {latency_ms: 500}\nserving: {request_timeout: 10s, backend: onnx_native}\n"
_HOUR_US: Final = 3_600_000_000
_FILLED_AT_ONCE: Final = 10_000
_KINDS: Final[dict[str, Kind]] = {"at": "timestamp", "id": "string", "card": "string", "amount": "float"}
_WIRE: Final = {
    "at": "INT64",
    "id": "BYTES",
    "card": "BYTES",
    "amount": "FP32",
    "carrier": "BYTES",
    "night": "INT8",
}
PLAN: Final = WindowPlan(
    time="at",
    id="id",
    max_late_us=_HOUR_US,
    max_future_us=60_000_000,
    unavailable="refuse",
    inputs=tuple(
        InputColumn(name=name, kind=kind, dtype=DTYPE_OF_KIND[kind]) for name, kind in _KINDS.items()
    ),
    dropped=tuple(_KINDS),
    windows=(
        OnlineWindow(
            by=("card",),
            span_us=_HOUR_US,
            delay_us=0,
            columns={
                "distance": OnlineColumn(function="count", column=None, back=1, kind="int"),
                "temp": OnlineColumn(function="sum", column="amount", back=1, kind="float"),
            },
        ),
    ),
)


@dataclass(slots=True)
class Running:
    home: Path
    address: Address
    host: Children
    keys: int
    sent: int = 0

    def target(self, model: str, count: int) -> Target:
        """Requests of one row; those with windows are different events of keys that are drawn at random."""
        body = _plain_body() if model == PLAIN else None
        bodies = [body or self._event_body() for _ in range(1 if body else count)]
        path = f"/v2/models/{model}/infer"
        requests = [
            http_request(self.address, path, data, {HEADER_BYTES: str(head_bytes)})
            for data, head_bytes in bodies
        ]
        return Target(address=self.address, requests=tuple(requests))

    def memory_mb(self) -> float:
        """Of the step, without the pages of the file that it maps."""
        found = psutil.Process(self.host.pid(WINDOWS)).memory_full_info()
        return (found.rss - getattr(found, "shared", 0)) / 1e6

    def events(self, count: int) -> list[dict[str, Any]]:
        """Events to push, of keys that are drawn at random."""
        found = []
        for _ in range(count):
            self.sent += 1
            card = _card(random.randrange(self.keys))
            found.append({"at": time.time_ns() // 1000, "id": f"p{self.sent}", "card": card, "amount": 1.5})
        return found

    def _event_body(self) -> tuple[bytes, int]:
        self.sent += 1
        values = {
            "at": struct.pack("<q", time.time_ns() // 1000), "id": _text(f"r{self.sent:012}"),
            "card": _text(_card(random.randrange(self.keys))), "amount": struct.pack("<f", 1.5), "carrier": _text("AA"),
            "night": b"\0",
        }  # fmt: skip
        return _body(values)


def _plain_body() -> tuple[bytes, int]:
    values = {
        "carrier": _text("AA"),
        "temp": struct.pack("<f", 1.5),
        "distance": struct.pack("<q", 20),
        "night": b"\0",
    }
    return _body(values)


def _body(values: dict[str, bytes]) -> tuple[bytes, int]:
    wire = {**_WIRE, "temp": "FP32", "distance": "INT64"}
    inputs = [
        {
            "name": name,
            "datatype": wire[name],
            "shape": [1, 1],
            "parameters": {"binary_data_size": len(value)},
        }
        for name, value in values.items()
    ]
    head = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
    return head + b"".join(values.values()), len(head)


def _text(value: str) -> bytes:
    return struct.pack("<I", len(value)) + value.encode()


def _card(number: int) -> str:
    return f"card {number:09}"


@contextmanager
def running(home: Path, keys: int, say: Callable[[str], None]) -> Iterator[Running]:
    store = Store(str(home / "store"))
    say(f"filling the state with {keys:,} keys of {EVENTS_A_KEY} events")
    _fill(home, keys)
    with Children() as host:
        fleet = Releases(home / "releases", host=host, store=store, devices=lambda: ())
        releases = []
        try:
            for name, extra in ((PLAIN, {}), (WINDOWED, {"windows.json": PLAN.dump()})):
                made = bundles.publish(store, bias=0.1, spec=SPEC, model=name, extra=extra)
                releases.append(Release(model=name, version=made.version))
                fleet.start(releases[-1])
            say("starting two Tritons, the gateway and the step that computes windows")
            for each in releases:
                host.wait_for(each.name, lambda each=each: fleet.state(each) == "ready", within_s=START_S)  # type: ignore[misc]
            host.start(_step(home))
            host.wait_for(WINDOWS, lambda: _answers(home), within_s=START_S)
            port = _start_gateway(home, host, fleet, store, releases)
            yield Running(home, Address.parse(f"127.0.0.1:{port}"), host, keys)
        finally:
            host.stop(PROCESS_NAME)
            host.stop(WINDOWS)
            for each in releases:
                host.kill(each.name)
                fleet.stop(each)
            remove_sockets(home)


def _fill(home: Path, keys: int) -> None:
    """All keys have the same events: of the last hour, one every three minutes."""
    memory, now = MemoryState(), time.time_ns() // 1000
    windows = OnlineWindows(WINDOWED, PLAN, memory)
    for number in range(EVENTS_A_KEY):
        at = now - (EVENTS_A_KEY - number) * _HOUR_US // EVENTS_A_KEY
        windows.answer({"at": [at], "id": [f"f{number}"], "card": [_card(0)], "amount": [1.5]}, [at])
    key, found = window_key(WINDOWED, PLAN, PLAN.windows[0], [_card(0)]), dict[bytes, bytes | None]()
    memory.update([key], lambda kept: found.update(kept) or {})
    content = found[key]
    state = LmdbState(state_folder(home))
    for first in range(0, keys, _FILLED_AT_ONCE):
        numbers = range(first, min(first + _FILLED_AT_ONCE, keys))
        filled = {window_key(WINDOWED, PLAN, PLAN.windows[0], [_card(number)]): content for number in numbers}
        state.update([], lambda _, filled=filled: filled)  # type: ignore[misc]
    state.close()
    plans_folder(home).mkdir(parents=True)
    (plans_folder(home) / f"{WINDOWED}.json").write_bytes(PLAN.dump())


def _answers(home: Path) -> bool:
    try:
        return "keys" in ask_windows(home, "/status", within_s=1.0)
    except StateUnavailable:
        return False


def _step(home: Path) -> Process:
    return Process(
        name=WINDOWS,
        command=(sys.executable, "-m", "serin.cluster.windows_step"),
        environment={**os.environ, "SERIN_HOME": str(home), "SERIN_STORE": str(home / "store")},
        folder=Path.cwd(),
        log=home / "windows.log",
        stop_s=20.0,
    )


def _start_gateway(home: Path, host: Children, fleet: Releases, store: Store, releases: list[Release]) -> int:
    admin = socket_folder(home) / "admin.sock"
    gateway = Gateway(home / "gateway", admin=admin, log=home / "gateway" / "requests.jsonl")
    (port,) = free_ports(1)
    gateway.write_bootstrap(port, request_filter=find_request_filter())
    host.start(gateway.process())
    host.wait_for(PROCESS_NAME, gateway.ready, within_s=START_S)
    limits = stored_timeouts(store)
    gateway.apply(
        [ModelRoute(model=each.model, epoch=1, stable=each) for each in releases],
        {each.name: fleet.endpoint(each) for each in releases},
        {each.model: limits(each) for each in releases},
    )
    return port


def bytes_a_key(home: Path) -> float:
    found = ask_windows(home, "/status")
    if "problem" in found:
        raise ContenderFailed(found["problem"])
    return float(found["bytes"] / found["keys"])
