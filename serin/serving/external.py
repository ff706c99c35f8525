"""Servers that Serin does not run: a canary between any two that support the KServe v2 protocol.

Each is a version in the store, whose bundle has an address (`server.json`) in the place of a graph, and beside it what
is recorded and watched of it: its spec, the schema that it described itself with, and rows to compare with. Nothing is
started or stopped here. A server is ready when it reports the model as ready, and it fits when it has the same tensors
as the live one.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, cast

from serin.errors import NotFound, ReleaseNotReady, RolloutRefused
from serin.formats.schema import ELSEWHERE, KIND_OF_DTYPE, DType, InputColumn, OutputTensor
from serin.machine import environment
from serin.machine.documents import read_facts
from serin.machine.typed_json import Document
from serin.store.artifacts import Endpoint, Release
from serin.store.published import SERVER
from serin.store.store import Store

Tensors = Mapping[str, tuple[str, tuple[int, ...]]]
"""By name: type and sizes, -1 for any, none where it names none."""

_ABSENT_S: Final = 5.0  # until a version that was not in the store is looked for again
_ASK_S: Final = 2.0  # for readiness and metadata, which no server computes


@dataclass(frozen=True, slots=True, kw_only=True)
class Server(Document, form="serin.server"):
    """The file `server.json`: where a version is served."""

    http: str
    grpc: str


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
    """Which versions are served elsewhere, and where. A version never changes, so each is read once."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: dict[tuple[str, str], Endpoint | None] = {}
        self._absent: dict[tuple[str, str], float] = {}

    def has(self, release: Release) -> bool:
        return self._server(release) is not None

    def endpoint(self, release: Release) -> Endpoint:
        found = self._server(release)
        if found is None:
            raise NotFound(kind="server elsewhere for", name=release.name, known=[])
        return found

    def _server(self, release: Release) -> Endpoint | None:
        key = release.model, release.label
        if key not in self._known and time.monotonic() - self._absent.get(key, -_ABSENT_S) >= _ABSENT_S:
            found = self._store.has_file(*key, SERVER)
            if found is None:
                self._absent[key] = time.monotonic()
            else:
                self._known[key] = read_server(Path(self._store.bundle(*key).path)) if found else None
        return self._known.get(key)

    def state(self, release: Release) -> Literal["starting", "ready"]:
        """Returns the state of a server, never dead: Serin cannot know that. One that does not answer is not ready."""
        ready = _ask(self.endpoint(release), f"/v2/models/{release.model}/ready").body is not None
        return "ready" if ready else "starting"

    def check_answers(self, release: Release) -> None:
        """Raises RolloutRefused when nothing answers at the server's address, ready or not."""
        place = self.endpoint(release)
        if error := _ask(place, f"/v2/models/{release.model}/ready").error:
            reason = (
                f"http://{place.http} does not answer on {environment.host()} ({error}). Start the server first. On "
                "Kubernetes a network policy must allow the controllers and the gateways to reach it: see "
                "deployments/kubernetes/servers-elsewhere"
            )
            raise RolloutRefused(model=release.model, command="start", reason=reason)

    def check_fits(self, release: Release, stable: Release) -> None:
        """Checks that the server has the same tensors as the stable one, if that one answers.

        Other servers are not asked: they were never live.
        """
        mine, theirs = self.verify(release), describe(self.endpoint(stable), release.model)
        for kind in theirs or {}:
            if theirs and not _alike(theirs[kind], mine[kind]):
                what = f"its {kind} {_shown(mine[kind])} differ from those of {stable.name}, {_shown(theirs[kind])}"
                raise self._unfit(release, what)

    def verify(self, release: Release) -> dict[str, Tensors]:
        """Checks that the server describes its model; returns its inputs and outputs."""
        tensors = describe(self.endpoint(release), release.model)
        if tensors is None:
            raise self._unfit(release, "it does not describe its model")
        return tensors

    def _unfit(self, release: Release, reason: str) -> ReleaseNotReady:
        page = f"http://{self.endpoint(release).http}/v2/models/{release.model}"
        return ReleaseNotReady(release=release.name, reason=reason, log=page)


def describe(place: Endpoint, model: str) -> dict[str, Tensors] | None:
    """Returns the inputs and outputs of a model as its server describes them; None if it does not."""
    try:
        described = json.loads(_ask(place, f"/v2/models/{model}").body or b"")
        return {
            kind: {
                tensor["name"]: (tensor["datatype"], tuple(map(int, tensor.get("shape") or ())))
                for tensor in described[kind]
            }
            for kind in ("inputs", "outputs")
        }
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def recordable(
    tensors: Mapping[str, Tensors], left_out: Collection[str]
) -> tuple[tuple[InputColumn, ...], tuple[OutputTensor, ...], list[str]]:
    """The columns of a request and the tensors of an answer that can be recorded, and what is wrong with the others.
    `left_out`: names of inputs that are not recorded and may be of any kind."""
    inputs, outputs, wrong = [], [], []
    for kind in ("inputs", "outputs"):
        for name, (dtype, sizes) in tensors[kind].items():
            problem = _not_recordable(dtype, sizes)
            if problem and kind == "inputs" and name in left_out:
                continue
            if problem:
                wrong.append(f"{kind.removesuffix('s')} {name!r} {problem}")
            elif kind == "inputs":
                known = cast("DType", dtype)
                column = InputColumn(
                    name=name,
                    dtype=known,
                    kind=KIND_OF_DTYPE[known],
                    source=ELSEWHERE,
                    dims=sizes[1:] or (1,),
                )
                inputs.append(column)
            else:
                outputs.append(OutputTensor(name=name, dtype=cast("DType", dtype), dims=sizes[1:] or (1,)))
    return tuple(inputs), tuple(outputs), wrong


def _not_recordable(dtype: str, sizes: tuple[int, ...]) -> str:
    """Why the values of a tensor cannot be recorded; empty: they can."""
    if dtype not in KIND_OF_DTYPE:
        return f"has the type {dtype}, which is not recorded (these are: {', '.join(KIND_OF_DTYPE)})"
    if sizes[:1] not in ((-1,), (1,)) or any(size < 1 for size in sizes[1:]):
        return f"has the shape {list(sizes)}; recorded are tensors with any number of rows of a fixed size: [-1, ...]"
    return ""


@dataclass(frozen=True, slots=True)
class _Asked:
    """`body`: of an answer 200. `error`: why there was no answer."""

    body: bytes | None = None
    error: str = ""


def _ask(place: Endpoint, path: str) -> _Asked:
    connection = http.client.HTTPConnection(place.http, timeout=_ASK_S)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        body = answer.read()
        return _Asked(body if answer.status == 200 else None)
    except (OSError, http.client.HTTPException) as error:
        return _Asked(error=str(error) or type(error).__name__)
    finally:
        connection.close()


def read_server(bundle: Path) -> Endpoint | None:
    """Where a version is served; None for one that Serin runs."""
    path = bundle / SERVER
    if not path.is_file():
        return None
    found = read_facts(path, Server.from_json)
    return Endpoint(http=found.http, grpc=found.grpc, elsewhere=True)


def same_address(some: Endpoint, other: Endpoint) -> bool:
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
