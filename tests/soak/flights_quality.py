"""python -m tests.soak.flights_quality: labels of flights that come a day late, shuffled, incomplete and corrected.

Two versions of the flights example answer the newest flights in turn. A fifth of the labels never comes, and one in
twenty is wrong at first. Fails unless the live AUC of each version equals the one computed from its scores and the
final labels. The estimate that was made before the labels is printed beside it.
"""

import os
import runpy
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa

from serin import Pipeline, metrics
from serin.api.model import Model
from serin.monitoring.alerts.book import AlertBook
from serin.monitoring.quality.view import QualityView, read_quality
from serin.watcher.quality_duty import QualityDuty
from tests.kit.recorded_parts import write_part

EXAMPLE = Path(__file__).parents[2] / "examples" / "flights"
ROWS, DAY_S = 20_000, 86_400.0


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="serin-quality-") as folder:
        home = Path(folder) / "home"
        os.environ["SERIN_HOME"] = str(home)
        runpy.run_path(str(EXAMPLE / "fetch.py"))["fetch"](Path(folder) / "data")
        (Path(folder) / "spec.yaml").write_text((EXAMPLE / "spec.yaml").read_text())
        models = [_version(Path(folder) / "spec.yaml", seed) for seed in (1, 2)]
        rows = _newest(Path(folder) / "data")
        scores = _record(home, models, rows)
        duty = QualityDuty(home, AlertBook(home))
        before = _settled(duty, home, models[0].name, lambda view: not view.behind)
        final = _label(models[0], rows)
        after = _settled(
            duty,
            home,
            models[0].name,
            lambda view: not view.behind and sum(each.labelled for each in view.releases) == len(final),
        )
        duty.close()
    return _compare(models, scores, rows, final, before, after)


def _version(spec: Path, seed: int) -> Model:
    pipeline = Pipeline.from_yaml(spec).replace(
        training={"epochs": 1, "seed": seed}, monitoring={"capture": {"share": 1.0}}
    )
    pipeline.build_dataset()
    pipeline.train()
    return pipeline.export(approved_by="tests.soak.flights_quality")


def _newest(data: Path) -> pd.DataFrame:
    flights, weather = (pd.read_parquet(data / f"{name}.parquet") for name in ("flights", "weather"))
    rows = flights.merge(weather, on=["origin", "time_hour"], how="left", suffixes=("", "_weather"))
    rows = rows[rows["arr_delay"].notna()].sort_values("time_hour", kind="stable").tail(ROWS)
    return rows.reset_index(drop=True)


def _record(home: Path, models: list[Model], rows: pd.DataFrame) -> np.ndarray:
    """Writes the rows as requests of the last twenty days, answered by the versions in turn."""
    arrived = time.time() - 20 * DAY_S + np.linspace(0, 19 * DAY_S, len(rows))
    scores = np.empty(len(rows), np.float32)
    for turn, model in enumerate(models):
        own = np.arange(turn, len(rows), len(models))
        scores[own] = model.predict(rows.iloc[own])["score"].to_numpy(np.float32)
        table = pa.table(
            {
                "_id": [f"flight-{place}" for place in own],
                "_row": pa.array(np.zeros(len(own)), pa.int32()),
                "_t": pa.array((arrived[own] * 1e6).astype(np.int64), pa.timestamp("us", "UTC")),
                "_release": [f"{model.name}-v{model.version}"] * len(own),
                "_source": ["live"] * len(own),
                "carrier": rows["carrier"].iloc[own].astype(str).tolist(),
                "_answer_score": pa.array(scores[own], pa.float32()),
            }
        )
        write_part(home, model.name, model.version, table)
    return scores


def _label(model: Model, rows: pd.DataFrame) -> np.ndarray:
    """Returns the places of the rows that have their label in the end, which is right by then."""
    random = np.random.default_rng(1)
    known = random.permutation(len(rows))[: int(0.8 * len(rows))]
    wrong = known[: len(rows) // 20]
    delay = rows["arr_delay"].to_numpy(np.float64).copy()
    delay[wrong] = 60.0 - delay[wrong]
    for places, minutes in ((known, delay), (wrong, rows["arr_delay"].to_numpy(np.float64))):
        ids = [f"flight-{place}" for place in places]
        model.add_labels(pd.DataFrame({"_id": ids, "arr_delay": minutes[places]}))
    return np.sort(known)


def _settled(duty: QualityDuty, home: Path, model: str, done: object) -> QualityView:
    end = time.monotonic() + 300
    while time.monotonic() < end:
        duty.tick(time.time())
        view = read_quality(home, model)
        if view is not None and done(view):  # type: ignore[operator]
            return view
        time.sleep(0.2)
    raise SystemExit("the labels were not joined within five minutes")


def _compare(
    models: list[Model],
    scores: np.ndarray,
    rows: pd.DataFrame,
    final: np.ndarray,
    before: QualityView,
    after: QualityView,
) -> int:
    late = (rows["arr_delay"] > 15).to_numpy()
    equal = True
    for turn, model in enumerate(models):
        own = final[final % len(models) == turn]
        offline = metrics.auc(late[own], scores[own])
        first, release = (
            next(each for each in view.releases if each.version == model.version) for view in (before, after)
        )
        live, expected = release.metrics["auc"], release.estimate["auc"]
        equal &= live.value == offline
        print(
            f"version {model.version}: live AUC {live.value:.6f} ({live.low:.4f} to {live.high:.4f}) of "
            f"{len(own)} labels, computed offline {offline:.6f}, "
            f"estimate before labels {first.estimate['auc'].value:.4f}, its error {expected.error:+.4f}"
        )
    print("equal" if equal else "NOT EQUAL")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
