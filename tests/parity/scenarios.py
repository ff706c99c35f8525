"""What Serin can do, each written once for every place. A scenario that returns has passed.

It asks for what it is about with `Place.ask_for` or `Place.start`. A command that is refused there counts as refused if
its reason has a word of the scenario (`words`); all else that raises has failed. What is accepted must happen.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import yaml

from serin.columns.scored import measured, row_loss
from serin.formats.drift import SHORTEST
from serin.formats.quality import QualityReference
from serin.store.store import Store
from tests.fakes.counting_plan import BIAS, PLAN, count_of, event_inputs
from tests.fakes.drift import category_column, series_of, statistics_of
from tests.fakes.own_project import write_project
from tests.fakes.small_pipeline import parcels, small_spec, with_lookup, write_carriers
from tests.fakes.webhooks import Webhook
from tests.kit.index import Gate, served_index, write_wheel
from tests.kit.waiting import until
from tests.kit.web import Answer
from tests.parity.place import AT_ONCE, CANARY, Place, Refused, chances, last_line, rows, scores, spec

LOOK_S = 1.0  # a command takes as long on a busy machine
RECORDED = {"capture": {"share": 1}}
MINUTES_S = 150.0  # for what is looked at every few seconds, on a busy machine


@dataclass(frozen=True)
class Scenario:
    """`words`: of which a refusal must have one. `slow`: it waits most of the time, so others may run beside it."""

    name: str
    run: Callable[[Place, str], None]
    words: tuple[str, ...]
    slow: bool

    @property
    def model(self) -> str:
        """Not the name itself: a refusal is looked through for words of the scenario."""
        return f"parity-{self.name.replace(' ', '-').replace(',', '')}"


SCENARIOS: dict[str, Scenario] = {}


def scenario(name: str, *words: str, slow: bool = False) -> Callable[[Callable[[Place, str], None]], None]:
    def register(run: Callable[[Place, str], None]) -> None:
        SCENARIOS[name] = Scenario(name, run, words, slow)

    return register


def soon(
    look: Callable[[], Any], what: str, within_s: float = MINUTES_S, said: Callable[[], object] = str
) -> Any:
    """Accepted, and it must happen: otherwise the scenario fails."""
    return until(look, f"accepted, nothing happens: {what}", within_s=within_s, every_s=LOOK_S, said=said)


def fired(hook: Webhook, model: str, kind: str) -> list[dict[str, Any]]:
    """The messages that an alert of this kind has begun."""
    begins = f"{model}/{kind}/"
    return [each for each in list(hook.got) if each["event"] == "fired" and each["key"].startswith(begins)]


@scenario("release")
def release(place: Place, model: str) -> None:
    place.roll_out(model, bias=0.25)
    some = rows(8)
    for gateway in place.gateways:
        assert np.allclose(scores(place.infer(model, some, gateway)), chances(some, 0.25), atol=1e-5), gateway


@scenario("canary promoted")
def canary_promoted(place: Place, model: str) -> None:
    place.roll_out(model)
    one = rows(1, seed=5)
    with place.load(model) as load:
        place.roll_out(model, bias=0.5, rollout=CANARY)
    assert load.errors == [], load.errors[:3]
    assert load.seen == {round(float(chances(one, bias)[0]), 4) for bias in (0.0, 0.5)}, load.seen
    assert place.status(model)["live"] == place.status(model)["rollout"]["version"]


@scenario("canary rolled back under load")
def canary_rolled_back(place: Place, model: str) -> None:
    place.roll_out(model)
    live = place.status(model)["live"]
    with place.load(model, pause_s=0.02) as load:
        place.start(model, side=600, rollout=CANARY)
        promoted, said = place.follow(model)
        after = load.answered
        until(lambda: load.answered > after + 50, "answers after the rollback", within_s=60)
    assert not promoted, said
    assert "slower than allowed" in said, said
    assert place.status(model)["live"] == live
    assert load.errors == [], load.errors[:3]


@scenario("external server", "elsewhere", "external")
def external_server(place: Place, model: str) -> None:
    plan, whole = place.file("spec.yaml"), spec(model)
    plan.write_text(yaml.safe_dump({key: whole[key] for key in ("name", "objectives", "serving", "rollout")}))
    with place.server(model) as one, place.server(model, bias=0.5) as two:
        urls = ["--stable", f"http://{one.address}", "--candidate", f"http://{two.address}"]
        place.ask_for("rollout", "start", model, *urls, "--spec", str(plan), "--no-follow")
        promoted, said = place.follow(model)
        assert promoted, said
        some = rows(4)
        for gateway in place.gateways:
            assert np.allclose(scores(place.infer(model, some, gateway)), chances(some, 0.5), atol=1e-5)
        place.clean(model)


@scenario("shadow", "shadow")
def shadow(place: Place, model: str) -> None:
    place.roll_out(model, monitoring=RECORDED)
    place.send(model, [rows(2, seed=number) for number in range(40)])
    steps = {"steps": ["shadow", 100], "shadow": {"rows": 60, "time": "0s", "share": 1}}
    place.start(model, bias=0.1, monitoring=RECORDED, rollout={**AT_ONCE, **steps})
    promoted, said = place.follow(model)
    assert promoted, said
    assert "shadowing" in said, "accepted, nothing happens: no recorded request was sent to the candidate"


@scenario("capture and forget", "capture")
def capture_and_forget(place: Place, model: str) -> None:
    place.roll_out(model, monitoring=RECORDED)
    sent = [rows(3, seed=number, carrier=("AA", "UA")[number % 2]) for number in range(20)]
    ids = place.send(model, sent)
    out = place.file("rows.parquet")

    def exported() -> pa.Table | None:
        code, _, _ = place.serin_done(["captures", "export", model, "--out", str(out)])
        return pq.read_table(out) if code == 0 and out.exists() else None  # no file: no rows yet

    def whole() -> pa.Table | None:
        found = exported()
        return found if found is not None and len(found) >= 60 else None

    found = soon(whole, "requests are not recorded", said=exported)
    expected = sorted((each, number) for each in ids for number in range(3))
    assert sorted(zip(found["_id"].to_pylist(), found["_row"].to_pylist(), strict=True)) == expected
    answered = np.concatenate([chances(batch) for batch in sent])
    assert np.allclose(np.sort(found["_answer_score"].to_numpy()), np.sort(answered), atol=1e-5)
    place.ask_for("captures", "forget", model, "--where", "carrier = 'UA'", "--yes")
    left = exported()
    assert left is not None
    assert sorted(left["carrier"].to_pylist()) == ["AA"] * 30


@scenario("drift alarm", "drift", slow=True)
def drift_alarm(place: Place, model: str) -> None:
    """Training had three carriers; now every request has another one."""
    shares = (0.4, 0.3, 0.3, 0.0, 0.0, 0.0)
    column = category_column("carrier", ["AA", "UA", "DL"])
    known = statistics_of(
        [column], [series_of(0, shares, block=SHORTEST, tolerance=0.05)], false_alarms=100_000.0
    )
    drift = {"tolerance": 0.05, "columns": ["carrier"], "false_alarms": 100_000}
    with place.receiver() as hook:
        files = {"drift.json": json.dumps(known.to_json()).encode()}
        place.roll_out(model, files=files, monitoring={**RECORDED, "drift": drift})
        until_s, number = time.monotonic() + MINUTES_S, 0
        while not fired(hook, model, "drift"):
            assert time.monotonic() < until_s, (
                f"accepted, nothing happens: no alarm after {number * 40} unseen values"
            )
            place.send(model, [rows(40, seed=number, carrier="rocket")], every_s=0.5)
            number += 1
        (alert, *more) = fired(hook, model, "drift")
        assert not more, "an alarm is reported more than once"
        assert "carrier drifted" in alert["title"], alert


@scenario("labels, live quality, rollback", "quality", slow=True)
def labels_to_rollback(place: Place, model: str) -> None:
    """The second version gives scores near 0 to rows of which most are late."""
    many = rows(4000, seed=99)
    late = np.random.default_rng(3).random(4000) < chances(many)
    loss = float(row_loss("binary", late.astype(float), chances(many)).mean())
    reference = QualityReference(
        rows=4000, loss_name="brier", loss=loss, scale=1.0, clip=1.0, block_s=place.block_s,
        metrics=measured("binary", late.astype(float), chances(many)),
    )  # fmt: skip
    quality = {"margin": 0.02, "false_alarms": 100_000, "rollback": True}
    how = {
        "files": {"quality.json": json.dumps(reference.to_json()).encode()},
        "monitoring": {**RECORDED, "quality": quality},
    }
    place.roll_out(model, **how)
    good = place.status(model)["live"]
    place.roll_out(model, bias=-9.0, **how)
    assert place.status(model)["live"] != good
    batches = [rows(20, seed=number) for number in range(40)]
    ids = place.send(model, batches, every_s=max(0.4, 2 * place.block_s / len(batches)))
    truth = np.concatenate([chances(batch) > 0.5 for batch in batches])
    labels = place.file("labels.csv")
    columns = {
        "_id": [each for each in ids for _ in range(20)], "_row": [*range(20)] * 40,
        "arr_delay": np.where(truth, 30.0, 0.0).tolist(),
    }  # fmt: skip
    pa.csv.write_csv(pa.table(columns), labels)
    place.ask_for("labels", "add", model, str(labels))
    within_s = MINUTES_S + 2 * place.block_s
    soon(
        lambda: place.status(model)["live"] == good,
        "a version that is wrong about most rows stays live",
        within_s,
    )


@scenario("budget alert", "objectives", slow=True)
def budget_alert(place: Place, model: str) -> None:
    """No request can keep the promise."""
    with place.receiver() as hook:
        place.roll_out(model, objectives={"latency_ms": 0.001, "latency_share": 0.9999})
        until_s, sent = time.monotonic() + MINUTES_S, 0
        while not fired(hook, model, "objective"):
            assert time.monotonic() < until_s, (
                f"accepted, nothing happens: no alert after {sent} slow requests"
            )
            place.send(model, [rows(1)] * 10, every_s=0.1)
            sent += 10
        keys = [each["key"] for each in fired(hook, model, "objective")]
        assert len(keys) == len(set(keys)), f"an alert is reported more than once: {keys}"
    (view,) = place.json("slo", model)
    assert sum(each["bad"] for each in view["objectives"]) > 0, view


@scenario("approve, pause, abort")
def approve_pause_abort(place: Place, model: str) -> None:
    asks = {**AT_ONCE, "steps": [50, 100], "approve": [100]}

    def held(by: str) -> Callable[[], bool]:
        return lambda: place.status(model)["rollout"]["hold"] == by

    place.roll_out(model)
    version = place.start(model, bias=0.1, rollout=asks)
    soon(held("approval"), "it does not wait for approval")
    place.ask_for("rollout", "pause", model)
    soon(held("paused"), "it is not paused")
    place.ask_for("rollout", "resume", model)
    soon(held("approval"), "it does not continue")
    place.ask_for("rollout", "approve", model)
    assert place.follow(model)[0]
    live = place.status(model)["live"]
    assert live == version
    place.start(model, bias=0.2, rollout=asks)
    soon(held("approval"), "it does not wait for approval")
    place.ask_for("rollout", "abort", model)
    soon(lambda: place.status(model)["rollout"]["phase"] == "rolled_back", "it is not aborted")
    assert place.status(model)["live"] == live


@scenario("retire")
def retire(place: Place, model: str) -> None:
    place.roll_out(model)
    one = rows(1)
    for gateway in place.gateways:
        scores(place.infer(model, one, gateway))

    def gone(gateway: str) -> Callable[[], bool]:
        return lambda: place.infer(model, one, gateway).status == 404

    place.ask_for("retire", model, "--yes")
    for gateway in place.gateways:
        soon(gone(gateway), f"{gateway} serves it", 30.0)


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
