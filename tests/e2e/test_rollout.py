"""Rollouts on real parts; all cases are in tests/chaos/rollout.py and tests/chaos/shadow.py (`make chaos`)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from serin.formats.schema import INT64_NULL
from serin.formats.wire import Array
from serin.rollout.decide.state import Phase
from serin.stack.wiring import CONTROLLER
from serin.store.artifacts import Release
from tests.chaos.rollout import HUNG, KILLED, line, play
from tests.chaos.shadow import (
    SHADOW,
    Tamper,
    ask_live_version,
    ended,
    halves,
    rows_recorded,
    serve_otherwise,
    tally_of,
)
from tests.chaos.stage import PLAN, Stage, stage
from tests.fakes.records import recorded_rows
from tests.signals import hit
from tests.unit.serving import bundles

SPEC = (
    "serving: {p99_ms: 500, request_timeout: 4s}\n"
    "export: {segments: [carrier]}\n"
    "monitoring: {capture: {share: 1.0}}\n"
)


@pytest.fixture(scope="module")
def scene() -> Iterator[Stage]:
    with stage(spec=SPEC) as made:
        made.first_release()
        yield made


def published(scene: Stage, tamper: Tamper | None = None) -> Release:
    bundle = bundles.publish(scene.store, bias=0.4, spec=SPEC)
    if tamper is not None:
        serve_otherwise(scene, bundle, tamper)
    return Release(model=bundle.model, version=bundle.version)


def drifted_rows() -> dict[str, Array]:
    """With what no golden row has: a new carrier, and distances that are null."""
    columns = recorded_rows(160)
    columns["distance"][::9] = INT64_NULL
    return columns


def test_a_candidate_must_serve_what_its_bundle_computes_before_a_client_reaches_it(scene: Stage) -> None:
    asked = ask_live_version(scene, scene.store.bundle(bundles.MODEL, 1), drifted_rows())
    candidate = published(scene, halves("carrier", "new"))
    scene.start(candidate, SHADOW)
    now = ended(scene, candidate)
    assert now.phase is Phase.ROLLED_BACK, now.reason
    found = tally_of(scene, candidate).mismatch
    assert found is not None, now.reason
    assert (found.segments, found.values["carrier"]) == (("carrier=new",), "new")
    assert float(found.served) == pytest.approx(float(found.computed) / 2)
    assert all(decision.weight == 0 for decision in scene.decisions(candidate))
    honest = published(scene)
    scene.start(honest, SHADOW)
    scene.until(honest, lambda now: now.phase is Phase.SHADOWING, 120)
    hit(scene.pid(CONTROLLER))
    now = ended(scene, honest)
    assert now.phase is Phase.PROMOTED, now.reason
    tally = tally_of(scene, honest)
    assert tally.compared == tally.rows >= 60
    assert tally.segments["carrier=new"].rows > 0
    assert tally.counts.requests <= asked, "no request counted twice"
    assert tally.counts.errors == 0
    logged = scene.requests.read_text().splitlines()
    assert len(logged) == asked, "no recorded request went through the gateway"
    assert rows_recorded(scene) == 160, "or was recorded again"


def test_a_candidate_that_dies_or_hangs_is_rolled_back_at_once_and_no_client_notices(scene: Stage) -> None:
    before = scene.now()
    assert before is not None
    assert before.live is not None
    for case in (KILLED, HUNG):
        outcome = play(scene, case)
        print(line(outcome))
        assert (outcome.phase, outcome.live, outcome.errors) == (case.ends, before.live.version, ()), line(
            outcome
        )
        assert outcome.seconds < PLAN.deadline_s / 4, "a step's deadline had no part in it"
