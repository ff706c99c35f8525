"""A home as a stack leaves it: published versions, a rollout in the middle, an alert, a training."""

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from serin.formats.drift import BinnedColumn, DriftStatistics
from serin.formats.reason import Reason
from serin.host.wiring import request_log
from serin.monitoring.alerts.alert import Alert
from serin.monitoring.alerts.book import AlertBook
from serin.monitoring.history.store import History
from serin.monitoring.quality.labels import Columns, TruthOf, add_labels
from serin.monitoring.retrain import RetrainBook
from serin.rollout.decide.plan import Plan, ShadowPlan
from serin.rollout.decide.state import Phase, Rollout
from serin.spec.load import load_spec
from serin.spec.monitoring import MonitoringSpec
from serin.store.artifacts import Bundle
from serin.store.store import Store
from serin.watcher.drift_duty import DriftDuty
from serin.watcher.quality_duty import QualityDuty
from tests.fakes.drift import category_column, series_of, statistics_of
from tests.fakes.live_quality import publish, serve
from tests.fakes.one_gateway import LogJudge
from tests.fakes.rollout import FakeClock, FakeVersions
from tests.fakes.traffic import Traffic
from tests.unit.rollout.conftest import Scene
from tests.unit.serving.bundles import MODEL, SCHEMA

PLAN = Plan(
    steps=(20.0, 50.0, 100.0), step_s=5.0, min_requests=30, bake_s=3.0, drain_s=2.0, slo_ms=50.0,
    shadow=ShadowPlan(rows=200, time_s=0.0),
)  # fmt: skip
ROWS = 4000
SECONDS = 27  # as long as the rollout takes to get there


def furnish(home: Path) -> Scene:
    """Leaves version 1 of MODEL live and version 2 in its rollout, with requests in the log up to now."""
    store = Store(str(home / "store"))
    monitoring = "{capture: {share: 1}, drift: {tolerance: 0.05}, quality: {margin: 0.05}}"
    files = {"drift.json": json.dumps(_statistics().to_json()).encode()}
    bundles = [publish(store, bias, monitoring, files=files) for bias in (0.0, 0.1)]
    store.set_alias(MODEL, "live", 1)
    scene = Scene(home, clock=FakeClock(t=time.time() - SECONDS), versions=FakeVersions({MODEL: [1, 2]}))
    scene.promote_first(model=MODEL)
    log = request_log(home)
    log.parent.mkdir(parents=True, exist_ok=True)
    scene.kill()
    scene.judge = LogJudge(log)  # type: ignore[assignment]
    scene.command("start", 2, model=MODEL, plan=PLAN, by="ann")
    for second in range(100):
        scene.tick()
        (now,) = scene.controller.rollouts()
        if now.step == 1 and scene.clock.t - now.since > 3 and now.evidence.get("guards"):
            break
        if now.phase is Phase.SHIFTING:
            _traffic(log, now, scene.clock.t, second)
    _watch(home, log, bundles[0])
    fire(home)
    _retrain(home)
    _training(home)
    return scene


def _statistics() -> DriftStatistics:
    """Training rows with other carriers and the same temperatures as the live ones."""
    temp = BinnedColumn(
        name="temp", field="temp", source="request", kind="number", edges=(-4.0, -1.0, 0.0, 1.0, 4.0)
    )
    return statistics_of(
        [category_column("carrier", ("AA", "UA", "DL")), temp],
        [
            series_of(0, (0.5, 0.3, 0.2, 0.0, 0.0, 0.0), tolerance=0.05, weight=0.5),
            series_of(1, (0.16, 0.34, 0.34, 0.16, 0.0, 0.0, 0.0), tolerance=0.1, weight=0.5),
        ],
    )


def _watch(home: Path, log: Path, bundle: Bundle) -> None:
    """Requests of the last hours, their labels, and what the watcher's duties make of them."""
    served = serve(home, bundle, ROWS, seed=1, began=time.time() - 6 * 3600, every_s=0.2)
    data = load_spec(Path(bundle.path) / "spec.yaml").data
    truth = TruthOf(model=MODEL, data=data, schema=SCHEMA)
    add_labels(home, truth, served.labels(slice(0, ROWS * 4 // 5)), Columns(), time.time() - 60)
    DriftDuty(home, AlertBook(home)).tick(time.time())
    QualityDuty(home, AlertBook(home), clock=lambda: 0.0).tick(time.time())
    history = History(home)
    history.read_log(log, lambda *_: 5.0)
    history.close()


def fire(home: Path) -> None:
    AlertBook(home).fire(
        Alert(
            key=f"{MODEL}/capture/disk",
            kind="capture",
            model=MODEL,
            release=f"{MODEL}-v1",
            severity="ticket",
            title="the disk is nearly full",
            text="3% is left since yesterday <b>",
            since=time.time() - 7200,
        ),
        time.time() - 600,
    )


def _retrain(home: Path) -> None:
    """One retraining that was begun because of drift, and one that was refused for that reason."""
    book, spec, now = RetrainBook(home, MODEL), MonitoringSpec(), time.time()
    for run, t in (("r1", now - 3600), ("r2", now)):
        reason = Reason(kind="drift", text="carrier drifted <fast>", noticed=t)
        book.request(reason, spec, live=f"{MODEL}-v1", run=run, now=t)
    book.end("r1", "promoted", f"{MODEL}-v2", now - 1800)


def _traffic(log: Path, now: Rollout, t: float, seed: int) -> None:
    made = replace(Traffic(), epoch=now.epoch, share=now.weight_percent / 100)
    with log.open("a") as file:
        for request in made.requests(t - 0.5, 0.5, seed=seed):
            release = f"{MODEL}-v{request.release.rpartition('-v')[2]}"
            line: dict[str, Any] = request._asdict() | {
                "t": f"{request.t:.6f}",
                "model": MODEL,
                "release": release,
            }
            file.write(json.dumps(line) + "\n")


def _training(home: Path) -> None:
    folder = home / "runs" / "training-1"
    (folder / "result").mkdir(parents=True)
    (folder / "training.json").write_text("{}")
    (folder / "result" / "metrics.json").write_text(json.dumps({"metrics": {"auc": 0.75}}))
    receipt = {
        "format": "serin.store.receipt", "version": 1, "stage": "train", "started": time.time() - 100, "seconds": 12.5,
        "device": [
            {"id": "cpu", "name": "CPU", "booked_s": 12.5, "busy_share": 0.9, "peak_bytes": 9, "joules": None}
        ],
        "rows": 1000, "rows_per_s": 80.0, "data_wait_share": 0.1, "mfu": None, "joules": None, "cost": None,
        "bound": "compute", "advice": "", "waits": [{"what": "start of the training process", "seconds": 3.1}],
    }  # fmt: skip
    (folder / "receipt.json").write_text(json.dumps(receipt))
    (home / "runs" / "search-1").mkdir()
