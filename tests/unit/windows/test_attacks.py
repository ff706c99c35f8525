"""Requests and pushes that somebody made to break the step: each gets an answer, and counts nothing that it may not."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import struct
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tritonclient.grpc import service_pb2

from serin.formats.schema import InputColumn
from serin.formats.windows import OnlineColumn, WindowPlan
from serin.serving.windows.step import JSON_BYTES, Answer, Step
from serin.windows.state import MemoryState
from tests.unit.windows.test_step import (
    NOW,
    SECOND,
    ask_binary,
    ask_grpc,
    ask_json,
    plan,
    step_of,
    windows_in,
)

NASTY: list[Any] = [
    None, True, -1, 2**63, -(2**63), 10**400, 1e308, "", "x" * 70_000, "\ud800", [], [[]], [[[1]]], {}, {"a": 1},
    [None], "NaN", ["a", 1], {"binary_data_size": -5}, {"binary_data_size": 10**12}, {"binary_data_size": "7"},
]  # fmt: skip


def answered(step: Step, path: str, body: bytes, **headers: str) -> Answer:
    found = step.answer(path, {"x-serin-model": "pay", **headers}, body)
    return asyncio.run(found) if isinstance(found, Coroutine) else found


def _spoiled(value: Any, draw: random.Random) -> Any:
    """The document with one part replaced by something else."""
    if draw.random() < 0.15 or not isinstance(value, dict | list) or not value:
        return draw.choice(NASTY)
    if isinstance(value, dict):
        name = draw.choice(list(value))
        if draw.random() < 0.15:
            return {key: each for key, each in value.items() if key != name}
        return {**value, name: _spoiled(value[name], draw)}
    place = draw.randrange(len(value))
    if draw.random() < 0.15:
        return [*value, value[place]]
    return [*value[:place], _spoiled(value[place], draw), *value[place + 1 :]]


def _request() -> dict[str, Any]:
    kinds = {"at": ("INT64", NOW), "id": ("BYTES", "a"), "card": ("BYTES", "c1"), "amount": ("FP32", 1.5)}
    return {
        "inputs": [
            {"name": name, "datatype": dtype, "shape": [1, 1], "data": [value]}
            for name, (dtype, value) in kinds.items()
        ]
    }


@pytest.mark.parametrize("part", range(4))
def test_spoiled_documents_and_messages_are_answered(tmp_path: Path, part: int) -> None:
    step, seen = step_of(tmp_path, MemoryState()), set[int]()
    event = {"id": "a", "at": NOW, "card": "c1", "amount": 1.5}
    made: list[bytes] = []
    ask_binary(_Kept(made), "a", NOW, 1.0)  # type: ignore[arg-type]
    ask_grpc(_Kept(made), "a", NOW, 1.0)  # type: ignore[arg-type]
    for seed in range(part, 2000, 4):
        draw = random.Random(seed)
        for path, document in (("/http", _request()), ("/v2/models/pay/events", {"events": [event]})):
            body = json.dumps(_spoiled(document, draw)).encode()
            seen.add(answered(step, path, body).status)
        for path, good in zip(("/http", "/grpc"), made, strict=True):
            spoiled = bytearray(good)
            for _ in range(draw.randint(1, 4)):
                spoiled[draw.randrange(len(spoiled))] = draw.randrange(256)
            told = {"inference-header-content-length": str(draw.choice([0, 7, len(good), len(good) * 2]))}
            seen.add(answered(step, path, bytes(spoiled[: draw.randint(0, len(good))]), **told).status)
    assert seen <= {200, 400}
    assert 400 in seen


class _Kept:
    """Takes the place of a step, and keeps the bodies."""

    def __init__(self, made: list[bytes]) -> None:
        self._made = made

    def answer(self, path: str, headers: Any, body: bytes) -> Answer:
        self._made.append(body)
        return Answer(200, b"")


@pytest.mark.parametrize(
    "body",
    [
        b'{"events":' + b"[" * 200_000,
        b'{"events":' + b'{"a":' * 200_000,
        b'{"events": [' + b"9" * 100_000 + b"]}",
        b'{"inputs":' + b"[" * 200_000,
    ],
)
@pytest.mark.parametrize("path", ["/http", "/v2/models/pay/events"])
def test_documents_without_an_end_are_refused(tmp_path: Path, path: str, body: bytes) -> None:
    assert answered(step_of(tmp_path, MemoryState()), path, body).status == 400


def test_an_event_with_very_many_keys_counts_once_and_keeps_those_of_the_plan(tmp_path: Path) -> None:
    state = MemoryState()
    step = step_of(tmp_path, state)
    event = {f"card{n}": "c" for n in range(100_000)} | {"id": "a", "at": NOW, "card": "c1", "amount": 1.5}
    answer = answered(step, "/v2/models/pay/events", json.dumps({"events": [event]}).encode())
    assert json.loads(answer.body) == {"counted": 1}
    keys, size = state.size()
    assert (keys, size < 200) == (1, True)
    many = {"events": [{"id": "a", "at": NOW, "card": ["c"] * 100_000, "amount": 1.5}]}
    assert answered(step, "/v2/models/pay/events", json.dumps(many).encode()).status == 400
    too_many = {"events": [{"id": "a", "at": NOW, "card": f"c{n}", "amount": 1.5} for n in range(10_001)]}
    assert answered(step, "/v2/models/pay/events", json.dumps(too_many).encode()).status == 400
    assert state.size()[0] == 1


def test_forged_times_are_refused_late_or_old_and_change_no_window_of_others(tmp_path: Path) -> None:
    step = step_of(tmp_path, MemoryState())
    assert windows_in(ask_json(step, "a", NOW, 1.0))["n"] == 0
    for at, status in ((NOW + 11 * SECOND, 400), (2**62, 400), (-(2**62), 200), (NOW - 31 * SECOND, 200)):
        assert ask_json(step, f"forged {at}", at, 1.0).status == status
    pushed = {"events": [{"id": "f", "at": "9999-12-31T23:59:59Z", "card": "c1", "amount": 1.0}]}
    assert answered(step, "/v2/models/pay/events", json.dumps(pushed).encode()).status == 400
    assert windows_in(ask_json(step, "b", NOW + SECOND, 1.0)) == {"n": 1, "spent": 1.0}


def test_no_path_of_one_model_reads_or_writes_the_state_of_another(tmp_path: Path) -> None:
    step = step_of(tmp_path, MemoryState(), "pay", "other")
    ask_json(step, "a", NOW, 1.0)
    assert windows_in(ask_json(step, "b", NOW + 1, 1.0, model="other"))["n"] == 0
    event = json.dumps({"events": [{"id": "c", "at": NOW, "card": "c1", "amount": 1.0}]}).encode()
    for path in (
        "/v2/models/../pay/events", "/v2/models/pay%2F/events", "/v2/models/pay/events/", "/v2/models/PAY/events",
        "/v2/models/pay\0other/events", "//v2/models/pay/events",
    ):  # fmt: skip
        found = step.answer(path, {}, event)  # no model is named: the gateway names it by its route
        assert isinstance(found, Answer)
        assert found.status == 404
    assert windows_in(ask_json(step, "d", NOW + 2, 1.0))["n"] == 1
    assert plan().windows[0].by == ("card",)


@pytest.mark.parametrize("path", ["/http", "/grpc", "/v2/models/pay/events"])
def test_a_body_that_would_keep_others_waiting_is_refused_before_it_is_read(
    tmp_path: Path, path: str
) -> None:
    step = step_of(tmp_path, MemoryState())
    event = {"id": "a" * 3_000_000, "at": NOW, "card": "c1", "amount": 1.5}
    refused = answered(step, path, json.dumps({"events": [event]}).encode())
    assert (refused.status, b"at most 2 MiB" in refused.body) == (400, True)


def flagged() -> WindowPlan:
    """A plan with a window that sums a boolean."""
    made = plan()
    flag = InputColumn(name="flag", kind="bool", dtype="INT8")
    columns = {"flags": OnlineColumn(function="sum", column="flag", back=1, kind="int")}
    window = replace(made.windows[0], columns=columns)
    return replace(made, inputs=(*made.inputs, flag), windows=(window,))


def _flag_in_json(flag: int) -> tuple[str, bytes]:
    document = _request()
    document["inputs"].append({"name": "flag", "datatype": "INT8", "shape": [1, 1], "data": [flag]})
    return "/http", json.dumps(document).encode()


def _flag_in_grpc(flag: int) -> tuple[str, bytes]:
    message = service_pb2.ModelInferRequest(model_name="pay")
    fields = {"INT64": "int64_contents", "BYTES": "bytes_contents", "FP32": "fp32_contents"}
    for each in _request()["inputs"]:
        entry = message.inputs.add(name=each["name"], datatype=each["datatype"], shape=[1, 1])
        values = [value.encode() if isinstance(value, str) else value for value in each["data"]]
        getattr(entry.contents, fields[each["datatype"]]).extend(values)
    message.inputs.add(name="flag", datatype="INT8", shape=[1, 1]).contents.int_contents.append(flag)
    body = message.SerializeToString()
    return "/grpc", struct.pack(">BI", 0, len(body)) + body


@pytest.mark.parametrize("form", [_flag_in_json, _flag_in_grpc])
@pytest.mark.parametrize(
    ("flag", "status"), [(300, 400), (-300, 400), (2, 400), (1, 200), (0, 200), (-1, 200)]
)
def test_a_boolean_that_is_none_is_refused_and_counts_nothing(
    tmp_path: Path, form: Callable[[int], tuple[str, bytes]], flag: int, status: int
) -> None:
    (tmp_path / "pay.json").write_bytes(flagged().dump())
    state = MemoryState()
    step = Step(tmp_path, lambda: state, lambda: NOW)
    path, body = form(flag)
    answer = answered(step, path, body)
    assert (answer.status, state.size()[0]) == (status, int(status == 200)), answer.body
    if status == 400:
        assert b"input 'flag' cannot be read" in answer.body


@pytest.mark.parametrize("told", ["", "x", "-7", "1.5", "9" * 5000])
def test_a_length_of_the_json_that_is_no_number_is_refused(tmp_path: Path, told: str) -> None:
    step = step_of(tmp_path, MemoryState())
    body = json.dumps(_request()).encode()
    assert answered(step, "/http", body, **{JSON_BYTES: told}).status == 400


def many(rows: int, last: int = NOW) -> bytes:
    """A request with very many events of one card."""
    values = {"at": [NOW] * (rows - 1) + [last], "id": [f"{n}" for n in range(rows)], "card": ["c1"] * rows}
    inputs = [
        {"name": name, "datatype": dtype, "shape": [rows, 1], "data": data}
        for (name, data), dtype in zip(
            {**values, "amount": [1.5] * rows}.items(), ("INT64", "BYTES", "BYTES", "FP32"), strict=True
        )
    ]
    return json.dumps({"inputs": inputs}).encode()


@pytest.mark.parametrize("path", ["/http", "/v2/models/pay/events"])
def test_others_are_answered_while_very_many_events_are_counted(tmp_path: Path, path: str) -> None:
    step = step_of(tmp_path, MemoryState())
    events = [{"id": f"{n}", "at": NOW, "card": "c1", "amount": 1.5} for n in range(1000)]
    body = many(1000) if path == "/http" else json.dumps({"events": events}).encode()
    counted: list[int] = []

    async def both() -> Answer:
        found = step.answer(path, {"x-serin-model": "pay"}, body)
        assert isinstance(found, Coroutine)
        answering = asyncio.create_task(found)
        while not answering.done():
            await asyncio.sleep(0)
            assert ask_json(step, f"other {len(counted)}", NOW, 1.0, card="c2").status == 200
            counted.append(step.counts["pay"]["counted"])
        return answering.result()

    assert asyncio.run(both()).status == 200
    assert sum(after - before > 1 for before, after in itertools.pairwise(counted)) > 50
    assert windows_in(ask_json(step, "last", NOW + 1, 1.0))["n"] == 1000


@pytest.mark.parametrize("path", ["/http", "/v2/models/pay/events"])
def test_one_time_in_the_future_is_named_and_none_of_many_events_counts(tmp_path: Path, path: str) -> None:
    step, future = step_of(tmp_path, MemoryState()), NOW + 11 * SECOND
    events = [{"id": f"{n}", "at": NOW, "card": "c1", "amount": 1.5} for n in range(99)]
    pushed = {"events": [*events, {"id": "99", "at": future, "card": "c1", "amount": 1.5}]}
    refused = answered(step, path, many(100, future) if path == "/http" else json.dumps(pushed).encode())
    assert (refused.status, b"event in row 99: its 'at' is 11 s in the future" in refused.body) == (400, True)
    assert step.counts["pay"] == {"refused": 1}
    assert windows_in(ask_json(step, "b", NOW + 1, 1.0))["n"] == 0
