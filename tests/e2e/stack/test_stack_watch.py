"""Drift closes the loop on a real stack: an alarm starts a retraining that ends in a promoted version with its reason.

Drift is judged by the minute at the fastest, so the records of the half hour before are written by the test. Everything
else is real: what clients send now is recorded from the gateway, and the watcher, the alert, the event, the training,
the comparison and the rollout are those of the stack.
"""

import json
import time
import urllib.request
import uuid
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from serin.formats.bundle import read_manifest
from serin.formats.reason import read_reason
from serin.host.state import read_stack, running_stack
from serin.monitoring.alerts.book import read_alerts
from serin.monitoring.drift.read import read_drift
from serin.monitoring.retrain import History, read_retraining
from serin.rollout.run.status import history, model_status
from serin.store.store import Store
from tests.e2e.whole_stack import Stack, until
from tests.fakes.small_pipeline import small_spec
from tests.kit.recorded_parts import write_part

pytestmark = pytest.mark.timeout(1500)

MODEL = "drifting-parcels"
ROWS_PER_MINUTE, ROWS_SENT = 300, 400
SECTIONS: dict[str, Any] = {
    "name": MODEL,
    "model": {"kind": "xgboost", "rounds": 12, "options": {"max_depth": 3}},
    "training": {"seed": 3},
    "objectives": {"latency_ms": 10_000},  # no request is slow, however busy the machine is
    "rollout": {"steps": [50, 100], "step_time": "0s", "min_requests": 0, "bake": "0s", "deadline": "600s"},
    "monitoring": {
        "capture": {"share": 1},
        "drift": {"tolerance": 0.05, "columns": ["carrier"]},
        "retrain": ["drift"],
        "retrain_budget": {"cool_down": "1h"},
    },
}


def test_drift_leads_to_an_alarm_and_to_a_retrained_promoted_version_that_says_why(
    stack: Stack, tmp_path: Path
) -> None:
    spec = tmp_path / "drifting.yaml"
    spec.write_text(yaml.safe_dump(small_spec(tmp_path / "data", **SECTIONS)))
    stack.serin("run", str(spec))
    home, began = stack.home, time.time()
    _add_the_new_carrier(tmp_path / "data" / "parcels.parquet")

    _record_the_last_half_hour(home)
    _send(stack, {"weight": 2.0, "distance": 100, "carrier": "rocket"})
    alert = until(lambda: _alert(home), "an alarm", alive=lambda: _is_up(stack))
    assert alert.alert.title.startswith("carrier drifted (unseen values from 0% to ")
    assert abs(alert.alert.since - (began - 900)) < 180
    until(
        lambda: _rows(home) >= 28 * ROWS_PER_MINUTE + ROWS_SENT,
        "requests are counted",
        alive=lambda: _is_up(stack),
    )
    print(f"alarm and requests counted: {time.time() - began:.1f} s")
    until(
        lambda: _answered(stack) >= ROWS_SENT // 100,
        "requests are compared with the promises",
        alive=lambda: _is_up(stack),
    )

    until(lambda: _live(home) == 2, "the retrained version is live", alive=lambda: _may_still(stack))
    print(f"retrained and promoted: {time.time() - began:.1f} s")
    (begun,) = read_retraining(home, MODEL).begun
    assert (begun.reason.kind, begun.reason.release) == ("drift", f"{MODEL}-v1")
    assert begun.reason.text.startswith("carrier drifted (unseen values from 0% to ")
    lineage = read_manifest(_bundle(home, 2)).lineage
    assert read_reason(lineage) == begun.reason
    assert begun.reason.text in (_bundle(home, 2) / "card.md").read_text()
    assert begun.reason.text in stack.serin("models", "show", MODEL)
    first = next(each for each in history(home, MODEL) if each.state["candidate"] == f"{MODEL}-v2")
    assert first.reason == f"trained again because of {begun.reason}"
    until(
        lambda: _alert(home) is None,
        "the alarm ends with the version it was about",
        alive=lambda: _is_up(stack),
    )

    _emit(stack, {"text": "somebody is impatient"})
    refused = until(
        lambda: read_retraining(home, MODEL).refused, "a second one is refused", alive=lambda: _is_up(stack)
    )
    assert refused[-1].until == begun.t + 3600
    assert _outcome(home) == "promoted"
    assert _live(home) == 2


def _answered(stack: Stack) -> int:
    """The requests that both objectives have seen; all were good and fast enough."""
    if not (views := stack.ask("slo", MODEL)):
        return 0
    (view,) = views
    assert [(each["name"], each["limit_ms"]) for each in view["objectives"]] == [
        ("availability", None),
        ("latency", 10_000.0),
    ]
    assert {each["bad"] for each in view["objectives"]} == {0}
    return int(view["objectives"][0]["requests"])


def _add_the_new_carrier(table: Path) -> None:
    """Today's table has more rows, a third of them by a carrier that was never seen."""
    old = pq.read_table(table)
    chance = np.random.default_rng(5)
    new = old.slice(0, 2000).to_pydict()
    rocket = chance.random(2000) < 0.35
    new["carrier"] = [("rocket" if fast else name) for fast, name in zip(rocket, new["carrier"], strict=True)]
    new["hours"] = [hours + 40 * fast for fast, hours in zip(rocket, new["hours"], strict=True)]
    pq.write_table(pa.concat_tables([old, pa.table(new, schema=old.schema)]), table)


def _record_the_last_half_hour(home: Path) -> None:
    """Requests like the training rows until a quarter of an hour ago, then a third with the new carrier."""
    chance, end = np.random.default_rng(7), time.time() - 60
    for first, last, unseen in ((28, 14, 0.0), (14, 0, 0.35)):
        rows = (first - last) * ROWS_PER_MINUTE
        carrier = chance.choice(["swift", "steady", "slow"], rows, p=[0.5, 0.4, 0.1]).astype(object)
        carrier[chance.random(rows) < unseen] = "rocket"
        t = np.linspace(end - 60 * first, end - 60 * last, rows, endpoint=False)
        write_part(home, MODEL, 1, pa.table({
            "_id": [uuid.uuid4().hex for _ in range(rows)],
            "_row": pa.array(np.zeros(rows, np.int32)),
            "_t": pa.array((t * 1e6).astype(np.int64), pa.timestamp("us", "UTC")),
            "_release": [f"{MODEL}-v1"] * rows,
            "_source": ["live"] * rows,
            "carrier": carrier.tolist(),
        }))  # fmt: skip


def _send(stack: Stack, row: dict[str, Any]) -> None:
    """Requests of a hundred rows each, through the gateway."""
    url = f"{running_stack(stack.home).gateway_url}/v2/models/{MODEL}/infer"
    types = {"weight": "FP32", "distance": "INT64", "carrier": "BYTES"}
    inputs = [
        {"name": name, "shape": [100, 1], "datatype": types[name], "data": [value] * 100}
        for name, value in row.items()
    ]
    for _ in range(ROWS_SENT // 100):
        request = urllib.request.Request(
            url, data=json.dumps({"inputs": inputs}).encode(), headers={"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            assert response.status == 200


def _emit(stack: Stack, payload: dict[str, Any]) -> None:
    resource = {"prefect.resource.id": f"serin.model.{MODEL}", "serin.model": MODEL}
    now = datetime.now(UTC).isoformat()
    event = {"id": str(uuid.uuid4()), "occurred": now, "event": "serin.drift", "payload": payload}
    stack.call("POST", "/events", [{**event, "resource": resource}])


def _alert(home: Path) -> Any:
    return next((each for each in read_alerts(home, MODEL).open if each.alert.kind == "drift"), None)


def _rows(home: Path) -> int:
    view = read_drift(home, MODEL)
    return 0 if view is None else view.rows


def _live(home: Path) -> int | None:
    status = model_status(home, MODEL)
    return None if status is None else status.live


def _outcome(home: Path) -> str | None:
    found: History = read_retraining(home, MODEL)
    return found.begun[-1].outcome if found.begun else None


def _is_up(stack: Stack) -> bool:
    """Whether the stack's supervisor runs. Its releases come and go in a rollout."""
    up = read_stack(stack.home)
    return up is not None and up.is_alive


def _may_still(stack: Stack) -> bool:
    """Nothing has failed: neither a part of the stack, nor the retraining."""
    return _is_up(stack) and _outcome(stack.home) != "failed"


def _bundle(home: Path, version: int) -> Path:
    return Path(Store(str(home / "store")).bundle(MODEL, version).path)
