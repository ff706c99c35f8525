"""A version by name, rolled out as its own spec says."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from flows.roll_out import roll_out
from serin.artifacts import Release
from serin.errors import NotFound
from serin.rollout.status import model_status
from serin.store import Store
from tests.fakes.running_controller import running_controller
from tests.fakes.small_pipeline import NAME, small_spec, write_spec

pytestmark = pytest.mark.usefixtures("prefect_server")


@pytest.fixture(autouse=True)
def two_versions(home: Path, tmp_path: Path) -> None:
    store = Store.open()
    for steps in ([100], [25, 100]):
        with store.workspace() as folder:
            rollout = {"steps": steps, "step_time": "0s", "bake": "0s", "min_requests": 0}
            write_spec(folder, small_spec(tmp_path / "data", rows=10, rollout=rollout))
            (folder / "manifest.json").write_text("{}")
            store.publish_bundle(NAME, store.reserve_version(NAME), folder)


def test_the_newest_version_is_rolled_out_by_the_steps_of_its_own_spec(home: Path) -> None:
    with running_controller(home, NAME):
        assert asyncio.run(roll_out(NAME, 1)) == Release(model=NAME, version=1)
        assert asyncio.run(roll_out(NAME)) == Release(model=NAME, version=2)
    status = model_status(home, NAME)
    assert status is not None
    assert status.rollout.steps == (25.0, 100.0)


def test_a_model_that_is_not_there_is_named_with_those_that_are() -> None:
    with pytest.raises(NotFound, match=f"did you mean '{NAME}'"):
        asyncio.run(roll_out("late-parcel"))
