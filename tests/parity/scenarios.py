"""What Serin can do, each written once for every place. A scenario that returns has passed.

It asks for what it is about with `Place.ask_for` or `Place.start`. A command that is refused there counts as refused if
its reason has a word of the scenario (`words`); all else that raises has failed. What is accepted must happen.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import yaml

from serin.store.store import Store
from tests.fakes.counting_plan import BIAS, PLAN, count_of, event_inputs
from tests.fakes.own_project import write_project
from tests.fakes.small_pipeline import parcels, small_spec, with_lookup, write_carriers
from tests.kit.index import Gate, served_index, write_wheel
from tests.kit.web import Answer
from tests.parity.place import AT_ONCE, Place, Refused, chances, last_line, rows, scores, spec
from tests.parity.rollout_scenarios import RECORDED, SCENARIOS, Scenario, scenario, soon

__all__ = ["SCENARIOS", "Scenario"]


@scenario("explain", "explain", slow=True)
def explain(place: Place, model: str) -> None:
    trees = {"kind": "xgboost", "rounds": 12, "options": {"max_depth": 3}}
    place.train({**small_spec(place.folder / "parcels", model=trees, training={"seed": 3}), "name": model})
    some = place.file("rows.parquet")
    pq.write_table(parcels(5).drop_columns("hours"), some)
    found = json.loads(place.ask_for("explain", model, str(some), "--json"))
    assert len(found) == 5
    for row in found:
        assert abs(row["base"] + sum(row["contributions"].values()) - row["margin"]) < 1e-4, row


@scenario("reason for a recorded answer", "explain", slow=True)
def reason_for_a_recorded_answer(place: Place, model: str) -> None:
    if place.bundles:
        place.train(_flights_spec(place, model))
        place.ask_for("rollout", "start", model, "--no-follow")
        promoted, said = place.follow(model)
        assert promoted, said
    else:
        place.roll_out(model, monitoring=RECORDED)
    for request in place.send(model, [rows(2, seed=number) for number in range(4)]):

        def explained(request: str = request) -> list[dict[str, Any]] | None:
            code, out, err = place.serin_done(["explain", model, "--id", request, "--json"])
            if code and not any(words in err for words in ("there is no record", "nothing is recorded")):
                raise Refused(last_line(out + err))
            return json.loads(out) if code == 0 else None

        found = soon(explained, "the answer is not recorded")
        assert [row["row"] for row in found] == [0, 1]
        for row in found:
            assert abs(row["base"] + sum(row["contributions"].values()) - row["margin"]) < 1e-4, row
            assert not row["difference"], row
            assert row["release"] == f"{model}-v{place.status(model)['live']}"


def _flights_spec(place: Place, model: str) -> dict[str, Any]:
    """A spec for trees with the request columns of the hand-made model, and the table that it is trained on."""
    some, path = rows(3000, seed=7), place.file("flights.parquet")
    delay = 60 * chances(some) + np.random.default_rng(5).normal(0, 10, 3000)
    kinds = {"carrier": pa.string(), "temp": pa.float32(), "distance": pa.int64(), "night": pa.int64()}
    columns = {name: pa.array(some[name], kind) for name, kind in kinds.items()}
    columns["night"] = columns["night"].cast(pa.bool_())
    pq.write_table(pa.table({**columns, "arr_delay": delay}), path)
    document = spec(model, monitoring=RECORDED, training={"seed": 3})
    data = {**document["data"], "tables": {"flights": str(path)}}
    return {**document, "data": data, "model": {"kind": "xgboost", "rounds": 12}}


@scenario("lookups refreshed", "lookups", slow=True)
def lookups_refreshed(place: Place, model: str) -> None:
    """The hours that a carrier adds are looked up in the model. The slow one becomes as fast as the others."""
    trees = {"kind": "xgboost", "rounds": 12, "options": {"max_depth": 3}}
    document = small_spec(
        place.file("parcels"), model=trees, training={"seed": 3}, rollout=AT_ONCE, monitoring=RECORDED
    )
    carriers = place.file("carriers.parquet")
    write_carriers(carriers)
    place.train({**with_lookup(document, carriers), "name": model})
    if not place.bundles:
        place.ask_for("lookups", "refresh", model)
        raise AssertionError("accepted for a server without lookups")
    place.ask_for("rollout", "start", f"{model}:1", "--no-follow")
    assert place.follow(model)[0]
    body = _parcel("slow")
    before = _same_everywhere(place, model, body)
    write_carriers(carriers, slow=0.0)
    with place.load(model, body=body) as load:
        place.ask_for("lookups", "refresh", model)
        after = _same_everywhere(place, model, body)
        assert after < before, f"accepted, nothing happens: {before} before and {after} after"
        (shown,) = [each for each in place.json("lookups", "show", model) if each["live"]]
        assert (shown["release"], shown["table"], shown["rows"]) == (f"{model}-v1e2", "carriers", 3)
        place.ask_for("rollout", "rollback", model)
        assert _same_everywhere(place, model, body) == before
    assert load.errors == [], load.errors[:3]
    assert load.seen == {round(each, 4) for each in (before, after)}, load.seen
    out = place.file("rows.parquet")

    def editions() -> set[str]:
        code, _, _ = place.serin_done(["captures", "export", model, "--out", str(out)])
        return set(pq.read_table(out)["_release"].to_pylist()) if code == 0 and out.exists() else set()

    wanted = {f"{model}-v1", f"{model}-v1e2"}
    soon(lambda: editions() == wanted, "recorded requests do not name the edition", said=editions)


def _parcel(carrier: str) -> dict[str, Any]:
    columns = {"weight": ("FP32", 2.5), "distance": ("INT64", 900), "carrier": ("BYTES", carrier)}
    inputs = [
        {"name": name, "datatype": kind, "shape": [1, 1], "data": [value]}
        for name, (kind, value) in columns.items()
    ]
    return {"inputs": inputs}


def _same_everywhere(place: Place, model: str, body: dict[str, Any]) -> float:
    """The score that all gateways answer with."""
    found = {float(scores(place.infer_body(model, body, gateway))[0]) for gateway in place.gateways}
    assert len(found) == 1, f"gateways answer with {found}"
    return found.pop()


@scenario("tune", "tune", slow=True)
def tune(place: Place, model: str) -> None:
    """The version in use takes 64 rows, and the tuner tries at most four times as many: less than the default, which
    the next version would have if nothing were tuned."""
    place.roll_out(model, serving={"max_batch_rows": 64})
    found = json.loads(place.ask_for("tune", model, "--rows", "1", "--json"))["chosen"]
    assert found["max_batch_rows"] in (64, 256), found
    version = place.roll_out(model)
    wanted = {f"max_batch_size: {found['max_batch_rows']}", f"count: {found['instances']}"}
    folders = place.repositories(f"{model}-v{version}")
    configs = [path.read_text() for each in folders for path in each.rglob("config.pbtxt")]
    untuned = [text for text in configs if not all(word in text for word in wanted)]
    assert configs
    assert not untuned, f"accepted, nothing happens: {len(untuned)} of {len(configs)} servers are not tuned"


@scenario("backup and restore")
def backup_and_restore(place: Place, model: str) -> None:
    """Read again from the restored home alone; tests/cluster/test_disaster.py also serves from it."""
    place.roll_out(model)
    kept, home = place.file("backup.tar"), place.file("restored")
    with place.receiver():
        names = {each["name"] for each in place.json("alerts", "receivers", "list")}
        place.ask_for("backup", "create", str(kept), "--no-captures")
        before = place.status(model)
        place.serin("backup", "restore", str(kept), home=home)
        (after,) = place.json("rollout", "status", model, home=home)
        assert after["live"] == before["live"]
        # Those of several hosts are in the store, which a backup of one host leaves out.
        assert {each["name"] for each in place.json("alerts", "receivers", "list", home=home)} == names
    if place.bundles:
        listed = {(each["model"], each["version"]) for each in place.json("models", "list", home=home)}
        assert (model, before["live"]) in listed


@scenario("sent run, own code and packages", "environment.requirements", slow=True)
def sent_run(place: Place, model: str) -> None:
    """A network that imports a file beside it, and that a package which the workers lack. Every stage is placed."""
    index, path = place.file("index"), write_project(place.file("project"), rows=600)
    write_wheel(index, "tiny-numbers", "1.0", {"tiny_numbers.py": "HALF = 0.5\n"})
    (path.parent / "layers.py").write_text(
        "from tiny_numbers import HALF\n\n\ndef width():\n    return int(16 * HALF)\n"
    )
    gate = Gate()
    gate.opened.set()
    with place.prefect() as named, ExitStack() as ends:
        with place.inside():
            url = ends.enter_context(served_index(index, gate, place.address))
        place.open_port(urlsplit(url).port or 80)
        (wheel,) = (index / "tiny-numbers").glob("*.whl")
        document = yaml.safe_load(path.read_text())
        document["features"][0]["steps"].pop()  # an operator would need PYTHONPATH
        document |= {"name": model, "rollout": AT_ONCE, "objectives": {"latency_ms": 2000}}
        asked = f"tiny-numbers @ {url}/tiny-numbers/{wheel.name}"
        path.write_text(yaml.safe_dump({**document, "environment": {"requirements": [asked]}}))
        place.ask_for("run", str(path), "--placed", **named)
    with place.inside():
        manifest = json.loads(place.store.read_file(model, 1, "manifest.json") or b"{}")
    assert manifest["lineage"]["environment"] == "tiny-numbers==1.0", manifest["lineage"]
    assert manifest["lineage"]["package"], "it was not sent by content"
    columns = {
        "weight": ("FP32", [2.5, 1.0]),
        "distance": ("INT64", [1900, 10]),
        "carrier": ("BYTES", ["slow", "swift"]),
    }
    inputs = [
        {"name": name, "datatype": kind, "shape": [2, 1], "data": data}
        for name, (kind, data) in columns.items()
    ]
    for gateway in place.gateways:
        late, early = scores(place.call(gateway, f"/v2/models/{model}/infer", {"inputs": inputs}))
        assert late > early, gateway


@scenario("copy of a version, rolled out", "elsewhere", slow=True)
def copied(place: Place, model: str) -> None:
    """From a store that only the operator has; nothing is trained, and the digest stays."""
    other = Store(str(place.file("store")))
    place.publish(other, model, bias=0.3)
    place.ask_for("models", "copy", model, "--to", place.store.url, "--rollout", SERIN_STORE=other.url)
    promoted, said = place.follow(model)
    assert promoted, said
    with place.inside():
        assert place.store.manifest_digest(model, 1) == other.manifest_digest(model, 1)
    some = rows(8)
    for gateway in place.gateways:
        assert np.allclose(scores(place.infer(model, some, gateway)), chances(some, 0.3), atol=1e-5), gateway


@scenario("online windows", "SERIN_EVENTS", "data.windows")
def online_windows(place: Place, model: str) -> None:
    """Each gateway sees the events that came through all of them; one that comes again counts once."""
    window = {"by": "carrier", "span": "1h", "source": "online", "make": {"distance": "count()"}}
    data = {
        "tables": {"flights": "flights.parquet"}, "target": {"expression": "arr_delay > 15", "task": "binary"},
        "time": "at", "events": {"id": "id"}, "windows": [window],
    }  # fmt: skip
    place.roll_out(model, bias=BIAS, files={"windows.json": PLAN.dump()}, data=data)

    def answer(gateway: str, event: str, at: int | None = None) -> Answer:
        return place.call(gateway, f"/v2/models/{model}/infer", {"inputs": event_inputs(event, at)})

    def earlier(gateway: str, event: str, at: int | None = None) -> int:
        return count_of(scores(answer(gateway, event, at))[0])

    for gateway in place.gateways:
        soon(lambda gateway=gateway: answer(gateway, "").status == 200, f"no windows at {gateway}")  # type: ignore[misc]
    turns = [gateway for _ in range(3) for gateway in place.gateways]
    assert [earlier(gateway, f"event {n}") for n, gateway in enumerate(turns)] == [*range(len(turns))]
    at = time.time_ns() // 1000
    assert {earlier(gateway, "again", at) for gateway in place.gateways} == {len(turns)}
    event = {"id": "pushed", "at": time.time_ns() // 1000, "carrier": "AA"}
    pushed = place.call(place.gateways[-1], f"/v2/models/{model}/events", {"events": [event, event]})
    assert (pushed.status, json.loads(pushed.text)) == (200, {"counted": 1, "repeated": 1})
    assert earlier(place.gateways[0], "last") == len(turns) + 2


@scenario("key rotation", "key")  # the last: not every place lets clients in without a key again
def key_rotation(place: Place, model: str) -> None:
    place.roll_out(model)
    one = rows(1)

    def has(gateway: str, key: str, status: int) -> Callable[[], bool]:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        return lambda: place.infer(model, one, gateway, **headers).status == status

    def everywhere(key: str, status: int, what: str) -> None:
        for gateway in place.gateways:
            soon(has(gateway, key, status), f"{what} at {gateway}", 30.0)

    old = json.loads(place.ask_for("keys", "create", f"{model}-old", "--json"))["key"]
    try:
        everywhere(old, 200, "the key is not known")
        everywhere("serin_unknown", 401, "another key is taken")
        new = json.loads(place.ask_for("keys", "create", f"{model}-new", "--json"))["key"]
        everywhere(new, 200, "the new key is not known")
        everywhere(old, 200, "the old key is not taken any more")
        place.ask_for("keys", "remove", f"{model}-old")
        everywhere(old, 401, "the old key is still taken")
        everywhere(new, 200, "the new key is not known")
    finally:
        place.open_again()
