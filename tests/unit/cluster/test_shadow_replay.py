"""The replay of recorded requests, with the bundle's graph really computed; a real Triton is asked in tests/e2e."""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from serin.cluster.desired import DesiredStates
from serin.cluster.hosts import Hosts
from serin.cluster.shadow import replay as replaying
from serin.cluster.shadow.compare import Ask, Columns, Comparison
from serin.cluster.shadow.process import Job
from serin.cluster.shadow.records import Place, draw
from serin.cluster.shadow.replay import Pace, replay, wire_columns
from serin.cluster.shadow.replayer import Replayer
from serin.errors import PredictionFailed, RolloutRefused, RowsUnfit
from serin.formats.cluster.desired_state import ReplayJob
from serin.formats.wire import Array
from serin.rollout.decide.plan import Plan, ShadowPlan
from serin.rollout.decide.shadow import Batch, Tally, add_batch, judge_shadow
from serin.rollout.decide.state import Rollout, Verdict
from serin.rollout.run.leadership import HomeLock
from serin.serving.external import External
from serin.store.artifacts import Endpoint, Release
from serin.store.home_objects import HomeObjects
from serin.store.store import Store
from tests.fakes.records import record, recorded_rows
from tests.kit.elsewhere import register
from tests.unit.serving import bundles

LIVE = Release(model=bundles.MODEL, version=1)
SPEC = "export: {segments: [carrier]}\nmonitoring: {capture: {share: 1.0}}\n"
PLAN = Plan(shadow=ShadowPlan(rows=400, time_s=0.0), slo_ms=1000.0)
HOUR = 3600.0


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    made = Store(str(tmp_path_factory.mktemp("shadow") / "store"))
    bundles.publish(made, bias=0.0, spec=SPEC)
    return made


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, store: Store) -> Path:
    """Requests of the live version after a drift, over five hours, some with several rows."""
    folder = tmp_path_factory.mktemp("home")
    for hour in range(5):
        columns = recorded_rows(120, seed=hour)
        scores = bundles.score(store.bundle(LIVE.model, 1).path, columns)
        sizes, t = [1] * 60 + [3] * 20, time.time() - hour * HOUR
        record(folder, LIVE, columns, scores, sizes=sizes, t=t, name=f"h{hour}-")
    return folder


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replaying, "LEAST_PER_S", 1e6)
    monkeypatch.setattr(replaying, "_MOST_PER_S", 1e6)


def job(home: Path, place: Mapping[str, Any] | None = None) -> Job:
    replay = ReplayJob(
        run="-", live=LIVE.name, candidate="-", address=None, timeout_s=5.0, max_batch_rows=64, share=1.0, rows=400,
        places={},
    )  # fmt: skip
    return Job(replay=replay, home=str(home), parent=0, address="-", place=place or {})


def replayed(home: Path, against: Comparison, ask: Ask, rows: int = 400) -> Tally:
    """What a controller would know after so many rows, or at the first mismatch."""
    tally = Tally()
    for report in replay(job(home), against, ask):
        tally = add_batch(tally, Batch.from_json(report), PLAN)
        if tally.rows >= rows or tally.mismatch:
            return tally
    raise AssertionError("it sends as long as it is asked")


def published(store: Store, bias: float) -> Comparison:
    return Comparison.of(Path(bundles.publish(store, bias=bias, spec=SPEC).path))


def serving(against: Comparison, change: Callable[[Columns, Array], Array] = lambda _, scores: scores) -> Ask:
    assert against.compute is not None
    compute = against.compute
    return lambda columns: {"score": change(columns, compute(columns)["score"])}


def test_honest_retrains_after_a_drift_pass_twenty_of_twenty(home: Path, store: Store) -> None:
    passed = 0
    for bias in np.linspace(-1.0, 1.0, 20):
        against = published(store, float(bias))
        tally = replayed(home, against, serving(against))
        verdict, reason = judge_shadow(PLAN, tally, elapsed_s=1.0)
        assert verdict is Verdict.PASS, reason
        assert tally.compared == tally.rows >= 400
        passed += 1
    assert passed == 20


def halved(columns: Columns, scores: Array) -> Array:
    """As of a model whose lookup of one carrier is broken."""
    return np.where(columns["carrier"] == "AA", scores / 2, scores)


def nulls_otherwise(columns: Columns, scores: Array) -> Array:
    return np.where(np.isnan(columns["temp"]), scores + np.float32(1e-3), scores)


@pytest.mark.parametrize(
    ("tampered", "segment"), [(halved, ("carrier=AA",)), (nulls_otherwise, None)], ids=["halved", "nulls"]
)
def test_a_candidate_that_serves_other_scores_than_its_bundle_computes_is_refused(
    home: Path, store: Store, tampered: Callable[[Columns, Array], Array], segment: tuple[str, ...] | None
) -> None:
    against = published(store, 0.3)
    tally = replayed(home, against, serving(against, tampered))
    found = tally.mismatch
    assert found is not None
    verdict, reason = judge_shadow(PLAN, tally, elapsed_s=0.0)
    assert verdict is Verdict.FAIL
    assert found.served in reason
    assert found.computed in reason
    assert segment is None or found.segments == segment
    if segment is None:
        assert found.values["temp"] == "nan"


def test_a_score_that_is_wrong_once_is_asked_again_and_counted(home: Path, store: Store) -> None:
    against, calls = published(store, 0.3), [0]

    def flaky(_: Columns, scores: Array) -> Array:
        calls[0] += 1
        return scores / 2 if calls[0] == 7 else scores

    tally = replayed(home, against, serving(against, flaky))
    assert tally.mismatch is None
    assert tally.unsteady in (1, 3)  # the rows of one request
    assert "only when they were asked again" in judge_shadow(PLAN, tally, elapsed_s=1.0)[1]


def test_differences_from_the_live_version_are_those_of_the_scores_by_segment(
    home: Path, store: Store
) -> None:
    against = published(store, 0.3)
    tally = replayed(home, against, serving(against), rows=600)
    sample = draw(home, LIVE, Place(), rows=10_000)
    assert sample is not None
    assert against.compute is not None
    columns = wire_columns(sample, against.schema)
    ours, live = against.compute(columns)["score"][:, 0], sample.table.column("_answer_score").to_numpy()
    for segment, rows in (
        ("all rows", np.ones(600, bool)),
        ("carrier=AA", (columns["carrier"] == "AA")[:, 0]),
    ):
        found = tally.segments[segment]
        assert found.rows == rows.sum()
        assert found.mean == pytest.approx(float(np.mean(ours[rows] - live[rows])), rel=1e-5)
        assert found.mean_absolute == pytest.approx(float(np.mean(np.abs(ours[rows] - live[rows]))), rel=1e-5)
        assert found.mean_live == pytest.approx(float(np.mean(live[rows])), rel=1e-5)
    assert "carrier is null" in tally.segments
    limited = replace(PLAN, shadow=ShadowPlan(rows=400, time_s=0.0, max_difference=found.relative / 2))
    assert judge_shadow(limited, tally, elapsed_s=1.0)[0] is Verdict.FAIL


def test_requests_that_fail_are_counted_and_not_compared(
    home: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replaying, "_BLOCK_S", 0.0)  # each is a block of the bets
    against, calls = published(store, 0.3), [0]

    def failing(columns: Columns, scores: Array) -> Array:
        calls[0] += 1
        if calls[0] % 2:
            raise PredictionFailed(model="delays", status="500", reason="out of memory")
        return scores

    tally = replayed(home, against, serving(against, failing), rows=200)
    assert tally.counts.errors == pytest.approx(tally.counts.requests / 2, abs=1)
    assert "out of memory" in tally.failure
    verdict, reason = judge_shadow(PLAN, tally, elapsed_s=0.0)
    assert verdict is Verdict.FAIL
    assert "more than 0.6% of its requests fail" in reason


def test_a_replay_continues_where_it_was_and_sends_nothing_twice(
    home: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    against = published(store, 0.3)
    monkeypatch.setattr(replaying, "_BLOCK_S", 0.0)  # one request in each

    def requests(place: dict[str, Any], most: int | None = None) -> tuple[list[float], dict[str, Any]]:
        seen: list[float] = []

        def ask(columns: Columns) -> dict[str, Array]:
            seen.append(float(columns["temp"].sum()))
            assert against.compute is not None
            return against.compute(columns)

        reports = islice(_batches(replay(job(home, place=place), against, ask)), most)
        for report in reports:
            place = report["place"]
        return seen, place

    whole, _ = requests({})
    first, place = requests({}, most=70)
    rest, _ = requests(place)
    assert (len(first), len(whole)) == (70, 400)
    assert first + rest == pytest.approx(whole, nan_ok=True)


def _batches(reports: Iterator[Any]) -> Iterator[Any]:
    """Until there is nothing left to send."""
    for report in reports:
        if "waiting" in report:
            return
        yield report


def test_half_of_a_sample_is_of_the_newest_hour_and_the_rest_of_the_others(home: Path) -> None:
    sample = draw(home, LIVE, Place(), rows=100)
    hours = [request.split("-")[0] for request in sample.table.column("_id").to_pylist()]
    counts = {hour: hours.count(hour) for hour in sorted(set(hours))}
    assert counts["h0"] == pytest.approx(50, abs=3)
    assert [counts[f"h{hour}"] for hour in (1, 2, 3, 4)] == pytest.approx([12.5] * 4, abs=3)


def test_only_complete_requests_that_clients_sent_to_the_live_version_are_drawn(
    tmp_path: Path, store: Store
) -> None:
    columns = recorded_rows(4)
    scores = bundles.score(store.bundle(LIVE.model, 1).path, columns)
    other = replace(LIVE, version=2)
    record(tmp_path, LIVE, columns, scores, sizes=[3, 1], name="good")
    record(tmp_path, LIVE, columns, scores, name="bulk", source="bulk")
    record(tmp_path, LIVE, columns, scores, name="shadow", source="shadow")
    record(tmp_path, other, columns, scores, name="other")
    record(tmp_path, LIVE, columns, scores, name="old", t=time.time() - 30 * 24 * HOUR)
    sample = draw(tmp_path, LIVE, Place(), rows=100)
    assert {str(found) for found in sample.table.column("_id").to_pylist()} == {"good0", "good1"}
    assert sorted(np.diff(sample.starts).tolist()) == [1, 3]
    rows = sample.table.column("_row").to_pylist()
    assert [row for row in rows if row] == [1, 2], "in their order"


def test_new_records_are_drawn_when_the_old_ones_are_used_up(tmp_path: Path, store: Store) -> None:
    assert draw(tmp_path, LIVE, Place(), rows=100) is None
    columns = recorded_rows(4)
    scores = bundles.score(store.bundle(LIVE.model, 1).path, columns)
    record(tmp_path, LIVE, columns, scores, name="a")
    sample = draw(tmp_path, LIVE, Place(), rows=100)
    done = sample.after(len(sample))
    assert draw(tmp_path, LIVE, done, rows=100) is None
    record(tmp_path, LIVE, columns, scores, name="b")
    sample = draw(tmp_path, LIVE, done, rows=100)
    assert {name[0] for name in sample.table.column("_id").to_pylist()} == {"b"}


@pytest.mark.parametrize(
    ("requests", "share", "per_s"), [(2000, 0.2, 80.0), (50, 0.2, 20.0), (2000, 1.0, 300.0)]
)
def test_requests_are_sent_at_a_share_of_the_live_version_s_pace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, requests: int, share: float, per_s: float
) -> None:
    monkeypatch.setattr(replaying, "LEAST_PER_S", 20.0)
    monkeypatch.setattr(replaying, "_MOST_PER_S", 300.0)
    log, now = tmp_path / "requests.jsonl", time.time()
    monkeypatch.setattr(time, "time", lambda: now)  # however long the log takes to write
    fields = {
        "model": LIVE.model,
        "epoch": 1,
        "arm": "stable",
        "code": 200,
        "grpc": None,
        "us": 900.0,
        "ms": 1.0,
        "received_ms": 0.1,
    }
    fields |= {"attempts": 1, "flags": "-", "id": "a"}
    with log.open("w") as file:
        for number in range(requests):
            for release in (LIVE.name, "others-v1"):
                line = {"t": f"{now - 4.5 + 4.5 * number / requests:.6f}", **fields, "release": release}
                file.write(json.dumps(line) + "\n")
    assert Pace(log, LIVE, share).per_s() == pytest.approx(per_s, rel=0.01)


def test_a_column_that_is_not_recorded_is_named(home: Path, store: Store) -> None:
    sample = draw(home, LIVE, Place(), rows=10)
    assert sample is not None
    without = replace(sample, table=sample.table.drop_columns(["temp"]))
    with pytest.raises(RowsUnfit, match="temp"):
        wire_columns(without, published(store, 0.1).schema)


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("objectives: {latency_ms: 50}\n", r"monitoring\.capture\.share is 0"),
        (
            "monitoring: {capture: {share: 1, mask: [temp]}}\n",
            r"they lack temp \(monitoring\.capture\.mask\)",
        ),
    ],
)
def test_a_live_version_whose_requests_cannot_be_sent_again_is_refused_with_what_to_do(
    tmp_path: Path, spec: str, reason: str
) -> None:
    store = Store(str(tmp_path / "store"))
    for _ in range(2):
        bundles.publish(store, bias=0.0, spec=spec)
    rollout = Rollout(
        id="r", candidate=replace(LIVE, version=2), stable=LIVE, previous=None, plan=PLAN, began=0, since=0,
        evidence_from=0,
    )  # fmt: skip
    objects, lock = HomeObjects(tmp_path), HomeLock(tmp_path)
    desired, hosts = DesiredStates(objects, lock, lock.term, time.time), Hosts(objects, time.monotonic)
    replayer = Replayer(objects, desired, hosts, store, External(store), lambda _: None)
    with pytest.raises(RolloutRefused, match=rf"live version 1.*{reason}.*leave shadow out for this rollout"):
        replayer.check(rollout)
    elsewhere = register(store, "other", Endpoint(http="127.0.0.1:1", grpc="127.0.0.1:1", elsewhere=True))
    rollout = replace(rollout, candidate=replace(elsewhere, version=2), stable=elsewhere)
    with pytest.raises(RolloutRefused, match="a server elsewhere has no bundle"):
        replayer.check(rollout)
