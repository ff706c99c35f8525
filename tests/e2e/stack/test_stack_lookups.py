"""Lookups that runs of Prefect refresh: by the documented event, and by the deployment of the schedule."""

from pathlib import Path
from typing import Any

import pytest

from serin.rollout.run.status import model_status
from serin.store.artifacts import Release
from tests.e2e.whole_stack import Stack, until
from tests.fakes.small_pipeline import small_spec, with_lookup, write_carriers, write_spec
from tests.parity.place import AT_ONCE

MODEL = "late-parcels-looked-up"
RESOURCE = f'{{"prefect.resource.id": "serin.model.{MODEL}", "serin.model": "{MODEL}"}}'
EMIT = f"""eval "$(serin env)" && prefect event emit serin.lookup.changed --resource '{RESOURCE}'"""
RUN = 'eval "$(serin env)" && prefect deployment run refresh_lookups/scheduled --watch --param model={model}'


@pytest.fixture(scope="module")
def carriers(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The table of a live model's lookup."""
    folder = tmp_path_factory.mktemp("lookups")
    table = folder / "carriers.parquet"
    write_carriers(table)
    trees = {"kind": "xgboost", "rounds": 3, "options": {"max_depth": 2}}
    document = small_spec(folder, rows=600, model=trees, training={"seed": 3}, rollout=AT_ONCE)
    spec = write_spec(folder, {**with_lookup(document, table), "name": MODEL})
    for stage in ("etl", "train", "export"):
        stack.serin(stage, str(spec))
    stack.serin("rollout", "start", f"{MODEL}:1")
    assert live(stack) == Release(model=MODEL, version=1)
    return table


def live(stack: Stack) -> Release | None:
    status = model_status(stack.home, MODEL)
    return None if status is None else status.live_release


def runs(stack: Stack) -> list[dict[str, Any]]:
    asked = {"flows": {"name": {"any_": ["refresh_lookups"]}}}
    found = stack.call("POST", "/flow_runs/filter", asked)
    return [run for run in found if run["parameters"].get("model") == MODEL]


def test_an_event_about_a_table_refreshes_the_lookups_of_its_model(stack: Stack, carriers: Path) -> None:
    write_carriers(carriers, slow=0.0)
    done = stack.shell(EMIT, carriers.parent)
    assert done.returncode == 0, done.stderr
    second = Release(model=MODEL, version=1, edition=2)
    until(
        lambda: live(stack) == second,
        "the event refreshes",
        said=lambda: [each["state_name"] for each in runs(stack)],
    )
    until(lambda: [each["state_type"] for each in runs(stack)] == ["COMPLETED"], "one run, which ends")


def test_a_run_that_finds_a_bad_table_fails_by_name_and_changes_nothing(stack: Stack, carriers: Path) -> None:
    before = live(stack)
    write_carriers(carriers, slow=0.0, more=("slow",))
    done = stack.shell(RUN.format(model=MODEL), carriers.parent)
    assert done.returncode != 0
    assert "carriers" in done.stdout + done.stderr
    assert live(stack) == before
    write_carriers(carriers, slow=3.0)
    done = stack.shell(RUN.format(model=MODEL), carriers.parent)
    assert done.returncode == 0, done.stdout + done.stderr
    assert live(stack) == Release(model=MODEL, version=1, edition=3)
