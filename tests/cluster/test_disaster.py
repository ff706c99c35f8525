"""The disaster drill of docs/how-to/backup.md: the machine's home is lost, and a new stack serves from a backup."""

import shutil
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from serin.errors import PredictionFailed
from serin.rollout.decide.plan import Plan
from serin.rollout.run.access import home_rollouts
from serin.rollout.run.commands import Command
from serin.rollout.run.status import RolloutStatus, model_status
from serin.serving.client.client import Client
from serin.serving.tuning.load import Closed, model_target, run_load
from serin.store.store import Store
from tests.cluster.seaweedfs import running_seaweedfs
from tests.e2e.serving_alone import Alone, serving_alone
from tests.kit.commands import serin
from tests.unit.serving import bundles
from tests.unit.serving.bundles import MODEL

FRAME = pd.DataFrame(
    {"carrier": ["AA", None], "temp": [0.5, None], "distance": [1, 2], "night": [True, None]}
)
WIRE = {  # the same rows
    "carrier": np.array([["AA"], [""]], dtype=object),
    "temp": np.array([[0.5], [np.nan]], np.float32),
    "distance": np.array([[1], [2]], np.int64),
    "night": np.array([[1], [-1]], np.int8),
}
# It cannot end: no step passes without so many requests.
OPEN = Plan(steps=(25.0, 100.0), min_requests=10**9, step_s=1.0, warmup_s=0.0, bake_s=1.0, deadline_s=3600.0)


@pytest.fixture
def folder() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="serin-drill-"))  # short: it holds unix sockets
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("store", ["folder", "object store"])
def test_a_lost_home_is_restored_elsewhere_with_its_live_version_and_its_open_rollout(
    store: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if store == "folder":
        _drill(folder, monkeypatch)
        return
    with running_seaweedfs(folder / "seaweedfs") as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        _drill(folder, monkeypatch)


def _drill(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backup, lost, found = folder / "backup.tar", folder / "lost", folder / "found"
    monkeypatch.setenv("SERIN_HOME", str(lost))
    serin("keys", "create", "ada")
    serin("keys", "require", "--off")
    for bias in (0.0, 1.0):
        bundles.publish(Store.open(), bias=bias)
    scores = {version: bundles.score(Store.open().bundle(MODEL, version).path, WIRE) for version in (1, 2)}
    began = _lose(lost, backup, scores)
    monkeypatch.setenv("SERIN_HOME", str(found))
    said = serin("backup", "restore", str(backup))
    assert f"the rollout of {MODEL} is held" in said
    with serving_alone(found) as alone:
        held = _rollout(found)
        assert (held.hold, held.version, held.weight_percent) == ("paused", 2, 0.0)
        assert "restored from a backup" in held.reason
        alone.until("the live version answers", lambda: _answers(alone, 1, scores[1]))
        assert alone.live(MODEL) == 1
        assert "ada" in serin("keys", "list")
        assert _rollout(found).hold == "paused"
        serin("rollout", "resume", MODEL)
        alone.until("it is at its step again", lambda: _rollout(found).weight_percent == 25.0)
        assert _rollout(found).began == began
        alone.until("the candidate answers", lambda: _answers(alone, 2, scores[2]))
        serin("rollout", "promote", MODEL, "--why", "drill")
        alone.until("promoted", lambda: alone.live(MODEL) == 2)
        assert np.allclose(_answer(alone), scores[2], atol=1e-6)
    assert Store.open().aliases(MODEL)["live"] == 2


@contextmanager
def _clients(alone: Alone) -> Iterator[None]:
    """They send requests in the meantime, and every one of them is answered."""
    target = model_target(f"http://127.0.0.1:{alone.port}", MODEL, WIRE, bundles.SCHEMA)
    done = threading.Event()
    with ThreadPoolExecutor(1) as side:
        load = side.submit(run_load, target, Closed(clients=2), seconds=600.0, stop=done.is_set)
        try:
            yield
        finally:
            done.set()
    assert load.result().latencies
    assert not load.result().errors


class _Lost(Exception):
    """The machine is gone."""


def _lose(home: Path, backup: Path, scores: dict[int, Any]) -> float:
    """A stack with an open rollout under load, backed up, killed and deleted; returns when its rollout began."""
    began = 0.0
    with suppress(_Lost), serving_alone(home) as alone:  # which kills everything after an error
        alone.roll_out(MODEL, 1)
        assert np.allclose(_answer(alone), scores[1], atol=1e-6)
        answer = home_rollouts(home).mailbox.ask(
            Command(kind="start", model=MODEL, version=2, by="test", plan=OPEN)
        )
        assert answer.accepted, answer.reason
        alone.until("some traffic", lambda: _rollout(home).weight_percent == 25.0)
        began = _rollout(home).began
        with _clients(alone):
            said = serin("backup", "create", str(backup))
        assert f"{MODEL} version 1 is live; its rollout is open" in said
        raise _Lost
    shutil.rmtree(home)
    return began


def _rollout(home: Path) -> RolloutStatus:
    status = model_status(home, MODEL)
    return status.rollout


def _answer(alone: Alone) -> Any:
    with Client(f"http://127.0.0.1:{alone.port}", MODEL) as model:
        return model.predict(FRAME)["score"]


def _answers(alone: Alone, version: int, wanted: Any) -> bool:
    """Whether a version answers by its number; as it did before."""
    with Client(f"http://127.0.0.1:{alone.port}", MODEL, version=version) as model:
        try:
            found = model.predict(FRAME)["score"]
        except PredictionFailed:  # it is being started
            return False
    assert np.allclose(found, wanted, atol=1e-6)
    return True
