"""The alert about a lookup that is older than its spec allows, and its age as a metric."""

from dataclasses import replace
from pathlib import Path

import pytest

from serin.monitoring.alerts.book import AlertBook, read_alerts
from serin.pipeline.lookups import is_due
from serin.rollout.decide.state import Phase
from serin.rollout.run.record import rollout2decision
from serin.store.artifacts import Release
from serin.store.store import Store
from serin.watcher.lookups_duty import LookupsDuty
from serin.watcher.metrics import lookups
from tests.fakes.editions import LIVE, publish_edition
from tests.fakes.rollout import home_journals
from tests.unit.watcher.test_duties import ROLLOUT

READ, DAY = 1_800_000_000.0, 86_400.0


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("SERIN_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SERIN_STORE", str(tmp_path / "store"))
    made = Store.open()
    assert made.reserve_version("flights") == 1
    publish_edition(made, 1, READ)
    return made


def make_live(home: Path, release: Release) -> None:
    journal = home_journals(home).open("flights")
    now = replace(ROLLOUT, candidate=release, stable=None, phase=Phase.PROMOTED)
    journal.append(rollout2decision(now, READ))


def test_an_old_lookup_is_an_alert_until_its_table_is_read_again(tmp_path: Path, store: Store) -> None:
    home = tmp_path / "home"
    duty = LookupsDuty(home, AlertBook(home))
    make_live(home, LIVE)
    duty.tick(READ + DAY / 4)
    assert not is_due(store, LIVE, READ + DAY / 4)
    assert is_due(store, LIVE, READ + DAY / 2)
    assert read_alerts(home, "flights").open == ()
    duty.tick(READ + DAY + 60)
    (found,) = read_alerts(home, "flights").open
    assert (found.alert.key, found.alert.kind) == ("flights/lookup/planes", "lookup")
    assert found.alert.title == "The lookup in planes is older than 1d"
    assert found.alert.since == READ + DAY
    store.note_lookups_read(LIVE, READ + DAY + 90)
    duty.tick(READ + DAY + 120)
    assert read_alerts(home, "flights").open == ()


def test_an_edition_ends_the_alert_and_has_its_own_age(tmp_path: Path, store: Store) -> None:
    home = tmp_path / "home"
    duty = LookupsDuty(home, AlertBook(home))
    make_live(home, LIVE)
    duty.tick(READ + 2 * DAY)
    assert len(read_alerts(home, "flights").open) == 1
    publish_edition(store, 2, READ + 2 * DAY)
    make_live(home, replace(LIVE, edition=2))
    duty.tick(READ + 2 * DAY + 60)
    assert read_alerts(home, "flights").open == ()
    (age, most, rows) = lookups(home)
    assert [sample.labels["release"] for sample in age.samples] == ["flights-v1e2"]
    assert [sample.value for sample in most.samples] == [DAY]
    assert [sample.value for sample in rows.samples] == [20.0]
