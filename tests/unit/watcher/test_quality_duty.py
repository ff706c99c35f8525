"""The quality duty: late, shuffled, incomplete and corrected labels give the numbers of an offline computation."""

import json
import re
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from typer.testing import CliRunner

from serin import metrics
from serin.cli import app
from serin.columns.scored import measured
from serin.formats.serving.quality_evidence import read_quality_blocks
from serin.monitoring.alerts.book import AlertBook, read_alerts
from serin.monitoring.quality.labels import Columns, TruthOf, add_labels
from serin.monitoring.quality.measure import FEWEST_ROWS
from serin.monitoring.quality.store import quality_folder
from serin.monitoring.quality.view import QualityView, read_quality
from serin.rollout.decide.state import Phase
from serin.rollout.run.access import home_rollouts
from serin.rollout.run.commands import Command
from serin.rollout.run.record import decision2rollout
from serin.spec.load import load_spec
from serin.store.artifacts import Bundle
from serin.store.home_objects import HomeObjects
from serin.store.store import Store
from serin.watcher.captures import forget_rows
from serin.watcher.quality_duty import QualityDuty
from tests.fakes.live_quality import BEGAN, DAY_S, Served, publish, serve
from tests.fakes.rollout import home_inbox
from tests.fakes.running_controller import running_controller
from tests.kit.waiting import until
from tests.unit.serving import bundles

ROWS = 1600


def add(home: Path, bundle: Bundle, labels: pa.Table, now: float) -> None:
    data = load_spec(Path(bundle.path) / "spec.yaml").data
    add_labels(home, TruthOf(model=bundles.MODEL, data=data, schema=bundles.SCHEMA), labels, Columns(), now)


def follow(home: Path, now: float) -> QualityView:
    """What a new process makes of all that is there."""
    QualityDuty(home, AlertBook(home), clock=lambda: 0.0).tick(now)  # a tick that never gets late
    view = read_quality(home, bundles.MODEL)
    assert not view.behind
    return view


def send_labels(home: Path, served: Served, bundle: Bundle, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """A day late (those of version 2 two days), shuffled, in three batches, a fifth missing; then 5% of them corrected.
    Returns the rows with a label and their final truth."""
    random = np.random.default_rng(seed)
    order = random.permutation(len(served.ids))
    known = order[: int(0.8 * len(order))]
    truth = served.late.copy()
    wrong = random.permutation(known)[: int(0.05 * len(known))]
    first = served.delay.copy()
    first[wrong] = np.where(served.delay[wrong] > 15, 0.0, 99.0)  # what was believed first
    given = Served(version=served.version, ids=served.ids, t=served.t, scores=served.scores, delay=first)
    came = BEGAN + DAY_S * bundle.version
    for number, batch in enumerate(np.array_split(known, 3)):
        add(home, bundle, given.labels(batch), came + 600 * number)
        follow(home, came + 600 * number + 30)  # a new process each time
    add(home, bundle, served.labels(wrong), came + DAY_S / 2)
    return np.sort(known), truth[np.sort(known)]


Two = list[tuple[Bundle, Served]]


@pytest.fixture
def two(home: Path) -> Two:
    """Two releases that have answered requests side by side."""
    made = [publish(Store.open(), bias) for bias in (0.0, 1.5)]
    return [(bundle, serve(home, bundle, ROWS, seed=bundle.version)) for bundle in made]


def test_live_metrics_of_each_release_equal_the_offline_computation_on_the_same_rows(
    home: Path, two: Two
) -> None:
    expected = [(served, *send_labels(home, served, bundle, 5)) for bundle, served in two]
    view = follow(home, BEGAN + 3 * DAY_S)
    for release, (served, rows, truth) in zip(view.releases, expected, strict=True):
        assert (release.recorded, release.labelled) == (ROWS, len(rows))
        assert release.coverage == pytest.approx(0.8)
        assert release.metrics["auc"].value == metrics.auc(truth, served.scores[rows])
        for name, offline in measured("binary", truth, served.scores[rows]).items():
            assert asdict(release.metrics[name]) == pytest.approx(asdict(offline))  # sums in another order
        assert release.delay_s is not None
        days = release.version + np.array([-0.3, 0.4])
        assert days[0] * DAY_S < release.delay_s[0] < release.delay_s[1] < days[1] * DAY_S
        assert release.offline["auc"].low < release.offline["auc"].value < release.offline["auc"].high
    assert (view.received, view.unknown, view.ambiguous) == (2 * int(0.8 * ROWS * 1.05), 0, 0)


def test_the_estimate_is_there_before_labels_and_its_error_is_known_with_them(home: Path, two: Two) -> None:
    before = follow(home, BEGAN + DAY_S / 2)
    good = before.releases[0]
    assert not good.metrics
    assert {each.error for each in good.estimate.values()} == {None}
    expected = [(served, *send_labels(home, served, bundle, 6)) for bundle, served in two]
    after = follow(home, BEGAN + 3 * DAY_S)
    for first, release, (served, rows, truth) in zip(before.releases, after.releases, expected, strict=True):
        assert set(release.estimate) == {"auc", "logloss", "brier", "accuracy"}
        for name, estimate in release.estimate.items():
            assert estimate.value == first.estimate[name].value  # the same scores
            assert estimate.error == pytest.approx((estimate.labelled or 0) - release.metrics[name].value)
            assert abs(estimate.error or 1) < 0.03, (release.version, name, estimate)
        assert metrics.auc(truth, served.scores[rows]) == pytest.approx(
            release.estimate["auc"].value, abs=0.03
        )
    brier = after.releases[1].metrics["brier"].value  # scores that are too high by 1.5 in log-odds
    raw = np.mean(two[1][1].scores * (1 - two[1][1].scores))
    assert abs(raw - brier) > 3 * abs(
        after.releases[1].estimate["brier"].error or 0
    )  # calibration is what helps


def test_segments_are_those_of_the_spec_with_metrics_of_their_own_rows(home: Path, two: Two) -> None:
    bundle, served = two[0]
    add(home, bundle, served.labels(slice(None)), BEGAN + DAY_S)
    release = follow(home, BEGAN + DAY_S + 60).releases[0]
    carriers = bundles.rows(ROWS, seed=bundle.version)["carrier"][:, 0]
    found = {segment.name: segment for segment in release.segments}
    assert set(found) == {
        "carrier=AA",
        "carrier=UA",
        "carrier=DL",
        "carrier is null",
        "carrier=unseen",
        "carrier=Zürich 雪",
    }
    inside = carriers == "UA"
    assert found["carrier=UA"].metrics["auc"].value == metrics.auc(served.late[inside], served.scores[inside])
    assert found["carrier=UA"].rows == np.count_nonzero(inside)


def test_editions_of_a_version_are_measured_together_and_each_by_itself(home: Path) -> None:
    bundle = publish(Store.open(), 0.0)
    first = serve(home, bundle, ROWS, seed=1)
    second = serve(home, bundle, ROWS, seed=2, began=BEGAN + 20_000, worse=0.9, edition=2)
    for served in (first, second):
        add(home, bundle, served.labels(slice(None)), BEGAN + DAY_S)
    (release,) = follow(home, BEGAN + DAY_S + 60).releases
    assert (release.recorded, release.labelled) == (2 * ROWS, 2 * ROWS)
    found = {segment.name: segment for segment in release.segments}
    for served, name in ((first, f"{bundles.MODEL}-v1"), (second, f"{bundles.MODEL}-v1e2")):
        own = found[f"_release={name}"]
        assert own.rows == ROWS
        assert own.metrics["auc"].value == metrics.auc(served.late, served.scores)


def test_a_lost_state_is_rebuilt_from_records_and_labels(home: Path, two: Two) -> None:
    for bundle, served in two:
        send_labels(home, served, bundle, 7)
    before = follow(home, BEGAN + 3 * DAY_S)
    folder = quality_folder(home, bundles.MODEL)
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    after = follow(home, BEGAN + 3 * DAY_S)
    assert after.releases == before.releases


def test_quality_and_labels_are_shown_to_people_and_programs(home: Path, two: Two) -> None:
    bundle, served = two[0]
    add(
        home,
        bundle,
        pa.concat_tables([served.labels(slice(500)), pa.table({"_id": ["x"], "arr_delay": [1.0]})]),
        BEGAN + DAY_S,
    )
    view = follow(home, BEGAN + DAY_S + 60)
    run = CliRunner().invoke
    shown = run(app, ["quality", bundles.MODEL]).output
    assert "say little yet" not in shown
    assert "delays-v1: 500 of 1,600 recorded rows have a label (31.2%)" in shown
    assert f"auc          {view.releases[0].metrics['auc'].value:.4f} (" in shown
    assert json.loads(run(app, ["quality", bundles.MODEL, "--json"]).output)["releases"][0]["labelled"] == 500
    told = run(app, ["labels", "show", bundles.MODEL]).output
    assert "501 labels received" in told
    assert "1 is about no recorded row so far" in told
    listed = json.loads(run(app, ["labels", "show", bundles.MODEL, "--json"]).output)
    assert (listed["unknown"], listed["releases"][1]["labelled"]) == (1, 0)


@pytest.mark.parametrize("restarted", [False, True])
def test_the_next_look_after_rows_were_forgotten_counts_what_is_left(
    home: Path, two: Two, restarted: bool
) -> None:
    bundle, served = two[0]
    add(home, bundle, served.labels(slice(500)), BEGAN + DAY_S)
    duty = QualityDuty(home, AlertBook(home), clock=lambda: 0.0)
    duty.tick(BEGAN + DAY_S + 60)
    before = read_quality(home, bundles.MODEL)
    assert before is not None
    where = f"_id in ({', '.join(repr(str(each)) for each in served.ids[400:600])})"
    forgotten = forget_rows(home, bundles.MODEL, where, remove=True)
    assert (forgotten.rows, forgotten.labels) == (200, 100)
    if restarted:
        duty = QualityDuty(home, AlertBook(home), clock=lambda: 0.0)
    duty.tick(BEGAN + DAY_S + 65)
    after = read_quality(home, bundles.MODEL)
    assert [(each.recorded, each.labelled) for each in after.releases] == [(ROWS - 200, 400), (ROWS, 0)]
    assert (after.received, after.behind) == (before.received, False)
    assert sum(day.recorded for day in after.releases[0].days) == ROWS - 200


def test_a_tick_does_a_bounded_amount_of_work(home: Path, two: Two) -> None:
    for number, (bundle, served) in enumerate(two * 3):
        add(home, bundle, served.labels(slice(100 * number, 100 * number + 100)), BEGAN + DAY_S + number)
    clock = iter(range(10_000))
    # a second passes with every look at the clock
    duty = QualityDuty(home, AlertBook(home), clock=lambda: float(next(clock)))
    duty.tick(BEGAN + DAY_S + 60)
    view = read_quality(home, bundles.MODEL)
    assert view.behind
    for _ in range(300):
        duty.tick(BEGAN + DAY_S + 120)
        done = read_quality(home, bundles.MODEL)
        if done and sum(release.labelled for release in done.releases) == 600:
            return
    raise AssertionError(f"the labels were never taken in: {done}")


STRICT = "{capture: {share: 1}, quality: {margin: 0.02, rollback: true}}"
LENIENT = "{capture: {share: 1}, quality: {margin: 0.02}}"


def live(home: Path, monitoring: str, *, worse: float, labelled: int = ROWS) -> tuple[Bundle, Served]:
    """Version 2 is live after version 1; the truth of a share of its rows has nothing to do with its answers."""
    store = Store.open()
    first, second = (publish(store, 0.0, monitoring) for _ in range(2))
    store.set_alias(bundles.MODEL, "previous", first.version)
    store.set_alias(bundles.MODEL, "live", second.version)
    served = serve(home, second, ROWS, seed=2, worse=worse)
    add(home, second, served.labels(slice(labelled)), BEGAN + DAY_S)
    return second, served


def inbox(home: Path) -> list[Command]:
    return home_inbox(home).pending()


def test_a_live_version_within_its_objective_raises_no_alert(home: Path) -> None:
    live(home, STRICT, worse=0.0)
    view = follow(home, BEGAN + 3 * DAY_S)
    objective = view.releases[0].objective
    assert (objective.alarm, objective.used) == (False, ROWS)
    assert objective.mean == pytest.approx(objective.offline, abs=0.02)
    assert objective.block == "minute"
    assert read_alerts(home).open == ()
    assert inbox(home) == []


def test_a_live_version_that_is_worse_is_an_alert_with_its_numbers(home: Path) -> None:
    live(home, LENIENT, worse=1.0)
    view = follow(home, BEGAN + 3 * DAY_S)
    (record,) = read_alerts(home).open
    assert (record.alert.kind, record.alert.release, record.alert.severity) == (
        "quality",
        "delays-v2",
        "page",
    )
    assert re.fullmatch(
        r"the mean brier of delays-v2 is 0\.\d+ since 2026-03-01 12:0\d UTC, at most 0\.\d+ is allowed "
        r"\(0\.\d+ on the test rows\); 1,600 labels were used",
        record.alert.text,
    )
    assert record.alert.facts["limit"] == view.releases[0].objective.limit  # type: ignore[union-attr]
    assert inbox(home) == []  # the spec does not ask for a rollback
    shown = CliRunner().invoke(app, ["quality", bundles.MODEL]).output
    assert "worse than allowed" in shown


def test_figures_of_few_labels_are_shown_with_a_warning(home: Path, two: Two) -> None:
    bundle, served = two[0]
    add(home, bundle, served.labels(slice(50)), BEGAN + DAY_S)
    follow(home, BEGAN + DAY_S + 60)
    shown = CliRunner().invoke(app, ["quality", bundles.MODEL]).output
    assert "50 labelled rows: live values and errors of estimates say little yet" in shown


def test_few_bad_labels_are_no_alert_yet(home: Path) -> None:
    live(home, LENIENT, worse=1.0, labelled=40)
    follow(home, BEGAN + 3 * DAY_S)
    assert read_alerts(home).open == ()


def _promote_both(home: Path) -> None:
    for version in (1, 2):
        order = Command(kind="start", model=bundles.MODEL, version=version, by="ada")
        assert home_rollouts(home).mailbox.ask(order).accepted
        _until(home, Phase.PROMOTED, version)


def test_a_worse_version_is_rolled_back_by_the_watcher_where_the_spec_asks_for_it(home: Path) -> None:
    live(home, STRICT, worse=1.0)
    with running_controller(home, bundles.MODEL):
        _promote_both(home)
        follow(home, BEGAN + 3 * DAY_S)
        follow(home, BEGAN + 3 * DAY_S + 5)  # the alarm is still there, and nothing is asked for twice
        _until(home, Phase.PROMOTED, 1)
    decisions = home_rollouts(home).decisions(bundles.MODEL)
    asked = [each for each in decisions if each.by == "quality"]
    assert [decision2rollout(each).candidate.version for each in asked] == [1]
    assert re.search(
        r"the mean brier of delays-v2 is 0\..*; a rollback to version 1 is requested", asked[0].reason
    )
    (record,) = read_alerts(home).open
    assert record.alert.release == "delays-v2"


def test_a_version_that_a_rollback_has_brought_back_is_not_exchanged_for_the_worse_one(home: Path) -> None:
    live(home, STRICT, worse=1.0)
    store = Store.open()
    with running_controller(home, bundles.MODEL):
        _promote_both(home)
        follow(home, BEGAN + 3 * DAY_S)
        _until(home, Phase.PROMOTED, 1)
        store.set_alias(bundles.MODEL, "live", 1)
        store.set_alias(bundles.MODEL, "previous", 2)
        first = store.bundle(bundles.MODEL, 1)
        served = serve(home, first, ROWS, seed=3, began=BEGAN + 4 * DAY_S, worse=1.0)
        add(home, first, served.labels(slice(None)), BEGAN + 5 * DAY_S)
        follow(home, BEGAN + 7 * DAY_S)
    assert inbox(home) == []
    (record,) = read_alerts(home).open
    assert record.alert.release == "delays-v1"
    assert "it is not rolled back: version 1 is live because of a rollback" in record.alert.text


def test_the_controller_gets_the_blocks_of_versions_that_have_an_objective(home: Path) -> None:
    live(home, LENIENT, worse=0.0)
    follow(home, BEGAN + 3 * DAY_S)
    found = read_quality_blocks(HomeObjects(home), bundles.MODEL, "delays-v2")
    assert ROWS - FEWEST_ROWS < sum(rows for *_, rows in found.blocks) <= ROWS  # the last ones wait for more
    assert found.limit == pytest.approx(found.offline + 0.02)
    assert (
        read_quality_blocks(HomeObjects(home), bundles.MODEL, "delays-v1") is not None
    )  # without labels so far
    corrected = found.blocks
    bundle = Store.open().bundle(bundles.MODEL, 2)
    labels = pa.table({"_id": [f"2-2-{number}" for number in range(500)], "arr_delay": [99.0] * 500})
    add(home, bundle, labels, BEGAN + 3 * DAY_S)
    view = follow(home, BEGAN + 4 * DAY_S)
    again = read_quality_blocks(HomeObjects(home), bundles.MODEL, "delays-v2")
    assert again.blocks == corrected  # each label is evidence once
    assert view.releases[0].metrics["brier"].value > found.offline + 0.02  # what is shown is corrected


def _until(home: Path, phase: Phase, version: int) -> None:
    def reached() -> bool:
        last = home_rollouts(home).last(bundles.MODEL)
        rollout = decision2rollout(last) if last is not None else None
        return rollout is not None and (rollout.phase, rollout.candidate.version) == (phase, version)

    until(reached, f"version {version} {phase}")
