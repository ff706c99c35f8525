"""Controllers of several hosts as real processes: the leading one is killed or frozen while a rollout runs."""

import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from serin.formats.cluster.desired_state import PREFIX, DesiredState
from serin.formats.cluster.leader import KEY, Leader
from serin.formats.serving.journal import Decision
from serin.rollout.decide.state import Phase
from serin.rollout.run.access import find_rollouts
from serin.serving.triton.repository import build_repository
from serin.store.artifacts import Release
from tests.chaos.rollout import executes_first
from tests.cluster.namespaces import wait_for
from tests.cluster.serving_hosts import MODEL
from tests.cluster.test_rollout_hosts import PLAN, SPEC, Scene, first_version, running_scene
from tests.signals import hit

QUICK = replace(PLAN, steps=(50.0, 100.0))


class Controllers(Scene):
    """Three controllers beside the store, and what they have written."""

    def leader(self) -> Leader | None:
        with self.cluster.store_host.inside():
            found = self.cluster.objects.read(KEY)
        return Leader.load(found.content) if found else None

    def leading(self) -> subprocess.Popen[str]:
        leader = self.leader()
        pid = int(leader.holder.partition("/")[2].partition("-")[0])
        (found,) = [each for each in self.controllers if each.pid == pid]
        return found

    def until_another_leads(self, term: int) -> float:
        """Returns after how many seconds; the wait has a bound well above what is promised."""
        began = time.monotonic()
        wait_for(lambda: (self.leader() or Leader(holder="", term=0)).term > term, within_s=60.0)
        return time.monotonic() - began

    def decisions(self) -> list[Decision]:
        with self.cluster.store_host.inside():
            return find_rollouts(self.cluster.folder / "nowhere").decisions(MODEL)

    def states(self) -> list[DesiredState]:
        with self.cluster.store_host.inside():
            found = [self.cluster.objects.read(key) for key in self.cluster.objects.keys(PREFIX)]
        return [DesiredState.load(stored.content) for stored in found if stored]

    def check_history(self) -> None:
        """Numbers without gaps; terms never go back, and each has one writer."""
        numbers = [each.seq for each in self.decisions()]
        assert numbers == list(range(1, len(numbers) + 1))
        commands = [each.command for each in self.decisions() if each.command]
        assert len(commands) == len(set(commands)), "a command was obeyed twice"
        states = self.states()
        assert [state.seq for state in states] == list(range(1, len(states) + 1))
        assert [state.term for state in states] == sorted(state.term for state in states)
        assert len({(state.term, state.by) for state in states}) == len({state.term for state in states})


@pytest.fixture(scope="module")
def scene() -> Iterator[Controllers]:
    with running_scene(Controllers, "store", "store", "store", prefix="198.18.30") as found:
        yield found


@pytest.fixture(scope="module")
def first(scene: Controllers) -> Release:
    return first_version(scene)


def test_another_controller_continues_when_the_leading_one_is_killed(
    scene: Controllers, first: Release
) -> None:
    made, candidate = scene.cluster, scene.cluster.publish(0.1, SPEC)
    with made.load("a") as at_a, made.load("b") as at_b:
        scene.start(candidate, QUICK)
        scene.until(candidate, lambda now: now.phase is Phase.SHIFTING, what="the first step")
        victim, before = scene.leading(), scene.leader()
        assert before is not None
        scene.controllers.remove(victim)
        hit(victim.pid)
        taken_s = scene.until_another_leads(before.term)
        victim.wait(30)
        scene.until(candidate, lambda now: now.phase is Phase.PROMOTED, 600.0, what="promoted")
    print(f"\nkilled: another led after {taken_s:.1f} s; through a: {at_a}; through b: {at_b}")
    assert (at_a.errors, at_b.errors) == ([], [])
    scene.check_history()
    scene.start_controller()


def test_a_frozen_controller_that_continues_steps_down(scene: Controllers, first: Release) -> None:
    made, candidate = scene.cluster, scene.cluster.publish(0.1, SPEC)
    with made.load("a") as at_a:
        scene.start(candidate, QUICK)
        scene.until(candidate, lambda now: now.phase is Phase.SHIFTING, what="the first step")
        frozen, before = scene.leading(), scene.leader()
        assert before is not None
        hit(frozen.pid, signal.SIGSTOP)
        try:
            taken_s = scene.until_another_leads(before.term)
            decided = len(scene.decisions())
            made.until(lambda: len(scene.decisions()) > decided, what="the next leader decides")
        finally:
            hit(frozen.pid, signal.SIGCONT)
        scene.until(candidate, lambda now: now.phase is Phase.PROMOTED, 600.0, what="promoted")
    print(f"\nfrozen: another led after {taken_s:.1f} s; through a: {at_a}")
    now = scene.leader()
    assert now.holder != before.holder
    assert frozen.poll() is None, "it waits for its turn"
    late = [state for state in scene.states() if state.by == before.holder and state.term > before.term]
    assert late == []
    scene.check_history()


def test_errors_seen_at_one_of_three_gateways_roll_a_version_back(scene: Controllers, first: Release) -> None:
    made, candidate = scene.cluster, scene.cluster.publish(0.1, SPEC)
    with made.store_host.inside():
        bundle = made.store.bundle(candidate.model, candidate.version)
    repository = made.members["b"].home / "releases" / candidate.name / "repository"
    code = build_repository(bundle, repository) / candidate.model / str(candidate.version) / "model.py"
    code.chmod(0o644)
    # Every fourth call: Serin's own probe asks three times in a row, and must not take the release for dead.
    failing = executes_first("if (n := next(_count)) > 40 and n % 4 == 3: raise RuntimeError('broken here')")
    counter = "import itertools\n_count = itertools.count()\n"
    code.write_text(counter + failing(code.read_text()))
    with made.load("a") as at_a, made.load("b") as at_b, made.load("c") as at_c:
        scene.start(candidate, replace(QUICK, step_s=300.0))
        ended = scene.until(candidate, lambda now: now.phase.final, 600.0, what="the end")
    print(f"\n{ended.reason}\nthrough a: {at_a}\nthrough b: {at_b}\nthrough c: {at_c}")
    assert ended.phase is Phase.ROLLED_BACK, ended.reason
    assert (at_a.errors, at_b.errors, at_c.errors) == ([], [], [])
    assert "running" not in ended.reason, "the errors decided, and not a process that died"
    errors = {host: _failed(scene, host, ended.id) for host in "abc"}
    assert errors["b"] > 0
    assert (errors["a"], errors["c"]) == (0, 0), errors
    scene.check_history()


def _failed(scene: Controllers, host: str, rollout: str) -> int:
    """Requests of the candidate that failed on it, as the gateway of a host reported them."""
    return sum(
        block["candidate"][1]
        for found in scene.cluster.evidence(host)
        for entry in found.models.values()
        if entry.rollout == rollout
        for _, block in entry.blocks
    )
