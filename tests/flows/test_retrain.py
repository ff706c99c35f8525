"""Which live models are trained again, and what makes it happen. That an event starts it: chaos/schedules.py."""

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from prefect import get_client
from prefect.events.filters import EventFilter, EventNameFilter

from flows.retrain import retrain
from flows.watch import watch
from serin.errors import NotFound, StageFailed
from serin.formats.reason import utc
from serin.monitoring.alerts.book import read_alerts
from serin.monitoring.retrain import read_retraining
from serin.store.artifacts import Release
from serin.store.stage_keys import notes
from serin.store.store import Store
from tasks import retrain as task_module
from tasks.watch import DATA_CHANGED
from tests.fakes.small_pipeline import small_spec, write_spec

pytestmark = pytest.mark.usefixtures("prefect_server")


@pytest.fixture(autouse=True)
def live_models(home: Path, tmp_path: Path) -> None:
    """One that asks for everything and is urgent, one that asks for nights, one that asks for nothing."""
    store = Store.open()
    for name, reasons in (("eager", ["nightly", "data", "drift"]), ("nightly", ["nightly"]), ("never", [])):
        with store.workspace() as folder:
            raw = small_spec(tmp_path / "data", rows=10, monitoring={"retrain": reasons})
            urgent = {"priority": "urgent"} if name == "eager" else {}
            write_spec(folder, {**raw, "name": name, **urgent})
            (folder / "manifest.json").write_text("{}")
            store.publish_bundle(name, store.reserve_version(name), folder)
        store.set_alias(name, "live", 1)


class FakeStages:
    """Notes whose pipeline was asked for; the version after it is 2, or the one named by the test."""

    def __init__(self, failing: str | None = None) -> None:
        self.failing, self.makes = failing, 2
        self.asked: list[str] = []
        self.reasons: list[dict[str, Any]] = []

    async def run(
        self,
        stage: str,
        kind: type[Any],
        *,
        job_variables: dict[str, Any],
        spec: dict[str, Any],
        reason: dict[str, Any],
    ) -> Any:
        urgent = {"qos": "serin-urgent", "priority_class": "serin-urgent"}
        assert (stage, kind) == ("pipeline", Release)
        assert job_variables == (urgent if spec["name"] == "eager" else {})
        self.asked.append(spec["name"])
        self.reasons.append(reason)
        if spec["name"] == self.failing:
            raise StageFailed(stage=stage, run="slim-whippet", reason="worse than the live one")
        return Release(model=spec["name"], version=self.makes)


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch) -> FakeStages:
    fake = FakeStages()
    monkeypatch.setattr(task_module, "run_stage", fake.run)
    return fake


@pytest.mark.parametrize(
    ("parameters", "names"),
    [
        ({"why": "nightly"}, ["eager", "nightly"]),
        ({"why": "drift", "model": "eager"}, ["eager"]),
        ({"why": "drift", "model": "nightly"}, []),
        ({"model": "never"}, ["never"]),
        ({}, ["eager", "never", "nightly"]),
    ],
)
def test_models_are_trained_for_the_reasons_their_specs_name(
    stages: FakeStages, parameters: dict[str, str], names: list[str]
) -> None:
    assert asyncio.run(retrain(**parameters)) == [Release(model=name, version=2) for name in names]
    assert sorted(stages.asked) == names


def drift(**payload: Any) -> Any:
    reason = {"text": "carrier drifted", "release": "eager-v1", "noticed": time.time(), **payload}
    return retrain(why="drift", model="eager", reason=reason)


def test_the_reason_of_an_event_reaches_the_pipeline_and_the_record(home: Path, stages: FakeStages) -> None:
    asyncio.run(drift(since=1_700_000_000.0, facts={"column": "carrier"}))
    (reason,) = stages.reasons
    assert (reason["kind"], reason["text"], reason["since"]) == ("drift", "carrier drifted", 1_700_000_000.0)
    (begun,) = read_retraining(home, "eager").begun
    assert begun.reason.facts == {"column": "carrier"}
    assert (begun.outcome, begun.detail) == ("promoted", "eager-v2")
    (noted,) = notes(home, begun.run)
    assert noted["why"] == "eager-v2, because of drift: carrier drifted"


def test_several_alarms_at_once_lead_to_one_run_and_the_others_say_when_the_next_is_allowed(
    home: Path, stages: FakeStages, caplog: pytest.LogCaptureFixture
) -> None:
    noticed = time.time()
    for column in ("carrier", "dest", "distance"):
        asyncio.run(drift(text=f"{column} drifted", noticed=noticed))
    asyncio.run(drift(noticed=time.time() + 1))
    assert stages.asked == ["eager"]
    told = [refusal.why for refusal in read_retraining(home, "eager").refused]
    assert all("began after this was noticed" in why for why in told[:2])
    last = read_retraining(home, "eager").refused[-1]
    assert last.until == read_retraining(home, "eager").begun[0].t + 86_400
    assert f"the next one is allowed at {utc(last.until)}" in caplog.text


def test_an_alarm_about_a_version_that_was_replaced_trains_nothing(home: Path, stages: FakeStages) -> None:
    asyncio.run(drift(release="eager-v7"))
    assert stages.asked == []
    assert "eager-v7 is not live any more" in read_retraining(home, "eager").refused[0].why


def test_a_retraining_that_finds_nothing_new_says_so(home: Path, stages: FakeStages) -> None:
    stages.makes = 1
    assert asyncio.run(drift()) == [Release(model="eager", version=1)]
    (begun,) = read_retraining(home, "eager").begun
    assert (begun.outcome, begun.detail) == ("unchanged", "eager-v1")
    (noted,) = notes(home, begun.run)
    assert noted["why"] == "eager-v1 stays: nothing has changed since it was trained"


def test_a_retraining_that_fails_is_recorded_with_its_reason_and_counts(
    home: Path, stages: FakeStages
) -> None:
    stages.failing = "eager"
    with pytest.raises(StageFailed):
        asyncio.run(drift())
    (begun,) = read_retraining(home, "eager").begun
    assert begun.outcome == "failed"
    assert "worse than the live one" in begun.detail
    (alert,) = read_alerts(home, "eager").open
    assert (alert.alert.key, alert.alert.release) == ("eager/retrain/failed", "eager-v1")
    assert "drift: carrier drifted. eager-v1 stays live." in alert.alert.text
    asyncio.run(drift())
    assert stages.asked == ["eager"]
    stages.failing = None
    asyncio.run(retrain(model="eager"))
    assert read_alerts(home, "eager").open == ()


def test_one_that_fails_does_not_stop_the_others_and_fails_the_run(stages: FakeStages) -> None:
    stages.failing = "eager"
    with pytest.raises(StageFailed, match="worse than the live one"):
        asyncio.run(retrain(why="nightly"))
    assert sorted(stages.asked) == ["eager", "nightly"]


def test_a_model_that_is_not_there_is_named(stages: FakeStages) -> None:
    with pytest.raises(NotFound, match="eagre"):
        asyncio.run(retrain(why="drift", model="eagre"))


def test_changed_tables_are_reported_once_for_models_that_retrain_on_data(home: Path, tmp_path: Path) -> None:
    asyncio.run(watch())
    asyncio.run(watch())
    assert asyncio.run(_told(1)) == ["serin.model.eager"]
    table = tmp_path / "data" / "parcels.parquet"
    table.touch()  # the same rows
    asyncio.run(watch())
    pq.write_table(pq.read_table(table).slice(1), table)
    asyncio.run(watch())
    asyncio.run(watch())
    assert asyncio.run(_told(2)) == ["serin.model.eager"] * 2
    note = home / "watch" / "eager.json"  # no retraining has read them, and the cool-down is over
    said = json.loads(note.read_text())
    note.write_text(json.dumps({**said, "t": said["t"] - 90_000}))
    asyncio.run(watch())
    assert asyncio.run(_told(3)) == ["serin.model.eager"] * 3


async def _told(count: int) -> list[str]:
    """Events arrive by another way than the calls that follow them: waited for, not long."""
    wanted = EventFilter(event=EventNameFilter(name=[DATA_CHANGED])).model_dump(mode="json")
    found: list[dict[str, Any]] = []
    async with get_client() as client:
        for _ in range(150):
            response = await client.request("POST", "/events/filter", json={"filter": wanted})
            found = response.json()["events"]
            if len(found) >= count:
                break
            await asyncio.sleep(0.2)
    return [event["resource"]["prefect.resource.id"] for event in found]
