"""Lookups that are refreshed under load, refused, rolled back, and killed on the way, on real parts."""

import json
import os
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from serin.formats.schema import read_schema
from serin.formats.wire import to_wire
from serin.host.wiring import CONTROLLER
from serin.monitoring.capture.read import captured
from serin.rollout.decide.state import Phase
from serin.scoring.predict import Scorer
from serin.serving.client.client import Answers, predict
from serin.store.artifacts import Release
from tests.chaos.stage import MODEL, Clients, Stage, stage
from tests.kit.commands import SERIN, serin_process
from tests.kit.web import ask, slowly
from tests.signals import hit
from tests.unit.export.small_dataset import INPUTS, flights, make_trained, planes, spec_for

VALUES = {
    "carrier": "AA", "distance": 900.0, "tailnum": "N1", "dep": 1_700_000_000_000_000, "stops": 1, "night": 1,
    "num": 0.001,
}  # fmt: skip
DTYPES = {"string": "BYTES", "float": "FP32", "timestamp": "INT64", "int": "INT64", "bool": "INT8"}


def inputs() -> list[dict[str, Any]]:
    return [
        {"name": name, "datatype": DTYPES[kind], "shape": [1, 1], "data": [VALUES[name]]}
        for name, kind in INPUTS.items()
    ]


@dataclass
class Scene:
    stage: Stage
    table: Path
    variables: dict[str, str]

    def write(self, seats: int, rows: int = 20) -> None:
        """The table of planes with other seats of N1, in one step as a careful job does."""
        table = planes().to_pylist()[:rows]
        table[1]["seats"] = seats
        beside = self.table.with_suffix(".part")
        pq.write_table(pa.Table.from_pylist(table, schema=planes().schema), beside)
        beside.rename(self.table)

    def serin(self, *words: str, code: int = 0) -> str:
        done = serin_process(*words, env=self.variables, code=code)
        return done.stdout + done.stderr

    def live(self) -> Release:
        now = self.stage.now()
        assert now is not None
        assert now.live is not None
        return now.live

    def served_score(self) -> float:
        """What the gateway answers for N1."""
        live = self.stage.store.bundle(MODEL, self.live().label)
        schema = read_schema(Path(live.path))
        rows = flights(1).set_column(2, "tailnum", pa.array(["N1"]))
        answer = predict(f"127.0.0.1:{self.stage.port}", MODEL, to_wire(rows, schema), schema, "http", None)
        expected = Scorer(live.path).answers(rows)["score"]
        np.testing.assert_allclose(answer["score"], expected, rtol=0, atol=1e-6)
        return float(answer["score"][0, 0])

    def ask(self, rows: pa.Table) -> Answers:
        """What the gateway answers, with the id of the request."""
        schema = read_schema(Path(self.stage.store.bundle(MODEL, self.live().label).path))
        return predict(f"127.0.0.1:{self.stage.port}", MODEL, to_wire(rows, schema), schema, "http", None)

    def wait_for_record(self, request: str) -> None:
        def recorded() -> bool:
            return request in captured(self.stage.home, MODEL, columns=["_id"]).column("_id").to_pylist()

        self.stage.wait(recorded, f"the record of {request}", 60)


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("lookups")
    data = spec_for("binary").data.model_dump(by_alias=True, mode="json", exclude_none=True)
    data["tables"] = {"flights": str(folder / "flights.parquet"), "planes": str(folder / "planes.parquet")}
    trained = make_trained(
        folder / "trained",
        "binary",
        name=MODEL,  # type: ignore[arg-type]
        data=data,
        rollout={"bake": "2s"},
        objectives={"latency_ms": 5000},
        serving={"request_timeout": "20s"},
        monitoring={"capture": {"share": 1.0}},
    )
    with stage() as made:
        release = trained.export(made.store).release
        made.start(release)
        made.until(release, lambda now: now.phase is Phase.PROMOTED, 180)
        variables = {**os.environ, "SERIN_HOME": str(made.home), "SERIN_STORE": made.store.url}
        found = Scene(stage=made, table=folder / "planes.parquet", variables=variables)
        found.write(seats=10)
        yield found


def ask_slowly(port: int, takes_s: float) -> int:
    """The status of a request whose body takes so long to arrive."""
    body, length = slowly(json.dumps({"inputs": inputs()}).encode(), takes_s)
    return ask(port, f"/v2/models/{MODEL}/infer", body, length, timeout_s=30).status


def test_a_refresh_under_load_fails_no_request_and_goes_back_with_one_command(scene: Scene) -> None:
    before, port = scene.served_score(), scene.stage.port
    with ThreadPoolExecutor() as beside, Clients(port, 100.0, inputs=inputs) as clients:
        slow = [beside.submit(ask_slowly, port, takes_s) for takes_s in (2.0, 6.0, 10.0, 14.0, 18.0)]
        scene.write(seats=190)
        said = scene.serin("lookups", "refresh", MODEL)
        assert f"{MODEL}-v1e2 is live" in said
        assert scene.live().name == f"{MODEL}-v1e2"
        after = scene.served_score()
        assert after != before
        scene.write(seats=190, rows=5)
        refused = scene.serin("lookups", "refresh", MODEL, code=1)
        assert "it has 5 rows, 20 before, and max_row_change is 0.5" in refused
        assert scene.live().name == f"{MODEL}-v1e2"
        assert scene.served_score() == after
        scene.serin("rollout", "rollback", MODEL)
        assert scene.live().name == f"{MODEL}-v1"
        assert scene.served_score() == before
    print(f"{clients.answered} requests, {len(clients.errors)} failed")
    assert clients.errors == []
    assert [each.result() for each in slow] == [200] * len(slow)
    assert clients.answered > 100
    recorded = scene.stage.wait(
        lambda: set(captured(scene.stage.home, MODEL, columns=["_release"]).column("_release").to_pylist()),
        "recorded requests",
        60,
    )
    assert recorded == {f"{MODEL}-v1", f"{MODEL}-v1e2"}
    shown = json.loads(scene.serin("lookups", "show", MODEL, "--json"))
    assert [(each["release"], each["live"], each["rows"]) for each in shown] == [
        (f"{MODEL}-v1", True, 20),
        (f"{MODEL}-v1e2", False, 20),
    ]


def test_recorded_answers_are_explained_by_the_edition_that_gave_them(scene: Scene, tmp_path: Path) -> None:
    rows = flights(3).set_column(2, "tailnum", pa.array(["N1"] * 3))
    before, first = scene.live(), scene.ask(rows)
    scene.write(seats=170)
    scene.serin("lookups", "refresh", MODEL)
    after, second = scene.live(), scene.ask(rows)
    assert after.edition > before.edition
    for release, answers in ((before, first), (after, second)):
        (request,) = set(answers.request_id)
        scene.wait_for_record(request)
        found = json.loads(scene.serin("explain", MODEL, "--id", request, "--json"))
        assert [(row["row"], row["release"], row["difference"]) for row in found] == [
            (number, release.name, "") for number in range(3)
        ]
        for row, score in zip(found, answers["score"].reshape(-1).tolist(), strict=True):
            assert row["recorded"] == pytest.approx(score, abs=1e-7)
            assert row["base"] + sum(row["contributions"].values()) == pytest.approx(row["margin"], abs=1e-5)
    out = tmp_path / "why.parquet"
    scene.serin("explain", MODEL, "--where", "_answer_score > 0 and tailnum = 'N1'", "--out", str(out))
    table = pq.read_table(out)
    assert {before.name, after.name} <= set(table["_release"].to_pylist())
    assert set(table["agrees"].to_pylist()) == {True}
    assert {*first.request_id, *second.request_id} <= set(table["_id"].to_pylist())


@pytest.mark.parametrize("phase", [Phase.LOADING, Phase.VERIFYING, Phase.BAKING, Phase.DRAINING])
def test_a_refresh_survives_kill_9_of_the_command_and_of_the_controller(scene: Scene, phase: Phase) -> None:
    before = scene.live()
    scene.write(seats=200 + len(scene.stage.store.editions(MODEL, 1)))
    with Clients(scene.stage.port, 20.0, count=4, inputs=inputs) as clients:
        asking = subprocess.Popen(
            [*SERIN, "lookups", "refresh", MODEL],
            env=scene.variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            release = scene.stage.wait(lambda: _begun(scene, before), "the edition's rollout", 240)
            scene.stage.until(release, lambda now: _reached(now.phase, phase), 120)
            asking.kill()
            hit(scene.stage.pid(CONTROLLER))
        finally:
            asking.kill()
            asking.wait()
        now = scene.stage.until(release, lambda now: now.phase.final, 240)
        assert now.phase is Phase.PROMOTED, now.reason
        assert scene.live() == release
        scene.served_score()
    assert clients.errors == []
    assert f"{release.name} stays live" in scene.serin("lookups", "refresh", MODEL)


def _begun(scene: Scene, before: Release) -> Release | None:
    now = scene.stage.now()
    return now.candidate if now and now.candidate != before and not now.phase.final else None


def _reached(phase: Phase, wanted: Phase) -> bool:
    order = (Phase.PENDING, Phase.LOADING, Phase.VERIFYING, Phase.BAKING, Phase.DRAINING, Phase.PROMOTED)
    return order.index(phase) >= order.index(wanted)
