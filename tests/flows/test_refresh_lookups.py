"""Which live models have their lookups refreshed by a run, and what it leads to. That an event starts one:
e2e/stack/test_stack_lookups.py."""

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flows.refresh_lookups import refresh_lookups
from serin.errors import LookupRefused, NotFound, RolloutFailed
from serin.pipeline import lookups
from serin.rollout.run.access import home_rollouts
from serin.rollout.run.commands import Command
from serin.rollout.run.status import history, model_status
from serin.store.artifacts import Release
from serin.store.store import Store
from tasks import lookups as task_module
from tests.fakes.rollout import FakeFleet
from tests.fakes.running_controller import running_controller
from tests.kit.waiting import until
from tests.unit.export.small_dataset import make_trained, planes, spec_for

pytestmark = pytest.mark.usefixtures("prefect_server")
MODEL = "flights"
FIRST, SECOND = (Release(model=MODEL, version=1, edition=edition) for edition in (1, 2))


@dataclass
class Scene:
    home: Path
    table: Path
    monkeypatch: pytest.MonkeyPatch
    fleet: FakeFleet

    def write(self, seats: int, rows: int = 20) -> None:
        found = planes().to_pylist()[:rows]
        found[1]["seats"] = seats
        pq.write_table(pa.Table.from_pylist(found, schema=planes().schema), self.table)

    def later(self, seconds: float) -> None:
        """What the flow takes for now."""
        self.monkeypatch.setattr(task_module, "time", SimpleNamespace(time=lambda: time.time() + seconds))

    @property
    def live(self) -> Release | None:
        status = model_status(self.home, MODEL)
        return status.live_release if status else None


@pytest.fixture
def scene(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    """A live version with a lookup that may be a day old, and a controller."""
    table = tmp_path / "planes.parquet"
    data = spec_for("binary").data.model_dump(by_alias=True, mode="json", exclude_none=True)
    data["tables"] = {"flights": str(tmp_path / "flights.parquet"), "planes": str(table)}
    data["joins"][0]["lookup"] = {"max_age": "1d"}
    trained = make_trained(tmp_path / "trained", "binary", data=data, rollout={"bake": "0s"})
    assert trained.export(Store.open()).release == FIRST
    made = Scene(home=home, table=table, monkeypatch=monkeypatch, fleet=FakeFleet())
    pq.write_table(planes(), table)
    with running_controller(home, MODEL, fleet=made.fleet):
        start = Command(kind="start", model=MODEL, version=1, by="ann")
        assert home_rollouts(home).mailbox.ask(start).accepted
        until(lambda: made.live == FIRST, "the first version is live")
        Store.open().set_alias(MODEL, "live", FIRST.label)  # the controller has its own versions
        yield made


def test_a_schedule_reads_tables_that_have_reached_half_of_their_age(scene: Scene) -> None:
    scene.write(seats=190)
    assert asyncio.run(refresh_lookups()) == []
    assert scene.live == FIRST
    scene.later(86_400 / 2 + 60)
    assert asyncio.run(refresh_lookups()) == [SECOND]
    assert scene.live == SECOND
    (asked,) = [
        each for each in history(scene.home, MODEL) if each.by and "flow run" in each.by and each.command
    ]
    assert "the lookups of flights-v1 are refreshed" in asked.reason


def test_a_model_that_is_named_is_refreshed_whatever_its_age_and_a_table_as_before_makes_no_edition(
    scene: Scene,
) -> None:
    assert asyncio.run(refresh_lookups(MODEL)) == [FIRST]
    scene.write(seats=190)
    assert asyncio.run(refresh_lookups(MODEL)) == [SECOND]
    assert asyncio.run(refresh_lookups(MODEL)) == [SECOND]
    assert Store.open().editions(MODEL, 1) == [1, 2]


def test_a_table_that_is_refused_fails_the_run_and_what_is_live_stays(scene: Scene) -> None:
    scene.write(seats=190, rows=5)
    with pytest.raises(LookupRefused, match="it has 5 rows, 20 before"):
        asyncio.run(refresh_lookups(MODEL))
    assert scene.live == FIRST
    with pytest.raises(NotFound, match="flight"):
        asyncio.run(refresh_lookups("flight"))


def test_a_schedule_leaves_an_edition_alone_that_was_rolled_back_until_its_tables_change(
    scene: Scene,
) -> None:
    scene.later(86_400)
    scene.write(seats=190)
    assert asyncio.run(refresh_lookups()) == [SECOND]
    back = Command(kind="rollback", model=MODEL, by="ann", why="wrong seats")
    assert home_rollouts(scene.home).mailbox.ask(back).accepted
    until(lambda: scene.live == FIRST, "the first edition is live again")
    Store.open().set_alias(MODEL, "live", FIRST.label)
    for model in (None, MODEL):
        assert asyncio.run(refresh_lookups(model)) == [FIRST]
    assert scene.live == FIRST
    by_hand = lookups.refresh_lookups(MODEL)
    assert (by_hand.value, scene.live) == (SECOND, SECOND)
    scene.write(seats=200)
    assert asyncio.run(refresh_lookups(MODEL)) == [replace(FIRST, edition=3)]


def test_a_schedule_leaves_an_edition_alone_that_failed_its_rollout(scene: Scene) -> None:
    scene.later(86_400)
    scene.write(seats=190)
    scene.fleet.wrong.add(SECOND.name)
    with pytest.raises(RolloutFailed):
        asyncio.run(refresh_lookups())
    scene.fleet.wrong.clear()
    assert asyncio.run(refresh_lookups()) == [FIRST]
    assert scene.live == FIRST
