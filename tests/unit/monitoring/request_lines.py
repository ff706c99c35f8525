"""Request logs for tests, in the gateway's format."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from serin.formats.serving.request import Request

GOOD = Request(
    t=0.0,
    model="flights",
    epoch=1,
    arm="stable",
    release="flights-v1",
    code=200,
    grpc=None,
    us=5_000.0,
    attempts=1,
    flags="-",
    id="id",
)


def line(request: Request) -> str:
    values: dict[str, Any] = request._asdict()
    return json.dumps({**values, "t": f"{request.t:.6f}"}) + "\n"


def append(log: Path, requests: Iterable[Request]) -> None:
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as stream:
        stream.writelines(map(line, requests))
