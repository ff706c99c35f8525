"""kill -9 under load, with the supervisor and controller that a container has: everything comes back by itself."""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from serin.formats.serving.request_log import read_requests
from serin.machine.process_identity import start_ticks
from serin.rollout.decide.state import Phase
from serin.serving.triton.probe import answers
from serin.serving.triton.release_record import read_record
from serin.stack.host.process_scan import group_members
from serin.stack.wiring import key_file
from serin.store.artifacts import Release
from tests.chaos.stage import PLAN, Clients, Stage, stage
from tests.signals import hit
from tests.unit.serving.bundles import SCHEMA


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
