"""Rollouts and kill -9 under load, on real parts; all cases are in tests/chaos (`make chaos`)."""

import signal
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from serin.formats.schema import INT64_NULL
from serin.formats.serving.request_log import read_requests
from serin.formats.wire import Array
from serin.host.process_scan import group_members
from serin.host.wiring import CONTROLLER, key_file
from serin.machine.process import start_ticks
from serin.rollout.decide.state import Phase
from serin.serving.triton.probe import answers
from serin.serving.triton.release_record import read_record
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
from tests.chaos.stage import PLAN, Clients, Stage, stage
from tests.fakes.records import recorded_rows
from tests.signals import hit
from tests.unit.serving import bundles
from tests.unit.serving.bundles import SCHEMA

SPEC = (
    "objectives: {latency_ms: 500}\nserving: {request_timeout: 4s}\n"
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
    assert before.live is not None
    for case in (KILLED, HUNG):
        outcome = play(scene, case)
        print(line(outcome))
        assert (outcome.phase, outcome.live, outcome.errors) == (case.ends, before.live.version, ()), line(
            outcome
        )
        assert outcome.seconds < PLAN.deadline_s / 4, "a step's deadline had no part in it"


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Stage, Release]]:
    with stage() as scene:
        # In Triton's Python: there a process beside it must not stay behind either.
        yield scene, scene.first_release(spec="serving: {backend: onnx_python}\n")


def granted(clients: Clients) -> int:
    """Requests that were answered with 200."""
    return clients.answered - sum(error.isdigit() for error in tuple(clients.errors))


def more_answers(scene: Stage, clients: Clients, count: int) -> None:
    before = granted(clients)
    scene.wait(lambda: granted(clients) >= before + count or None, f"{count} more answers", 60)


def strike(scene: Stage, clients: Clients, name: str) -> float:
    """Seconds from the death of a process to the first answers after it."""
    more_answers(scene, clients, 20)
    pid, errors = scene.pid(name), len(clients.errors)
    began = time.monotonic()
    hit(pid)
    scene.wait(lambda: len(clients.errors) > errors or None, f"a request that {name} owes", 30)
    more_answers(scene, clients, 5)
    seconds = time.monotonic() - began
    assert scene.pid(name) != pid
    return seconds


def arms(scene: Stage) -> set[str]:
    """The arms that have answered: a rollout is decided before the gateway has its routes."""
    return {line.arm for line in read_requests(scene.requests).requests}


def regions(scene: Stage, release: Release) -> set[str]:
    record = read_record(scene.home / "releases" / release.name)
    assert record
    prefix = record.place.shared_memory_prefix
    return {path.name for path in Path("/dev/shm").iterdir() if path.name.startswith(prefix)}


def test_the_live_one_s_triton_is_killed_beside_a_candidate_and_no_client_notices(
    served: tuple[Stage, Release],
) -> None:
    scene, live = served
    candidate = scene.publish()
    scene.start(candidate, replace(PLAN, steps=(50.0, 100.0), step_s=3600.0, deadline_s=7200.0))
    scene.until(candidate, lambda now: now.phase is Phase.SHIFTING, 60)
    record = read_record(scene.home / "releases" / live.name)
    assert record
    with Clients(scene.port, requests_per_s=60, count=6) as clients:
        more_answers(scene, clients, 20)
        scene.wait(lambda: "candidate" in arms(scene) or None, "answers of the candidate", 60)
        triton = scene.pid(live.name)
        (stub,) = set(group_members(scene.home, triton)) - {triton}
        held = regions(scene, live)
        hit(stub, signal.SIGSTOP)  # it would mostly end by itself
        hit(triton)
        began = time.monotonic()
        scene.wait(lambda: answers(record.place.endpoint.http, live, SCHEMA) or None, "the live one", 60)
        print(
            f"{live.name} answers {time.monotonic() - began:.1f} s after kill -9, others answered meanwhile"
        )
        more_answers(scene, clients, 40)
    assert clients.errors == []
    assert scene.pid(live.name) != triton
    assert start_ticks(stub) is None, "the process that was left"
    assert held
    assert held.isdisjoint(regions(scene, live))

    def saved() -> Counter[str] | None:
        lines = read_requests(scene.requests).requests
        return Counter(line.arm for line in lines if line.attempts > 1) or None

    assert set(scene.wait(saved, "requests that were answered for it", 10)) == {"stable"}
    now = scene.now()
    assert now
    assert now.phase is Phase.SHIFTING, "the candidate is not blamed"
    scene.abort(candidate)
    scene.until(candidate, lambda now: now.phase is Phase.ROLLED_BACK, 60)


def test_a_killed_triton_and_a_killed_envoy_are_back_within_seconds_and_guarded_as_before(
    served: tuple[Stage, Release],
) -> None:
    scene, release = served
    with Clients(scene.port, requests_per_s=60, count=6) as clients:
        for name in (release.name, "gateway"):
            print(f"{name} answers {strike(scene, clients, name):.1f} s after kill -9")

        key_file(scene.home).create("somebody")  # nobody tells the gateway; the controller sees it
        scene.wait(lambda: clients.errors[-20:] == ["401"] * 20 or None, "refusals", 30)
        before, errors = granted(clients), len(clients.errors)
        hit(scene.pid("gateway"))
        scene.wait(
            lambda: clients.errors[errors:].count("401") > 50 or None, "refusals by the next Envoy", 60
        )
        assert granted(clients) == before, "it asks for keys from its first request on"
