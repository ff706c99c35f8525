"""The process that the gateway asks: requests in, requests with windows out, events counted."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import random
import struct
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tritonclient.grpc import service_pb2

from serin.errors import StateUnavailable
from serin.formats.schema import DTYPE_OF_KIND, INT64_NULL, InputColumn, Kind
from serin.formats.windows import OnlineColumn, OnlineWindow, WindowPlan
from serin.serving.windows.step import Answer, Step
from serin.windows import lmdb_state
from serin.windows.events import OnlineWindows
from serin.windows.lmdb_state import LmdbState, copy_state
from serin.windows.ring import Ring
from serin.windows.state import MemoryState, State
from tests.signals import hit

SECOND = 1_000_000
NOW = 1_795_000_000 * SECOND
KINDS: dict[str, Kind] = {"at": "timestamp", "id": "string", "card": "string", "amount": "float"}


def plan(unavailable: Any = "refuse", span_s: int = 60) -> WindowPlan:
    columns = {
        "n": OnlineColumn(function="count", column=None, back=1, kind="int"),
        "spent": OnlineColumn(function="sum", column="amount", back=1, kind="float"),
    }
    return WindowPlan(
        time="at",
        id="id",
        max_late_us=30 * SECOND,
        max_future_us=10 * SECOND,
        unavailable=unavailable,
        inputs=tuple(
            InputColumn(name=name, kind=kind, dtype=DTYPE_OF_KIND[kind]) for name, kind in KINDS.items()
        ),
        dropped=("at", "id", "card"),
        windows=(OnlineWindow(by=("card",), span_us=span_s * SECOND, delay_us=0, columns=columns),),
    )


def step_of(folder: Path, state: State, *models: str, clock: int = NOW, **settings: Any) -> Step:
    for model in models or ("pay",):
        (folder / f"{model}.json").write_bytes(plan(**settings).dump())
    return Step(folder, lambda: state, lambda: clock)


def texts(value: str) -> bytes:
    return struct.pack("<I", len(value)) + value.encode()


def tensors(event: str, at: int, amount: float) -> dict[str, bytes]:
    return {
        "at": struct.pack("<q", at), "id": texts(event), "card": texts("c1"), "amount": struct.pack("<f", amount)
    }  # fmt: skip


def ask_json(step: Step, event: str, at: int, amount: float, model: str = "pay", **more: Any) -> Answer:
    values: dict[str, Any] = {"at": at, "id": event, "card": "c1", "amount": amount, **more}
    inputs = [
        {"name": name, "datatype": DTYPE_OF_KIND[KINDS.get(name, "int")], "shape": [1, 1], "data": [[value]]}
        for name, value in values.items()
    ]
    found = step.answer("/http", {"x-serin-model": model}, json.dumps({"inputs": inputs}).encode())
    assert isinstance(found, Answer)
    return found


def ask_binary(step: Step, event: str, at: int, amount: float) -> Answer:
    data = tensors(event, at, amount)
    inputs = [
        {
            "name": name,
            "datatype": DTYPE_OF_KIND[KINDS[name]],
            "shape": [1, 1],
            "parameters": {"binary_data_size": len(part)},
        }
        for name, part in data.items()
    ]
    head = json.dumps({"inputs": inputs}).encode()
    headers = {"x-serin-model": "pay", "inference-header-content-length": str(len(head))}
    found = step.answer("/http", headers, head + b"".join(data.values()))
    assert isinstance(found, Answer)
    return found


def ask_grpc(step: Step, event: str, at: int, amount: float) -> Answer:
    message = service_pb2.ModelInferRequest(model_name="pay")
    for name, part in tensors(event, at, amount).items():
        message.inputs.add(name=name, datatype=DTYPE_OF_KIND[KINDS[name]], shape=[1, 1])
        message.raw_input_contents.append(part)
    body = message.SerializeToString()
    found = step.answer("/grpc", {"x-serin-model": "pay"}, struct.pack(">BI", 0, len(body)) + body)
    assert isinstance(found, Answer)
    return found


def windows_in(answer: Answer) -> dict[str, Any]:
    """What was added; what is sent holds nothing that only events have."""
    assert answer.status == 200, answer.body
    if answer.json_bytes is None:
        message = service_pb2.ModelInferRequest.FromString(answer.body[5:])
        parts = dict(zip([each.name for each in message.inputs], message.raw_input_contents, strict=True))
    else:
        parts, at = {}, answer.json_bytes
        for entry in json.loads(answer.body[:at])["inputs"]:
            size = entry.get("parameters", {}).get("binary_data_size", 0)
            parts[entry["name"]] = answer.body[at : at + size]
            at += size
    assert set(parts) == {"amount", "n", "spent"}
    return {"n": struct.unpack("<q", parts["n"])[0], "spent": struct.unpack("<f", parts["spent"])[0]}


def push(step: Step, model: str, *events: dict[str, Any]) -> Answer:
    found = step.answer(f"/v2/models/{model}/events", {}, json.dumps({"events": list(events)}).encode())
    return found if isinstance(found, Answer) else asyncio.run(found)


@pytest.mark.parametrize("ask", [ask_json, ask_binary, ask_grpc])
def test_each_form_of_a_request_gets_the_windows_of_what_came_before(tmp_path: Path, ask: Any) -> None:
    step = step_of(tmp_path, MemoryState())
    first = windows_in(ask(step, "a", NOW - 3 * SECOND, 1.5))
    assert first["n"] == 0
    assert first["spent"] != first["spent"]
    assert windows_in(ask(step, "b", NOW - 2 * SECOND, 2.25)) == {"n": 1, "spent": 1.5}
    assert windows_in(ask(step, "b", NOW - 2 * SECOND, 2.25)) == {"n": 1, "spent": 1.5}
    assert windows_in(ask(step, "c", NOW, 0.0)) == {"n": 2, "spent": 3.75}
    assert step.counts["pay"] == {"counted": 3, "repeated": 1}


def test_a_request_that_cannot_be_an_event_is_refused_and_counts_nothing(tmp_path: Path) -> None:
    step = step_of(tmp_path, MemoryState())
    future = ask_json(step, "a", NOW + 11 * SECOND, 1.0)
    forged = ask_json(step, "a", NOW, 1.0, n=7)
    wrong = ask_json(step, "a", "soon", 1.0)  # type: ignore[arg-type]
    assert [each.status for each in (future, forged, wrong)] == [400, 400, 400]
    assert b"future" in future.body
    assert b"'n' is computed" in forged.body
    assert b"'at'" in wrong.body
    assert windows_in(ask_json(step, "b", NOW, 1.0))["n"] == 0


def test_an_event_that_comes_too_late_gets_nulls(tmp_path: Path) -> None:
    step = step_of(tmp_path, MemoryState())
    assert windows_in(ask_json(step, "a", NOW - 31 * SECOND, 1.0))["n"] == INT64_NULL
    assert step.counts["pay"] == {"old": 1}


class Away(MemoryState):
    def update(self, *_: Any) -> None:
        raise StateUnavailable(reason="the disk is full")


@pytest.mark.parametrize(("unavailable", "status"), [("refuse", 503), ("nulls", 200)])
def test_without_its_state_a_request_is_refused_or_gets_nulls_as_the_spec_says(
    tmp_path: Path, unavailable: str, status: int
) -> None:
    step = step_of(tmp_path, Away(), unavailable=unavailable)
    answer = ask_json(step, "a", NOW, 1.0)
    assert answer.status == status
    if status == 200:
        assert windows_in(answer)["n"] == INT64_NULL
        assert step.counts["pay"] == {"nulls": 1, "lost": 1}
    else:
        assert step.counts["pay"] == {"unavailable": 1}


def test_models_do_not_see_each_others_events(tmp_path: Path) -> None:
    step = step_of(tmp_path, MemoryState(), "pay", "other")
    event = {"id": "a", "at": NOW - SECOND, "card": "c1", "amount": 5}
    assert json.loads(push(step, "other", event).body) == {"counted": 1}
    assert windows_in(ask_json(step, "b", NOW, 1.0))["n"] == 0
    assert windows_in(ask_json(step, "b", NOW, 1.0, model="other"))["n"] == 1
    assert push(step, "nobody", event).status == 404


def test_pushed_events_count_once_and_bad_ones_are_named(tmp_path: Path) -> None:
    step = step_of(tmp_path, MemoryState())
    at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(NOW // SECOND - 1))
    event = {"id": "a", "at": at, "card": "c1", "amount": 5}
    assert json.loads(push(step, "pay", event, event).body) == {"counted": 1, "repeated": 1}
    assert windows_in(ask_json(step, "b", NOW, 1.0)) == {"n": 1, "spent": 5.0}
    refused = push(step, "pay", event, {**event, "amount": "much"})
    assert (refused.status, refused.body) == (400, b"event in row 1: 'amount' is not a float")
    assert b"'card' is missing" in push(step, "pay", {"id": "a", "at": at, "amount": 5}).body


def test_a_key_can_be_forgotten(tmp_path: Path) -> None:
    step = step_of(tmp_path, MemoryState())
    ask_json(step, "a", NOW - SECOND, 1.0)
    assert forget(step, plan(), card=["c1", "c2"]) == 1
    assert windows_in(ask_json(step, "b", NOW, 1.0))["n"] == 0


def forget(step: Step, plan: WindowPlan, **rows: list[Any]) -> int:
    body = json.dumps({"plan": plan.to_json(), "rows": rows}).encode()
    forgotten = step.answer("/forget", {"x-serin-model": "pay"}, body)
    assert isinstance(forgotten, Answer)
    keys: int = json.loads(forgotten.body)["keys"]
    return keys


def two_keys() -> WindowPlan:
    """Windows by card, by shop, and by both."""
    made = plan()
    shop = InputColumn(name="shop", kind="string", dtype="BYTES")
    count = OnlineColumn(function="count", column=None, back=1, kind="int")
    windows = tuple(
        replace(made.windows[0], by=by, columns={name: count})
        for name, by in (("n", ("card",)), ("at_shop", ("shop",)), ("pair", ("card", "shop")))
    )
    return replace(made, inputs=(*made.inputs, shop), dropped=(*made.dropped, "shop"), windows=windows)


@pytest.mark.parametrize(
    ("key", "kept"),
    [
        ({"card": ["c1"]}, {"n": 0, "at_shop": 3, "pair": 2}),
        ({"card": ["c1"], "shop": ["s1"]}, {"n": 2, "at_shop": 3, "pair": 0}),
        ({"shop": ["s1"]}, {"n": 2, "at_shop": 0, "pair": 2}),
        ({"region": ["r1"]}, {"n": 2, "at_shop": 3, "pair": 2}),
    ],
)
def test_a_forgotten_key_costs_no_other_key_its_events(
    tmp_path: Path, key: dict[str, list[str]], kept: dict[str, int]
) -> None:
    windows, state = two_keys(), MemoryState()
    (tmp_path / "pay.json").write_bytes(windows.dump())
    step = Step(tmp_path, lambda: state, lambda: NOW)

    def counts(event: str, card: str, at: int) -> dict[str, int]:
        row = {"id": [event], "at": [at], "card": [card], "shop": ["s1"], "amount": [1.0]}
        return {
            name: values[0]
            for name, values in OnlineWindows("pay", windows, state).answer(row, [at]).columns.items()
        }

    for event, card in (("a", "c1"), ("b", "c1"), ("c", "c2")):
        counts(event, card, NOW)
    forget(step, windows, **key)
    assert counts("d", "c1", NOW + 1) == kept


def test_events_that_are_backfilled_for_another_plan_count_in_its_windows_alone(tmp_path: Path) -> None:
    state = MemoryState()
    step, other = step_of(tmp_path, state), plan(span_s=3600)
    rows = {"id": ["a"], "at": [NOW - SECOND], "card": ["c1"], "amount": [1.0]}
    body = {"plan": other.to_json(), "rows": rows, "arrival": [NOW - SECOND]}
    counted = step.answer("/history", {"x-serin-model": "pay"}, json.dumps(body).encode())
    assert not isinstance(counted, Answer)
    assert json.loads(asyncio.run(counted).body) == {"counted": 1}
    assert windows_in(ask_json(step, "b", NOW, 1.0))["n"] == 0
    (tmp_path / "pay.json").write_bytes(other.dump())
    os.utime(tmp_path / "pay.json", ns=(0, 0))  # another time than before, whatever the clock's resolution
    assert windows_in(ask_json(step, "c", NOW, 1.0))["n"] == 1


def kill(state: LmdbState) -> None:
    """Ends it without what `close` does."""
    state._stop.set()
    state._sync.join()
    state._env.close()


def test_events_outlast_a_process_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "plans").mkdir()
    state = LmdbState(tmp_path / "state")
    ask_json(step_of(tmp_path / "plans", state), "a", NOW - SECOND, 1.0)
    kill(state)
    again = LmdbState(tmp_path / "state")
    assert again.moved is None
    assert windows_in(ask_json(step_of(tmp_path / "plans", again), "b", NOW, 1.0))["n"] == 1
    again.close()


def test_a_writer_that_is_killed_at_any_moment_loses_no_event_that_it_stored(tmp_path: Path) -> None:
    """It stores one key after the other and says so; SIGKILL comes somewhere between two words of it."""
    writer = (
        "import sys; from pathlib import Path; from serin.windows.lmdb_state import LmdbState\n"
        "state = LmdbState(Path(sys.argv[1]))\n"
        "for n in range(10**9):\n"
        "    state.update([b'%d' % n], lambda _: {b'%d' % n: b'v' * 500})\n"
        "    print(n, flush=True)\n"
    )
    command = [sys.executable, "-c", writer, str(tmp_path / "state")]
    for _ in range(3):
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            said = [int(child.stdout.readline()) for _ in range(300)]
            hit(child.pid)
            said += [int(word) for word in child.stdout.read().split("\n")[:-1]]
        state, found = LmdbState(tmp_path / "state"), dict[bytes, bytes | None]()
        state.update([b"%d" % n for n in said], lambda kept, found=found: found.update(kept) or {})
        assert state.moved is None
        assert set(found.values()) == {b"v" * 500}
        kill(state)


def test_after_a_power_failure_the_events_are_moved_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill(LmdbState(tmp_path / "state"))
    boot = tmp_path / "boot"
    boot.write_text("another start")
    monkeypatch.setattr(lmdb_state, "_BOOT", boot)
    state = LmdbState(tmp_path / "state")
    assert state.moved is not None
    assert (state.moved / "data.mdb").is_file()
    assert state.size()[0] == 0
    state.close()
    closed = LmdbState(tmp_path / "state")
    assert closed.moved is None
    closed.close()


def test_a_disk_that_is_full_when_the_state_is_opened_costs_no_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The marker is written whole or not at all: half of one would look like that of another start."""
    state = LmdbState(tmp_path / "state")
    state.update([b"k"], lambda _: {b"k": b"v"})
    kill(state)

    def full(file: Path, *_: Any, **__: Any) -> int:
        file.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(StateUnavailable, match="No space left"):
        patch.setattr(Path, "write_text", full)
        patch.setattr(Path, "write_bytes", full)
        LmdbState(tmp_path / "state")
    again = LmdbState(tmp_path / "state")
    assert (again.moved, again.size()[0]) == (None, 1)
    again.close()


@pytest.mark.parametrize(("unavailable", "status"), [("refuse", 503), ("nulls", 200)])
def test_a_folder_that_cannot_be_opened_is_a_state_that_is_away(
    tmp_path: Path, unavailable: str, status: int
) -> None:
    (tmp_path / "windows").write_text("a file")
    (tmp_path / "plans").mkdir()
    (tmp_path / "plans" / "pay.json").write_bytes(plan(unavailable).dump())
    step = Step(tmp_path / "plans", lambda: LmdbState(tmp_path / "windows" / "state"), lambda: NOW)
    step.warm()
    assert ask_json(step, "a", NOW, 1.0).status == status
    assert "problem" in step.status()


def test_a_sweep_over_many_keys_drops_those_that_are_expired_and_no_others(tmp_path: Path) -> None:
    state, draw = LmdbState(tmp_path / "state"), random.Random(7)
    keys = [f"k{n:04}".encode() for n in range(1234)]
    expires = {key: draw.choice([10, 30]) for key in keys}
    expires |= dict.fromkeys(keys[300:700], 10) | dict.fromkeys(keys[-120:], 10)  # whole pages, also the last
    state.update(keys, lambda _: {key: ring_that_expires(expires[key]) for key in keys})
    assert state.drop_expired(20) == list(expires.values()).count(10)
    kept: dict[bytes, bytes | None] = {}
    state.update(keys, lambda found: kept.update(found) or {})
    assert {key for key, content in kept.items() if content is not None} == {
        key for key, at in expires.items() if at == 30
    }
    assert state.drop_expired(40) == list(expires.values()).count(30)
    assert state.size()[0] == 0
    state.close()
    assert state.drop_expired(40) == 0


def ring_that_expires(at: int) -> bytes:
    return Ring(lost=INT64_NULL, expires=at, times=(), ids=(), values=()).write(())


def test_expired_keys_are_dropped_and_a_copy_has_what_is_kept(tmp_path: Path) -> None:
    (tmp_path / "plans").mkdir()
    state = LmdbState(tmp_path / "state")
    step = step_of(tmp_path / "plans", state)
    for card in range(5):
        ask_json(step, "a", NOW, 1.0, card=f"c{card}")
    state.close()
    (tmp_path / "copy").mkdir()
    copy_state(tmp_path / "state", tmp_path / "copy")
    state = LmdbState(tmp_path / "state")
    assert state.drop_expired(NOW + 99 * SECOND) == 0
    assert state.drop_expired(NOW + 101 * SECOND) == 5
    assert state.size()[0] == 0
    state.close()
    copied = LmdbState(tmp_path / "copy")
    assert copied.size()[0] == 5
    copied.close()
