"""The parts of serving, put together for one home. `up`, `down`, the controller and the command all build them here."""

from __future__ import annotations

from pathlib import Path

from serin.environment import runtime_folder
from serin.serving.gateway import Gateway
from serin.serving.releases import Releases
from serin.serving.triton import find_triton
from serin.stack.supervisor import Supervisor
from serin.store import Store


def request_log(home: Path) -> Path:
    return home / "gateway" / "requests.jsonl"


def build_gateway(home: Path) -> Gateway:
    return Gateway(home / "gateway", admin=runtime_folder(home) / "envoy.sock", log=request_log(home))


def build_releases(home: Path) -> Releases:
    return Releases(home / "releases", host=Supervisor(home), store=Store.open(), install=find_triton())
