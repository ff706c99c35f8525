"""Serving on several hosts: real Envoys and Tritons in network namespaces, a store on one more host."""

import json
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from serin.formats.cluster.desired_state import EvidenceArm
from serin.formats.serving.request_log import read_requests
from serin.host.process_scan import stack_processes
from serin.host.wiring import AGENT, request_log
from serin.monitoring.capture.read import captured
from serin.rollout.decide.blocks import Block
from serin.rollout.decide.plan import Plan
from serin.store.artifacts import ModelRoute, Release
from tests.cluster.part import need
from tests.cluster.serving_hosts import MODEL, Cluster, Member, cluster
from tests.kit.waiting import until
from tests.signals import hit


@pytest.fixture(scope="module")
def scene() -> Iterator[Cluster]:
    need("namespaces")
    folder = Path(tempfile.mkdtemp(prefix="serin-agents-"))
    try:
        with cluster(folder, "a", "b", "c", prefix="198.18.40") as made:
            yield made
        assert [stack_processes(folder / name) for name in "abc"] == [[], [], []]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def releases(scene: Cluster) -> tuple[Release, Release]:
    """Two versions; the first runs on `a` and `b`, and all gateways route to it."""
    stable, candidate = scene.publish(-1.0), scene.publish(1.5)
    scene.want({stable.name: ("a", "b")})
    scene.until(lambda: scene.ready(stable, "a", "b"), what="the stable release")
    seq = scene.want({stable.name: ("a", "b")}, ModelRoute(model=MODEL, epoch=1, stable=stable))
    scene.until(lambda: scene.in_force(seq), what="routes")
    return stable, candidate


def test_a_host_without_a_replica_answers_through_its_peers_whatever_happens_to_one_of_them(
    scene: Cluster, releases: tuple[Release, Release]
) -> None:
    stable, _ = releases
    assert scene.members["c"].ask()[0] == 200
    report = scene.report("c")
    assert report is not None
    assert report.releases == {}, "the state names two hosts, and this is not one of them"
    with scene.load("c") as far, scene.load("a") as near:
        scene.until(lambda: far.answered > 50)
        scene.network["a"].slow()
        scene.network["b"].cut()
        so_far = far.answered
        scene.until(lambda: far.answered > so_far + 100, what="answers without b")
        scene.network["b"].restore()
        scene.network["a"].fast()
        so_far = far.answered
        scene.until(lambda: scene.ready(stable, "a", "b") and far.answered > so_far + 50)
    print(f"\nthrough c: {far}\nthrough a: {near}")
    assert (far.errors, near.errors) == ([], [])
    assert near.answered > 0


def test_requests_are_recorded_by_the_gateway_that_was_asked_wherever_the_release_runs(
    scene: Cluster, releases: tuple[Release, Release]
) -> None:
    far = scene.members["c"]  # runs no release: a or b answers
    for _ in range(5):
        assert far.ask()[0] == 200
    wanted = {request.id for request in read_requests(request_log(far.home)).requests}
    assert len(wanted) >= 5

    def ids(name: str) -> list[str]:
        return captured(scene.members[name].home, MODEL, columns=["_id"])["_id"].to_pylist()

    scene.until(lambda: wanted <= {*ids("c")}, what="all requests of c in its records")
    rows = far.home / "rows.parquet"

    def exported() -> bool:
        """Another host reads what each has uploaded."""
        done = scene.members["a"].serin("captures", "export", MODEL, "--out", str(rows), check=False)
        recorded = Counter(each for name in scene.members for each in ids(name))
        assert set(recorded.values()) == {1}, "recorded twice"
        return done.returncode == 0 and Counter(pq.read_table(rows)["_id"].to_pylist()) == recorded

    scene.until(exported, what="the rows of all hosts in the store, each once")
    listed = json.loads(scene.members["a"].serin("captures", "list", "--json").stdout)
    assert {view["host"] for view in listed} == {name for name in scene.members if ids(name)}


def test_gateway_and_releases_run_on_while_the_agent_is_killed_or_the_store_is_away(
    scene: Cluster, releases: tuple[Release, Release]
) -> None:
    stable, _ = releases
    member = scene.members["a"]
    before = member.pids()
    with scene.load("a") as near, scene.load("c") as far:
        scene.store_host.cut()
        hit(before[AGENT] or 0)
        hit(member.process.pid)
        member.process.wait()
        member.start()
        hit(scene.members["c"].pids()[AGENT] or 0)
        assert _said(member, "NOT USED", stable.name)
        scene.store_host.restore()
        seq = scene.want({stable.name: ("a", "b")}, ModelRoute(model=MODEL, epoch=2, stable=stable))
        scene.until(lambda: scene.in_force(seq), what="the store is back")
    print(f"\nthrough a: {near}\nthrough c: {far}")
    assert (near.errors, far.errors) == ([], [])
    after = member.pids()
    assert {name: pid for name, pid in after.items() if name != AGENT} == {
        name: pid for name, pid in before.items() if name != AGENT
    }
    assert after[AGENT] != before[AGENT]


def test_every_request_is_counted_once_over_all_hosts(
    scene: Cluster, releases: tuple[Release, Release]
) -> None:
    stable, candidate = releases
    hosts = {stable.name: ("a", "b"), candidate.name: ("a", "b")}
    scene.want(hosts, ModelRoute(model=MODEL, epoch=2, stable=stable))
    scene.until(lambda: scene.ready(candidate, "a", "b"), what="the candidate")
    arm = EvidenceArm(
        rollout="r", candidate=candidate.name, stable=stable.name, since_epoch=3, since_t=time.time(),
        shares={3: 0.5}, plan=Plan().to_json(),
    )  # fmt: skip
    route = ModelRoute(model=MODEL, epoch=3, stable=stable, candidate=candidate, candidate_percent=50.0)
    seq = scene.want(hosts, route, arms={MODEL: arm})
    scene.until(lambda: scene.in_force(seq), what="the split")
    with scene.load("a") as near, scene.load("c") as far:
        scene.until(lambda: near.answered > 100 and far.answered > 100)
        hit(scene.members["a"].pids()[AGENT] or 0)
        so_far = near.answered
        scene.until(lambda: near.answered > so_far + 100)
    sent = {"a": near.answered, "b": 0, "c": far.answered}

    def counted(name: str) -> int:
        blocks = [
            Block.from_json(block) for each in scene.evidence(name) for _, block in each.models[MODEL].blocks
        ]
        return sum(block.stable.requests + block.candidate.requests for block in blocks)

    scene.until(lambda: {name: counted(name) for name in sent} == sent, within_s=60.0, what="all counted")
    assert (near.errors, far.errors) == ([], [])
    scene.want({stable.name: ("a", "b")}, ModelRoute(model=MODEL, epoch=4, stable=stable))
    scene.until(
        lambda: all(
            report is not None and candidate.name not in report.releases
            for report in map(scene.report, ("a", "b"))
        ),
        what="the candidate is stopped",
    )


def test_a_second_agent_with_the_name_of_a_host_is_refused_and_the_first_one_serves_on(
    scene: Cluster, releases: tuple[Release, Release]
) -> None:
    first, other = scene.members["a"], scene.members["c"]
    second = replace(other, home=other.home.with_name("second"), port=other.host.free_port())
    second = replace(second, variables={**first.variables, "SERIN_HOME": str(second.home)})
    words = ["agent", "--address", second.host.address, "--port", str(second.port)]
    done = second.serin(*words, check=False)
    assert done.returncode != 0
    assert f"with the gateway {first.host.address}:{first.port}, reports as host a" in done.stderr
    assert stack_processes(second.home) == []
    assert first.ask()[0] == 200


def test_sigterm_ends_everything_on_the_host_and_its_clients_are_answered_elsewhere(
    scene: Cluster, releases: tuple[Release, Release]
) -> None:
    member = scene.members["b"]
    assert member.process is not None
    with scene.load("c") as far:
        scene.until(lambda: far.answered > 20)
        hit(member.process.pid, signal.SIGTERM)
        assert member.process.wait(120) == 0, member.home.with_suffix(".log").read_text()
        member.process = None
        so_far = far.answered
        scene.until(lambda: far.answered > so_far + 50)
    assert far.errors == []
    assert stack_processes(member.home) == []
    assert scene.report("b") is None, "others take its place, and no rollout waits for it"
    started = time.time()
    member.start()
    scene.until(lambda: _reported_since(scene, started) and scene.ready(releases[0], "b"), what="b is back")
    assert member.serin("down").stdout.endswith("down\n")
    assert member.process.wait(60) == 0  # type: ignore[attr-defined]
    member.process = None


def _reported_since(scene: Cluster, t: float) -> bool:
    found = scene.report("b")
    return found is not None and found.t > t


def _said(member: Member, *words: str) -> bool:
    """Waits until `serin status` says all of these words."""
    status = [""]

    def says() -> bool:
        status[0] = member.serin("status", check=False).stdout
        return all(word in status[0] for word in words)

    return until(says, "the status", every_s=1.0, said=lambda: status[0])
