from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from serin.errors import NotFound, VersionInUse
from serin.machine.in_use import holding
from serin.rollout.decide.plan import Plan
from serin.rollout.run.commands import Command, Kind, ask
from serin.rollout.run.status import model_status
from serin.stack.delete_versions import delete_versions
from serin.store.retention import Policy, collect_garbage
from serin.store.store import Store
from tests.fakes.rollout import FakeJudge
from tests.fakes.running_controller import running_controller

MODEL = "flights"


def publish(store: Store, *versions: int) -> None:
    """As another process would: nothing is held."""
    for version in versions:
        assert store.reserve_version(MODEL) == version
        folder = Path(store.url) / "models" / MODEL / "versions" / str(version)
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text("{}")
        (folder / "model.onnx").write_bytes(b"weights")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = Store(str(tmp_path / "store"))
    publish(made, 1, 2, 3)
    return made


def do(home: Path, kind: Kind, version: int | None, *phases: str) -> None:
    plan = Plan(steps=(100.0,), min_requests=0, drain_s=0.0) if kind == "start" else None
    assert ask(home, Command(kind=kind, model=MODEL, version=version, by="test", plan=plan)).accepted
    end = time.monotonic() + 60
    while (status := model_status(home, MODEL)) is None or status.rollout.phase not in phases:
        assert time.monotonic() < end, status
        time.sleep(0.01)


@contextmanager
def refused(words: str) -> Iterator[None]:
    with pytest.raises(VersionInUse, match=words):
        yield


def test_a_version_is_deleted_for_good_and_its_number_is_not_used_again(store: Store, tmp_path: Path) -> None:
    assert delete_versions(store, tmp_path, MODEL, "3") == [3]
    assert store.versions(MODEL) == [1, 2]
    assert store.reserve_version(MODEL) == 4
    assert not (tmp_path / "store" / "models" / MODEL / "versions" / "3").exists()
    assert delete_versions(store, tmp_path, MODEL) == [1, 2]
    assert store.models() == []
    assert collect_garbage(store, tmp_path, Policy(), remove=True) == []
    with pytest.raises(NotFound, match="no model 'flights'"):
        delete_versions(store, tmp_path, MODEL)


def test_what_is_served_rolled_out_or_kept_for_a_rollback_is_not_deleted(
    store: Store, tmp_path: Path
) -> None:
    with running_controller(tmp_path, MODEL):
        do(tmp_path, "start", 1, "promoted")
        do(tmp_path, "start", 2, "promoted")
    for alias, version in (("live", 2), ("previous", 1)):
        store.set_alias(MODEL, alias, version)
    for version, words in (("2", "it is live; run `serin retire flights`"), ("1", "would return to it")):
        with refused(words):
            delete_versions(store, tmp_path, MODEL, version)
    with refused("it is live"):
        delete_versions(store, tmp_path, MODEL, "live")
    with running_controller(tmp_path, MODEL, FakeJudge(step_s=600, bake_s=600)):
        do(tmp_path, "start", 3, "baking")
        with refused("being rolled out; run `serin rollout abort flights`"):
            delete_versions(store, tmp_path, MODEL, "3")
    assert store.versions(MODEL) == [1, 2, 3]


def test_a_model_with_one_version_that_must_stay_keeps_all(store: Store, tmp_path: Path) -> None:
    with holding(store.lock(f"models/{MODEL}/versions/2")), refused("version 2 .* a process uses it"):
        delete_versions(store, tmp_path, MODEL)
    assert store.versions(MODEL) == [1, 2, 3]


def test_all_versions_of_a_retired_model_can_be_deleted(store: Store, tmp_path: Path) -> None:
    with running_controller(tmp_path, MODEL):
        do(tmp_path, "start", 1, "promoted")
        do(tmp_path, "retire", None, "retired")
    store.set_alias(MODEL, "previous", 1)
    assert delete_versions(store, tmp_path, MODEL) == [1, 2, 3]
    assert store.aliases(MODEL) == {}
