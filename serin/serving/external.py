"""Servers that Serin does not run: a canary between any two that support the KServe v2 protocol.

`external/<model>.json`, an object of the home or of the store that several hosts share, numbers the addresses of a
model as its versions, from 1, never reused. Nothing is started or stopped here. A server is ready when it reports the
model as ready, and it fits when it has the same tensors as the live one.
"""

from __future__ import annotations

import http.client
import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Final, Literal

from serin.errors import ObjectChanged, ObjectExists, ReleaseNotReady
from serin.machine.documents import parse_json
from serin.machine.typed_json import Document, Stored
from serin.spec.names import valid_model_name
from serin.store.artifacts import Endpoint, Release
from serin.store.objects import FolderObjects, Objects, swap

Tensors = Mapping[str, tuple[str, tuple[int, ...]]]
"""By name: type and sizes, -1 for any, none where it names none."""

REQUEST_TIMEOUT_S: Final = 5.0  # the default of a model in the store

_FRESH_S: Final = 5.0
_ASK_S: Final = 2.0  # for readiness and metadata, which no server computes
_Address = Annotated[
    Endpoint,
    Stored(
        lambda entry: Endpoint(**entry, elsewhere=True),
        lambda place: {"http": place.http, "grpc": place.grpc},
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Servers(Document, form="serin.external"):
    request_timeout_s: float = REQUEST_TIMEOUT_S
    versions: Mapping[int, _Address] = field(default_factory=dict)


def parse_address(text: str) -> Endpoint:
    """Parses `http://host:port`, optionally with `,host:port` for gRPC. Raises ValueError for anything else."""
    if "https://" in text or "grpcs://" in text:
        raise ValueError(
            f"{text!r}: the gateway connects to servers without TLS; use http://host:port of a server in the same "
            "network, or of a proxy beside this gateway that connects to it with TLS"
        )
    http_part, _, grpc_part = text.partition(",")
    http_place = http_part.removeprefix("http://").rstrip("/")
    grpc_place = grpc_part.removeprefix("grpc://").rstrip("/") or http_place
    for place in (http_place, grpc_place):
        host, _, port = place.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65536 or "/" in host:
            raise ValueError(
                f"{text!r} is not a valid address: use http://host:port, or http://host:port,host:port with gRPC"
            )
    return Endpoint(http=http_place, grpc=grpc_place, elsewhere=True)


class External:
    """What a shared store says is asked for again after some seconds. `versions` always asks, and a rollout begins with
    that, so what it needs is known."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._fresh_s = 0.0 if isinstance(objects, FolderObjects) else _FRESH_S
        self._known: dict[str, tuple[float, _Servers]] = {}

    def register(self, model: str, endpoint: Endpoint) -> Release:
        """Returns the version of an address: the one it has, or the next."""

        def add(record: _Servers) -> _Servers:
            if any(_same(other, endpoint) for other in record.versions.values()):
                return record
            return replace(
                record, versions={**record.versions, max(record.versions, default=0) + 1: endpoint}
            )

        versions = self._change(model, add).versions
        return Release(
            model=model, version=next(each for each in versions if _same(versions[each], endpoint))
        )

    def set_request_timeout(self, model: str, seconds: float) -> None:
        """Sets how long one request to any of the model's servers may take."""
        self._change(model, lambda record: replace(record, request_timeout_s=seconds))

    def request_timeout_s(self, model: str) -> float:
        return self._record(model).request_timeout_s

    def versions(self, model: str) -> list[int]:
        return sorted(self._read(model)[0].versions)

    def has(self, release: Release) -> bool:
        return release.version in self._record(release.model).versions

    def endpoint(self, release: Release) -> Endpoint:
        return self._record(release.model).versions[release.version]

    def state(self, release: Release) -> Literal["starting", "ready"]:
        """Returns the state of a server, never dead: Serin cannot know that. One that does not answer is not ready."""
        return "ready" if self._ask(release, f"/v2/models/{release.model}/ready") is not None else "starting"

    def check_fits(self, release: Release, stable: Release) -> None:
        """Checks that the server has the same tensors as the stable one, if that one answers.

        Other servers are not asked: they were never live.
        """
        mine, theirs = self.verify(release), self._tensors(stable)
        for kind in theirs or {}:
            if theirs and not _alike(theirs[kind], mine[kind]):
                what = f"its {kind} {_shown(mine[kind])} differ from those of {stable.name}, {_shown(theirs[kind])}"
                raise self._unfit(release, what)

    def verify(self, release: Release) -> dict[str, Tensors]:
        """Checks that the server describes its model; returns its inputs and outputs."""
        tensors = self._tensors(release)
        if tensors is None:
            raise self._unfit(release, "it does not describe its model")
        return tensors

    def _tensors(self, release: Release) -> dict[str, Tensors] | None:
        """Returns inputs and outputs; None if the server did not answer."""
        answer = self._ask(release, f"/v2/models/{release.model}")
        try:
            described = json.loads(answer or b"")
            return {
                kind: {
                    tensor["name"]: (tensor["datatype"], tuple(map(int, tensor.get("shape") or ())))
                    for tensor in described[kind]
                }
                for kind in ("inputs", "outputs")
            }
        except (ValueError, KeyError, TypeError, AttributeError):
            return None

    def _ask(self, release: Release, path: str) -> bytes | None:
        """Returns the body of a 200 answer; None for anything else."""
        connection = http.client.HTTPConnection(self.endpoint(release).http, timeout=_ASK_S)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            body = answer.read()
            return body if answer.status == 200 else None
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()

    def _unfit(self, release: Release, reason: str) -> ReleaseNotReady:
        page = f"http://{self.endpoint(release).http}/v2/models/{release.model}"
        return ReleaseNotReady(release=release.name, reason=reason, log=page)

    def _record(self, model: str) -> _Servers:
        read_at, record = self._known.get(model, (-math.inf, _Servers()))
        return record if time.monotonic() - read_at < self._fresh_s else self._read(model)[0]

    def _read(self, model: str) -> tuple[_Servers, str | None]:
        """Returns the record and its tag; None: there is none."""
        key, stored = _key(model), self._objects.read(_key(model))
        advice = f"restore it, or move it away and name the servers of {model} again (`serin rollout start --stable`)"
        record = _Servers()
        if stored is not None:
            place = f"{self._objects.url}/{key}"
            record = parse_json(place, stored.content, _Servers.from_json, advice=advice)
        self._known[model] = (time.monotonic(), record)
        return record, stored.tag if stored else None

    def _change(self, model: str, change: Callable[[_Servers], _Servers]) -> _Servers:
        while True:
            before, tag = self._read(model)
            after = change(before)
            if after == before:
                return after
            try:
                swap(self._objects, _key(model), after.dump(), tag)
            except (ObjectChanged, ObjectExists):
                continue  # another one was faster
            self._known.pop(model, None)
            return after


def _key(model: str) -> str:
    return f"external/{valid_model_name(model)}.json"


def _same(some: Endpoint, other: Endpoint) -> bool:
    return (some.http, some.grpc) == (other.http, other.grpc)


def _alike(some: Tensors, others: Tensors) -> bool:
    return some.keys() == others.keys() and all(
        kind == others[name][0] and _sizes_fit(sizes, others[name][1]) for name, (kind, sizes) in some.items()
    )


def _sizes_fit(some: tuple[int, ...], others: tuple[int, ...]) -> bool:
    if not some or not others:
        return True
    same_rank = len(some) == len(others)
    return same_rank and all(-1 in pair or pair[0] == pair[1] for pair in zip(some, others, strict=True))


def _shown(tensors: Tensors) -> str:
    return ", ".join(f"{name!r} {kind} {list(sizes)}" for name, (kind, sizes) in tensors.items())
