"""Rollouts over several hosts: two controllers, three agents, a store, each on its own host; trouble in the network."""

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import pytest

from serin.cluster.agents import place
from serin.rollout.decide.plan import Plan
from serin.rollout.decide.state import Hold, Phase, Rollout
from serin.rollout.run.access import Rollouts
from serin.rollout.run.commands import Command
from serin.rollout.run.record import decision2rollout
from serin.serving.triton.repository import build_repository
from serin.store.artifacts import Release
from tests.chaos.rollout import executes_first
from tests.cluster.namespaces import end
from tests.cluster.part import need
from tests.cluster.serving_hosts import MODEL, SERIN, Cluster, Load, Member, cluster
from tests.signals import hit

pytestmark = pytest.mark.timeout(2400)  # a busy machine takes its time; each wait has its own limit
SPEC = "objectives: {latency_ms: 500}\nserving: {request_timeout: 10s, backend: onnx_python}\n"
AT_ONCE = Plan(steps=(100.0,), min_requests=0, bake_s=0.0, load_s=180.0)
# The machine is busy: what is shown here are hosts and links, and not how small a difference is seen.
PLAN = Plan(
    steps=(10.0, 50.0, 100.0), step_s=5.0, min_requests=20, bake_s=5.0, deadline_s=900.0, drain_s=20.0, load_s=180.0,
    quantiles=(0.5,), margin=0.5, bad_margin=1.0, tolerance_ms=5.0, slo_ms=500.0, warmup_s=1.0,
    unready_s=20.0,
)  # fmt: skip


class Scene:
    """`made`: agents on a, b and c; controllers run on c and beside the store."""

    def __init__(self, made: Cluster, controllers: list[subprocess.Popen[str]]) -> None:
        self.cluster, self.controllers = made, controllers

    def start_controller(self, name: str = "store") -> subprocess.Popen[str]:
        host = self.cluster.store_host if name == "store" else self.cluster.network[name]
        home = self.cluster.folder / f"controller-{len(list(self.cluster.folder.glob('controller-*.log')))}"
        own = {**os.environ, "SERIN_HOME": str(home), "SERIN_HOST": host.name}
        started = host.popen([*SERIN, "controller"], log=home.with_suffix(".log"), env=own)
        self.controllers.append(started)
        return started

    def now(self) -> Rollout | None:
        with self.cluster.store_host.inside():
            found = Rollouts(self.cluster.objects).last(MODEL)
        return decision2rollout(found) if found else None

    def start(self, release: Release, plan: Plan) -> None:
        command = Command(kind="start", model=MODEL, version=release.version, by="test", plan=plan)
        with self.cluster.store_host.inside():
            answer = Rollouts(self.cluster.objects).mailbox.ask(command, timeout_s=120.0)
        assert answer.accepted, answer.reason

    def until(
        self, release: Release, true: Callable[[Rollout], bool], within_s: float = 300.0, what: str = ""
    ) -> Rollout:
        found: list[Rollout] = []

        def look() -> bool:
            assert all(controller.poll() is None for controller in self.controllers)
            now = self.now()
            if now is None or now.candidate != release or not true(now):
                found[:] = [now] if now else []
                return False
            found[:] = [now]
            return True

        try:
            self.cluster.until(look, within_s=within_s, what=what)
        except AssertionError as error:
            last = f"{found[0].phase} {found[0].hold} {found[0].reason}" if found else "no rollout"
            raise AssertionError(f"{last}: {error}") from error
        return found[0]

    def live_everywhere(self, release: Release) -> bool:
        reports = [self.cluster.report(name) for name in self.cluster.members]
        return all(
            report is not None and {*report.releases} == {release.name} and not report.problem
            for report in reports
        )


S = TypeVar("S", bound=Scene)


@contextmanager
def running_scene(kind: type[S], *controllers: str, prefix: str) -> Iterator[S]:
    """`controllers`: the hosts of one each."""
    need("namespaces")
    folder = Path(tempfile.mkdtemp(prefix="serin-rollouts-"))
    try:
        with cluster(folder, "a", "b", "c", prefix=prefix) as made:
            found = kind(made, [])
            try:
                for host in controllers:
                    found.start_controller(host)
                yield found
            finally:
                for controller in found.controllers:
                    end(controller)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def first_version(scene: Scene) -> Release:
    """Live on all three hosts."""
    release = scene.cluster.publish(0.1, SPEC)
    scene.cluster.until(lambda: all(scene.cluster.report(name) for name in "abc"), what="all hosts report")
    scene.start(release, AT_ONCE)
    scene.until(release, lambda now: now.phase is Phase.PROMOTED, what="the first version")
    return release


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    with running_scene(Scene, "c", "store", prefix="198.18.40") as found:
        yield found


@pytest.fixture(scope="module")
def first(scene: Scene) -> Release:
    return first_version(scene)


def test_a_rollout_is_held_while_a_gateway_is_cut_off_and_then_promoted_on_all_hosts(
    scene: Scene, first: Release
) -> None:
    made = scene.cluster
    candidate = made.publish(0.1, SPEC)
    with made.load("a") as at_a, made.load("b") as at_b, made.load("c") as at_c:
        scene.start(candidate, PLAN)
        scene.until(candidate, lambda now: now.phase is Phase.SHIFTING, what="the first step")
        made.network["a"].slow()
        made.network["b"].cut()
        held = scene.until(
            candidate,
            lambda now: now.hold is Hold.INCIDENT and "gateway b is silent" in now.reason,
            what="held, because b is silent",
        )
        so_far = (at_a.answered, at_b.answered, at_c.answered)
        made.until(
            lambda: (
                at_a.answered > so_far[0] + 50
                and at_b.answered > so_far[1] + 50
                and at_c.answered > so_far[2] + 50
            ),
            what="every gateway answers its clients",
        )
        now = scene.now()
        assert (now.phase, now.weight_percent) == (Phase.SHIFTING, held.weight_percent), "it waits"
        made.network["b"].restore()
        made.network["a"].fast()
        scene.until(candidate, lambda now: now.phase is Phase.PROMOTED, 600.0, what="promoted")
    print(f"\nthrough a: {at_a}\nthrough b: {at_b}\nthrough c: {at_c}")
    assert (at_a.errors, at_b.errors, at_c.errors) == ([], [], [])
    made.until(lambda: scene.live_everywhere(candidate), what="only the new version runs, everywhere")
    with made.store_host.inside():
        assert made.store.aliases(MODEL)["live"] == candidate.version


def test_a_slow_candidate_is_rolled_back_by_the_evidence_of_all_hosts(scene: Scene, first: Release) -> None:
    made = scene.cluster
    before = scene.now()
    assert before.live is not None
    candidate = made.publish(0.1, SPEC)
    for member in made.members.values():  # 60 ms slower, on every host
        with made.store_host.inside():
            bundle = made.store.bundle(candidate.model, candidate.version)
        folder = build_repository(bundle, member.home / "releases" / candidate.name / "repository")
        code = folder / candidate.model / str(candidate.version) / "model.py"
        code.chmod(0o644)
        code.write_text(executes_first("time.sleep(0.06)")(code.read_text()))
    with made.load("a") as at_a, made.load("b") as at_b, made.load("c") as at_c:
        scene.start(candidate, PLAN)
        ended = scene.until(candidate, lambda now: now.phase.final, 600.0, what="the end")
    assert_rolled_back_unnoticed(scene, ended, [at_a, at_b, at_c], before.live)


def assert_rolled_back_unnoticed(scene: Scene, ended: Rollout, loads: list[Load], live: Release) -> None:
    print(f"\n{ended.reason}", *loads, sep="\n")
    assert ended.phase is Phase.ROLLED_BACK, ended.reason
    assert [load.errors for load in loads] == [[], [], []]
    scene.cluster.until(lambda: scene.live_everywhere(live), what="only the live version runs")


def test_a_candidate_that_dies_on_one_host_is_rolled_back_at_once_and_no_client_notices(
    scene: Scene, first: Release
) -> None:
    made = scene.cluster
    before = scene.now()
    assert before.live is not None
    candidate = made.publish(0.1, SPEC)
    with made.load("a") as at_a, made.load("b") as at_b, made.load("c") as at_c:
        scene.start(candidate, PLAN)
        scene.until(candidate, lambda now: now.phase is Phase.SHIFTING, what="the first step")
        hit(made.members["b"].pids()[candidate.name] or 0)
        ended = scene.until(candidate, lambda now: now.phase.final, 300.0, what="the end")
    assert_rolled_back_unnoticed(scene, ended, [at_a, at_b, at_c], before.live)


def test_another_host_takes_over_when_the_only_host_of_a_model_is_lost(scene: Scene, first: Release) -> None:
    made = scene.cluster
    release = made.publish(0.1, SPEC.replace("serving: {", "serving: {replicas: 1, "))
    scene.start(release, AT_ONCE)
    scene.until(release, lambda now: now.phase is Phase.PROMOTED, what="the version with one replica")
    (lost,) = place(MODEL, made.members, 1)
    assert lost != "c", "a controller runs there"
    member = made.members[lost]
    made.network[lost].cut()
    made.network[lost].kill()
    member.process.wait()
    member.process = None
    others = [each for name, each in made.members.items() if name != lost]
    began = time.monotonic()
    made.until(lambda: all(each.ask()[0] == 200 for each in others), what="another host answers")
    print(f"\nanswered {time.monotonic() - began:.1f} s after the loss of host {lost}")
    made.network[lost].restore()
    member.start()
    made.until(lambda: _answers(member), what="it is back, as a gateway")
    made.until(lambda: _runs_at(scene, release) not in ([], [lost]), what="its place is taken")


def _answers(member: Member) -> bool:
    try:
        return member.ask()[0] == 200
    except OSError:  # it is not up yet
        return False


def _runs_at(scene: Scene, release: Release) -> list[str]:
    reports = {name: scene.cluster.report(name) for name in scene.cluster.members}
    return [name for name, found in reports.items() if found and release.name in found.releases]
