"""Scenarios of serving, rollouts and the watch, and what a scenario is (see scenarios.py)."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import yaml

from serin.columns.scored import measured, row_loss
from serin.formats.drift import SHORTEST
from serin.formats.quality import QualityReference
from tests.fakes.drift import category_column, series_of, statistics_of
from tests.fakes.webhooks import Webhook
from tests.kit.waiting import until
from tests.parity.place import AT_ONCE, CANARY, Place, chances, rows, scores, spec

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
        with place.load(model, clients=4, takes_s=3.0) as slow:
            place.start(model, bias=0.5, rollout=CANARY)
            soon(lambda: _is_leaving(place, model), "all traffic at the new version")
        promoted, said = place.follow(model)
    assert promoted, said
    assert load.errors == [], load.errors[:3]
    assert slow.errors == [], "a body was still arriving when the old version left"
    assert load.seen == {round(float(chances(one, bias)[0]), 4) for bias in (0.0, 0.5)}, load.seen
    assert place.status(model)["live"] == place.status(model)["rollout"]["version"]


def _is_leaving(place: Place, model: str) -> bool:
    """Whether the newest rollout drains the old version, or has."""
    return place.status(model)["rollout"]["phase"] in ("draining", "promoted")


@scenario("canary rolled back under load")
def canary_rolled_back(place: Place, model: str) -> None:
    place.roll_out(model)
    live = place.status(model)["live"]
    with place.load(model, pause_s=0.02) as load:
        place.start(model, side=1400, rollout=CANARY)
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
