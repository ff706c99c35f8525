"""Requests to delete recorded rows on all hosts that share a store, and what each host did.

captures/forget/<model>/<seq>.json              a request; numbered from 1, each written once
captures/forgotten/<model>/<seq>/<host>.json    that a host has applied it
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from serin.errors import ObjectExists
from serin.machine.typed_json import Document
from serin.spec.names import valid_model_name
from serin.store.numbered import NumberedWriter, numbers, read_many
from serin.store.objects import Objects

REQUESTS: Final = "captures/forget/"
APPLIED: Final = "captures/forgotten/"


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgetRequest(Document, form="serin.forget_request"):
    """Deletes the rows of `model` for which `where` is true. `t`: when it was made, in seconds since 1970."""

    seq: int
    model: str
    where: str
    t: float
    by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied(Document, form="serin.forgotten"):
    """What `host` deleted: `rows` in `files`, in its home and in the store together, each row once, and `labels`.
    `by`: the host that did it, another one if `host` is gone. `others`: the rows of other hosts that it found in the
    store, which they count. `problem`: why the request cannot be applied there."""

    host: str
    by: str
    t: float
    rows: int
    files: int
    labels: int = 0
    others: Mapping[str, int] = field(default_factory=dict)
    problem: str = ""


def write_request(objects: Objects, model: str, where: str, *, t: float, by: str) -> ForgetRequest:
    """Durable, and seen by all hosts, once this returns."""
    prefix = f"{REQUESTS}{valid_model_name(model)}/"

    def request(seq: int) -> ForgetRequest:
        return ForgetRequest(seq=seq, model=model, where=where, t=t, by=by)

    while True:
        writer = NumberedWriter(objects, prefix, max(numbers(objects, prefix), default=0))
        with suppress(ObjectExists):  # another person asked at the same moment
            return request(writer.append(lambda seq: request(seq).dump()))


def read_requests(objects: Objects, model: str) -> list[ForgetRequest]:
    """The requests about a model, oldest first."""
    keys = objects.keys(f"{REQUESTS}{valid_model_name(model)}/")
    return [ForgetRequest.load(found.content) for found in read_many(objects, keys) if found is not None]


def requested_models(objects: Objects) -> dict[str, set[int]]:
    """The numbers of all requests, by model."""
    return _by_model(objects.keys(REQUESTS), REQUESTS)


def applied_by(keys: Iterable[str], host: str) -> dict[str, set[int]]:
    """The numbers of the requests that a host has applied, by model. `keys`: all below `APPLIED`."""
    ends = f"/{host}.json"
    return _by_model([key.removesuffix(ends) for key in keys if key.endswith(ends)], APPLIED)


def write_applied(objects: Objects, request: ForgetRequest, applied: Applied) -> None:
    objects.put(f"{APPLIED}{request.model}/{request.seq:012d}/{applied.host}.json", applied.dump())


def read_applied(objects: Objects, model: str) -> dict[int, dict[str, Applied]]:
    """What each host did for each request: by number, then by host."""
    prefix = f"{APPLIED}{valid_model_name(model)}/"
    keys = objects.keys(prefix)
    found: dict[int, dict[str, Applied]] = defaultdict(dict)
    for key, stored in zip(keys, read_many(objects, keys), strict=True):
        if stored is not None:
            applied = Applied.load(stored.content)
            found[int(key.removeprefix(prefix).partition("/")[0])][applied.host] = applied
    return dict(found)


def _by_model(keys: Iterable[str], prefix: str) -> dict[str, set[int]]:
    found: dict[str, set[int]] = defaultdict(set)
    for key in keys:
        model, _, name = key.removeprefix(prefix).partition("/")
        if (number := name.removesuffix(".json")).isdecimal():
            found[model].add(int(number))
    return dict(found)
