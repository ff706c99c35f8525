"""The live drift watch over real records, versions, journals and alerts; only the traffic is made up."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import typer

from serin.commands.rollout import _unwatched
from serin.commands.watch import drift
from serin.errors import FileBroken, NotWatched
from serin.formats.drift import FILE
from serin.formats.importance import ColumnImportance, Importance
from serin.formats.schema import InputColumn, OutputTensor, Schema, write_schema
from serin.machine.documents import write_facts
from serin.monitoring.alerts.book import AlertBook, read_alerts
from serin.monitoring.drift import model_watch
from serin.monitoring.drift.model_watch import read_state, state_file
from serin.monitoring.drift.read import read_drift
from serin.rollout.decide.state import Phase
from serin.store.artifacts import Release
from serin.store.store import Store
from serin.watcher.drift_duty import DriftDuty
from serin.watcher.metrics import drift as metrics_of_drift
from tests.fakes.drift import category_column, series_of, statistics_of
from tests.fakes.rollout import go_live
from tests.fakes.small_pipeline import NAME, small_spec, write_spec
from tests.kit.recorded_parts import write_part

START = 1_800_000_000
SHARE = (0.5, 0.4, 0.1, 0.0, 0.0, 0.0)  # swift, steady, slow, other known values, unseen, null
KEY = f"{NAME}/drift/carrier"
_places = iter(range(1, 1_000_000))


@pytest.fixture(autouse=True)
def served(home: Path, tmp_path: Path) -> None:
    publish(tmp_path)
    go_live(home, release(1), START)


def release(version: int) -> Release:
    return Release(model=NAME, version=version)


def publish(folder: Path, **monitoring: Any) -> int:
    """A version that watches its carrier, which matters most, and its colour, which does not."""
    watched = {
        "capture": {"share": 1},
        "drift": {"tolerance": 0.01},
        "retrain": ["drift"],
        **monitoring,
    }
    columns = [category_column("carrier", ["swift", "steady", "slow"]), category_column("_row", ["1", "2"])]
    series = [series_of(0, SHARE, weight=0.7), series_of(1, (0.5, 0.5, 0.0, 0.0, 0.0), weight=0.3)]
    inputs = tuple(
        InputColumn(name=name, dtype="BYTES", kind="string", null='""') for name in ("carrier", "_row")
    )
    outputs = (OutputTensor(name="score", dtype="FP32", dims=(1,)),)
    losses = [ColumnImportance(column=name, source="request", loss=loss, low=loss, high=loss)
              for name, loss in (("carrier", 0.1), ("_row", 0.001))]  # fmt: skip
    importance = Importance(metric="auc", value=0.9, rows=10, repeats=1, seed=0, columns=tuple(losses))
    store = Store.open()
    with store.workspace() as work:
        write_spec(work, small_spec(folder / "data", rows=10, monitoring=watched))
        write_schema(work, Schema(task="binary", inputs=inputs, outputs=outputs))
        write_facts(work / FILE, statistics_of(columns, series).to_json())
        write_facts(work / "importance.json", importance.to_json())
        (work / "manifest.json").write_text("{}")
        version = store.reserve_version(NAME)
        store.publish_bundle(NAME, version, work)
    return version


def record(
    home: Path,
    minutes: range,
    *,
    unseen: float = 0.0,
    version: int = 1,
    source: str = "live",
    rows: int = 300,
) -> None:
    """One part with the rows of these minutes after START."""
    chance, count = np.random.default_rng([minutes.start, version]), len(minutes) * rows
    carrier = chance.choice(["swift", "steady", "slow"], count, p=[0.5, 0.4, 0.1]).astype(object)
    carrier[chance.random(count) < unseen] = "zippy"
    t = START + 60 * np.repeat(np.asarray(minutes), rows) + np.tile(np.arange(rows) / 10, len(minutes))
    write_part(home, NAME, version, pa.table({
        "_id": [str(next(_places)) for _ in range(count)],
        "_row": pa.array(np.zeros(count, np.int32)),
        "_t": pa.array((t * 1e6).astype(np.int64), pa.timestamp("us", "UTC")),
        "_source": [source] * count,
        "carrier": carrier.tolist(),
        "request._row": chance.choice(["1", "2"], count).tolist(),
    }))  # fmt: skip


def tick(home: Path, minute: int, duty: DriftDuty | None = None) -> DriftDuty:
    duty = duty or DriftDuty(home, AlertBook(home))
    duty.tick(START + 60.0 * minute)
    return duty


def release_state(home: Path, version: int = 1) -> dict[str, Any]:
    state = read_state(home, NAME)
    return state.releases[version].to_json()


def test_an_alarm_names_the_column_then_and_now_and_ends_when_the_column_is_back(home: Path) -> None:
    record(home, range(30))
    record(home, range(30, 60), unseen=0.2)
    duty = tick(home, 60)
    (opened,) = read_alerts(home, NAME).open
    alert = opened.alert
    assert (alert.key, alert.release, alert.severity) == (KEY, f"{NAME}-v1", "ticket")
    assert alert.title.startswith("carrier drifted (unseen values from 0% to ")
    assert "in training (tolerance 1%)" in alert.text
    assert "Importance: number 1 of 2 columns." in alert.text
    assert abs(alert.since - (START + 30 * 60)) <= 120
    assert alert.facts["column"] == "carrier"
    record(home, range(60, 120))
    tick(home, 120, duty)
    assert read_alerts(home, NAME).open == ()
    assert read_alerts(home, NAME).resolved[0].alert.key == KEY
    (past,) = release_state(home)["past"]
    assert past["alarm"]["column"] == "carrier"


def test_an_edition_of_the_lookups_continues_the_watch_and_is_named(home: Path) -> None:
    record(home, range(30), unseen=0.3)
    duty = tick(home, 30)
    go_live(home, replace(release(1), edition=2), START + 60 * 31)
    record(home, range(30, 60), unseen=0.3)
    tick(home, 60, duty)
    (opened,) = read_alerts(home, NAME).open
    assert opened.alert.release == f"{NAME}-v1e2"
    found = read_drift(home, NAME)
    assert found is not None
    assert (found.release, found.rows) == (f"{NAME}-v1e2", 60 * 300)
    tick(home, 61)  # another process
    (opened,) = read_alerts(home, NAME).open
    assert opened.alert.release == f"{NAME}-v1e2"


def test_the_metric_of_a_column_is_1_while_its_alarm_is_open(home: Path) -> None:
    record(home, range(30), unseen=0.3)
    tick(home, 30)
    shown = {
        sample.labels["column"]: sample.value
        for family in metrics_of_drift(home)
        for sample in family.samples
        if sample.name == "serin_drift_evidence_ratio"
    }
    assert shown["carrier"] == 1.0
    assert 0 <= shown["_row"] < 1


def test_the_command_shows_the_alarm_and_writes_the_page(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(NotWatched, match="version 1 records every request, but none came yet"):
        drift(NAME)
    record(home, range(30), unseen=0.2)
    tick(home, 30)
    drift(NAME, report=tmp_path / "drift.html")
    shown = capsys.readouterr().out
    assert "9,000 rows since" in shown
    assert "at most 1 false alarm a year over all columns" in shown
    assert re.search(
        r"(?m)^carrier +drifted +- +1 +unseen values +0\.0% +(19|20|21)\.\d% +1\.0% +every minute$", shown
    )
    assert re.search(r"(?m)^_row +no alarm +<0\.1% +2 ", shown)
    assert "carrier</span>: drifted" in (tmp_path / "drift.html").read_text()
    with pytest.raises(typer.BadParameter, match=r"x\.html cannot be written: No such file or directory"):
        drift(NAME, report=tmp_path / "none" / "x.html")
    view = read_drift(home, NAME)
    assert [column.state for column in view.columns] == ["drifted", "no alarm"]
    assert view.columns[0].evidence == 1.0
    assert view.columns[0].unseen == pytest.approx((0.0, 0.2), abs=0.02)


def test_the_command_shows_no_shares_before_the_first_row(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record(home, range(1), source="batch")
    tick(home, 1)
    drift(NAME)
    shown = capsys.readouterr().out
    assert "no rows yet" in shown
    assert re.search(r"(?m)^carrier +no rows +0% +1 +- +- +- +- +-$", shown)


def test_a_share_beyond_its_tolerance_is_not_yet_an_alarm_and_its_next_judgement_is_named(home: Path) -> None:
    record(home, range(2), unseen=0.3)
    tick(home, 2)
    view = read_drift(home, NAME)
    assert view is not None
    (carrier,) = (each for each in view.columns if each.name == "carrier")
    assert carrier.state == "no alarm yet"
    assert (carrier.largest.label, carrier.largest.block) == ("unseen values", "minute")
    assert carrier.largest.judged == START + 120


def test_an_alarm_about_a_column_that_hardly_matters_is_for_information(home: Path) -> None:
    table = {"carrier": ["swift", "steady"] * 3000, "request._row": ["3"] * 6000, "_source": ["live"] * 6000}
    t = pa.array(((START + np.arange(6000) * 0.2) * 1e6).astype(np.int64), pa.timestamp("us", "UTC"))
    ids = {"_id": [str(i) for i in range(6000)], "_row": pa.array(np.zeros(6000, np.int32)), "_t": t}
    write_part(home, NAME, 1, pa.table({**ids, **table}))
    tick(home, 60)
    severities = {each.alert.facts["column"]: each.alert.severity for each in read_alerts(home, NAME).open}
    assert severities["_row"] == "info"


def record_night(home: Path, night: int, *, unseen: float = 0.0, minutes: float = 0.0) -> None:
    """A scheduled run over a table that is sorted by carrier, recorded over so many minutes."""
    chance, count = np.random.default_rng(night), 4000
    carrier = chance.choice(["swift", "steady", "slow"], count, p=[0.5, 0.4, 0.1]).astype(object)
    carrier[chance.random(count) < unseen] = "zippy"
    t = START + 86_400 * night + np.linspace(0, 60 * minutes, count)
    write_part(home, NAME, 1, pa.table({
        "_id": [str(next(_places)) for _ in range(count)],
        "_row": pa.array(np.zeros(count, np.int32)),
        "_t": pa.array((t * 1e6).astype(np.int64), pa.timestamp("us", "UTC")),
        "_source": ["bulk"] * count,
        "carrier": sorted(carrier.tolist()),
        "request._row": chance.choice(["1", "2"], count).tolist(),
    }))  # fmt: skip


def test_scheduled_runs_are_counted_and_the_order_of_their_rows_is_no_drift(home: Path) -> None:
    alarms = []
    for night in range(18):
        record_night(home, night, unseen=0.3 if night >= 10 else 0.0)
        tick(home, 1440 * night + 5)
        alarms.append(len(read_alerts(home, NAME).open))
    assert not any(alarms[:10])
    assert alarms[-1] == 1
    assert release_state(home)["rows"] == 18 * 4000


def test_only_traffic_is_counted(home: Path) -> None:
    record(home, range(60), unseen=0.5, source="batch")
    record(home, range(60, 62))
    tick(home, 62)
    assert release_state(home)["rows"] == 600
    assert read_alerts(home, NAME).open == ()


def test_each_part_is_counted_once_whatever_is_killed_in_between(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each process dies either before its state is on disk, or right after."""
    write = model_watch.write_whole

    def die_before(path: Path, data: str) -> None:
        raise OSError("killed")

    def die_after(path: Path, data: str) -> None:
        write(path, data)
        raise OSError("killed")

    for number in range(12):
        record(home, range(5 * number, 5 * number + 5), unseen=0.2 if number >= 6 else 0.0)
        for dies in (die_before, die_after):
            monkeypatch.setattr(model_watch, "write_whole", dies)
            try:
                tick(home, 5 * number + 5)
            except OSError:
                continue
    monkeypatch.setattr(model_watch, "write_whole", write)
    interrupted = release_state(home)
    state_file(home, NAME).unlink()
    tick(home, 60)
    assert interrupted == release_state(home)
    assert interrupted["rows"] == 60 * 300
    assert len(read_alerts(home, NAME).open) == 1


def test_a_new_release_starts_its_own_watch_and_the_old_ones_alarms_end(home: Path, tmp_path: Path) -> None:
    record(home, range(30), unseen=0.3)
    duty = tick(home, 30)
    assert [each.alert.key for each in read_alerts(home, NAME).open] == [KEY]
    version = publish(tmp_path)
    go_live(home, release(version), START, phase=Phase.BAKING, step=0, stable=release(1))
    record(home, range(30, 40), version=version)
    tick(home, 40, duty)
    assert [each.alert.release for each in read_alerts(home, NAME).open] == [f"{NAME}-v1"]
    go_live(home, release(version), START)
    record(home, range(40, 50), version=version)
    tick(home, 50, duty)
    assert read_alerts(home, NAME).open == ()
    [ended] = read_alerts(home, NAME).resolved
    assert ended.ended == f"closed: version {version} is compared with its own training rows"
    assert release_state(home, version)["rows"] == 20 * 300
    assert list(read_state(home, NAME).releases) == [version]  # type: ignore[union-attr]


def test_going_back_to_a_version_without_drift_closes_its_alerts_unresolved(
    home: Path, tmp_path: Path
) -> None:
    record(home, range(30), unseen=0.3)
    duty = tick(home, 30)
    [alert] = read_alerts(home, NAME).open
    assert alert.alert.facts["examples"], "the values that training never had are quoted"
    version = publish(tmp_path, drift=None, retrain=[])
    going = Release(model=NAME, version=version)
    assert _unwatched(NAME, going).startswith(f"version {version} is not watched: ")
    assert _unwatched(NAME, Release(model=NAME, version=1)) == ""
    go_live(home, release(version), START)
    tick(home, 40, duty)
    assert read_alerts(home, NAME).open == ()
    [ended] = read_alerts(home, NAME).resolved
    assert ended.ended == f"closed: version {version} is not watched"


def test_a_part_larger_than_what_is_read_at_once_is_counted_whole(home: Path) -> None:
    record(home, range(100), rows=1500)
    tick(home, 100)
    assert release_state(home)["rows"] == 150_000
    assert read_alerts(home, NAME).open == ()


def test_a_clock_that_jumps_ahead_and_back_is_no_drift_and_loses_no_row(home: Path) -> None:
    year = 365 * 24 * 60
    for minutes in (range(20), range(year, year + 5), range(20, 60)):
        record(home, minutes)
    tick(home, 60)
    assert release_state(home)["rows"] == 65 * 300
    assert read_alerts(home, NAME).open == ()


def test_a_model_that_does_not_ask_for_it_is_not_watched(home: Path, tmp_path: Path) -> None:
    version = publish(tmp_path, drift=None, retrain=[])
    go_live(home, release(version), START)
    record(home, range(30), version=version, unseen=0.5)
    tick(home, 30)
    assert read_state(home, NAME) is None


def test_a_broken_state_is_reported_and_left_alone(home: Path) -> None:
    state_file(home, NAME).parent.mkdir(parents=True)
    state_file(home, NAME).write_text('{"format": ')
    with pytest.raises(FileBroken, match=r"late-parcels\.json"):
        tick(home, 1)
    assert state_file(home, NAME).read_text() == '{"format": '
