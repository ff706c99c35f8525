"""Rollouts on several hosts with one leading controller, in simulated time."""

from collections.abc import Mapping

import pytest

from serin.cluster.desired import newest_state
from serin.rollout.decide.state import Hold, Phase
from serin.store.artifacts import Release
from tests.unit.cluster.conftest import Cluster


def routed(cluster: Cluster, host: str) -> tuple[str, float] | None:
    state = cluster.agents[host].state
    assert state is not None
    for route in state.routes:
        candidate = route.candidate if route.candidate_percent else None
        return (candidate or route.stable or Release(model="x", version=1)).name, route.candidate_percent
    return None


def hosts(cluster: Cluster) -> Mapping[str, tuple[str, ...]]:
    state = newest_state(cluster.store)
    return state.hosts


def running(cluster: Cluster, release: str) -> tuple[str, ...]:
    return hosts(cluster)[release]


def test_a_release_runs_on_all_hosts_and_is_promoted_at_every_gateway(cluster: Cluster) -> None:
    cluster.serve_first("a", "b", "c")
    cluster.start_second(Phase.PROMOTED)
    cluster.step(3)
    for host in "abc":
        assert routed(cluster, host) == ("flights-v2", 0.0)
        assert list(cluster.agents[host].releases) == ["flights-v2"]
    assert cluster.settings.versions.aliases("flights") == {"live": 2, "previous": 1}


def test_a_release_stays_while_a_gateway_without_it_still_receives_requests(cluster: Cluster) -> None:
    cluster.serve_first("a", "b", replicas=1)
    (other,) = {"a", "b"} - {*running(cluster, "flights-v1")}
    cluster.agents[other].arriving = 3
    cluster.start_second(Phase.DRAINING)
    cluster.step(5)
    assert cluster.now().phase is Phase.DRAINING
    assert running(cluster, "flights-v1")
    cluster.agents[other].arriving = 0
    cluster.step(2)
    assert cluster.now().phase is Phase.PROMOTED


def test_every_decision_has_its_number_once(cluster: Cluster) -> None:
    cluster.serve_first("a")
    numbers = [decision.seq for decision in cluster.decisions()]
    assert numbers == list(range(1, len(numbers) + 1))


def test_replicas_place_all_releases_of_a_model_on_the_same_hosts(cluster: Cluster) -> None:
    cluster.serve_first("a", "b", "c", "d", replicas=2)
    first = running(cluster, "flights-v1")
    cluster.start_second()
    assert running(cluster, "flights-v1") == running(cluster, "flights-v2") == first
    assert len(first) == 2


def test_a_candidate_that_one_host_cannot_start_is_rolled_back_with_that_host_s_reason(
    cluster: Cluster,
) -> None:
    cluster.serve_first("a", "b")
    cluster.agents["b"].broken.add("flights-v2")
    cluster.start_second(Phase.ROLLED_BACK)
    turned = next(each for each in cluster.decisions() if each.phase == Phase.ABORTING)
    assert "host b: no memory left" in turned.reason


def test_a_candidate_that_answers_wrongly_on_one_host_never_gets_traffic(cluster: Cluster) -> None:
    cluster.serve_first("a", "b")
    cluster.agents["b"].wrong.add("flights-v2")
    now = cluster.start_second(Phase.ROLLED_BACK)
    assert "host b: score 0.1 instead of 0.9" in now.reason
    shares = {route.candidate_percent for state in cluster.agents["a"].followed for route in state.routes}
    assert shares == {0.0}


@pytest.mark.parametrize("seconds", [0, 1, 2])
def test_a_candidate_that_is_restarted_on_one_host_under_traffic_has_failed(
    cluster: Cluster, seconds: int
) -> None:
    cluster.serve_first("a", "b")
    cluster.start_second()
    cluster.step(seconds)
    cluster.agents["b"].restart("flights-v2")
    cluster.until(Phase.ROLLED_BACK)


def test_a_lost_host_keeps_the_live_release_ready_and_the_candidate_alive(cluster: Cluster) -> None:
    cluster.judge.step_s = 1e9
    cluster.serve_first("a", "b", "c")
    cluster.start_second()
    cluster.step(2)
    cluster.frozen.add("c")
    cluster.step(30)
    assert cluster.now().phase is Phase.SHIFTING
    cluster.frozen.clear()
    for release in list(cluster.agents["c"].releases):
        cluster.agents["c"].restart(release)  # the host was restarted
    cluster.step(3)
    assert cluster.now().phase is Phase.SHIFTING


@pytest.mark.parametrize("replicas", [1, 2, None])
def test_a_lost_host_is_replaced_and_gets_nothing_back_that_another_one_has(
    cluster: Cluster, replicas: int | None
) -> None:
    cluster.serve_first("a", "b", "c", replicas=replicas)
    before = running(cluster, "flights-v1")
    lost = before[0]
    cluster.frozen.add(lost)
    cluster.step(25)
    assert running(cluster, "flights-v1") == before, "it may come back"
    cluster.step(10)
    after = running(cluster, "flights-v1")
    assert len(after) == len(before)
    assert replicas is None or lost not in after
    ready = [
        name
        for name in after
        if name != lost and cluster.agents[name].releases["flights-v1"].state == "ready"
    ]
    assert len(ready) == (replicas or 2)
    cluster.frozen.clear()
    cluster.step(5)
    assert running(cluster, "flights-v1") == after
    cluster.start_second(Phase.PROMOTED)
    assert running(cluster, "flights-v2") == after, "beside the release that it is compared with"


def test_a_host_that_is_lost_in_a_rollout_is_replaced_for_both_releases(cluster: Cluster) -> None:
    cluster.judge.step_s = 1e9
    cluster.serve_first("a", "b", "c", replicas=2)
    cluster.start_second()
    lost, stays = running(cluster, "flights-v2")
    cluster.frozen.add(lost)
    cluster.step(40)
    (new,) = {"a", "b", "c"} - {lost, stays}
    assert running(cluster, "flights-v1") == running(cluster, "flights-v2") == tuple(sorted((stays, new)))
    assert cluster.now().phase is Phase.SHIFTING, "the lost host is not the candidate's fault"


def test_a_candidate_without_any_host_left_is_rolled_back_and_the_live_release_answers_elsewhere(
    cluster: Cluster,
) -> None:
    cluster.judge.step_s = 1e9
    cluster.serve_first("a", "b", replicas=1)
    cluster.start_second()
    (lost,) = running(cluster, "flights-v2")
    cluster.agents["a" if lost == "b" else "b"].broken.add("flights-v2")
    cluster.frozen.add(lost)
    cluster.until(Phase.ROLLED_BACK)
    cluster.step(3)
    (other,) = running(cluster, "flights-v1")
    assert other != lost
    assert cluster.agents[other].releases["flights-v1"].state == "ready"


def test_a_gateway_that_rejects_its_routes_holds_the_rollout(cluster: Cluster) -> None:
    cluster.serve_first("a", "b")
    cluster.start_second(Phase.VERIFYING)
    cluster.agents["b"].rejecting = "unknown cluster"
    now = cluster.until(lambda now: now.hold is not None)
    assert now.hold is Hold.INCIDENT
    cluster.agents["b"].rejecting = ""
    cluster.until(Phase.PROMOTED)


def test_without_a_host_a_rollout_fails_and_says_what_to_do(cluster: Cluster) -> None:
    cluster.controller("one")
    cluster.command("start", 1)
    now = cluster.until(Phase.ROLLED_BACK)
    assert "no host with an agent reports; start `serin agent`" in now.reason


def test_a_new_host_runs_live_releases_once_no_rollout_runs(cluster: Cluster) -> None:
    cluster.serve_first("a")
    cluster.host("b")
    cluster.step(4)
    assert cluster.agents["b"].releases["flights-v1"].state == "ready"


def test_a_forgotten_host_is_left_out(cluster: Cluster) -> None:
    cluster.serve_first("a", "b")
    cluster.frozen.add("b")
    cluster.step(8)
    cluster.store.remove("cluster/hosts/b/agent.json")
    cluster.step(3)
    assert hosts(cluster) == {"flights-v1": ("a",)}


def test_the_last_host_that_is_stopped_continues_when_it_returns_unless_another_one_has_come(
    cluster: Cluster,
) -> None:
    cluster.serve_first("a")
    for _ in range(2):
        cluster.frozen.add("a")
        cluster.store.remove("cluster/hosts/a/agent.json")
        cluster.step(40)
        assert running(cluster, "flights-v1") == ("a",)
        cluster.frozen.clear()
        cluster.step(3)
        assert cluster.agents["a"].releases["flights-v1"].state == "ready"
    cluster.frozen.add("a")
    cluster.store.remove("cluster/hosts/a/agent.json")
    cluster.host("b")
    cluster.step(6)
    assert running(cluster, "flights-v1") == ("b",)
    assert cluster.agents["b"].releases["flights-v1"].state == "ready"


@pytest.mark.parametrize("resigns", [True, False])
def test_another_controller_continues_a_rollout(cluster: Cluster, resigns: bool) -> None:
    cluster.serve_first("a", "b", controllers=("one", "two"))
    cluster.start_second()
    first = cluster.leader
    cluster.frozen.add(first.name)
    if resigns:
        first.loop.step_down()
        first.leadership.resign()
    began = cluster.time.t
    cluster.until(lambda _: any(
        member.leadership.term and member is not first for member in cluster.members.values()
    ))  # fmt: skip
    assert cluster.time.t - began <= (2 if resigns else 8)
    cluster.until(Phase.PROMOTED)
    numbers = [decision.seq for decision in cluster.decisions()]
    assert numbers == list(range(1, len(numbers) + 1))


def test_a_controller_that_was_frozen_steps_down_without_acting(cluster: Cluster) -> None:
    cluster.serve_first("a", controllers=("one", "two"))
    first = cluster.leader
    cluster.frozen.add(first.name)
    cluster.step(10)
    written = len(cluster.store.created)
    first.loop.round()  # the first thing it does when it continues: its renewal is too old
    assert len(cluster.store.created) == written
    assert first.leadership.term is None
    cluster.frozen.clear()
    cluster.start_second(Phase.PROMOTED)
    assert cluster.leader is not first


def test_a_report_that_is_missing_once_is_not_a_forgotten_host(cluster: Cluster) -> None:
    cluster.serve_first("a", "b")
    found = cluster.store.content.pop("cluster/hosts/b/agent.json")
    member = cluster.leader
    member.step()
    cluster.store.content["cluster/hosts/b/agent.json"] = found
    cluster.step(3)
    assert hosts(cluster) == {"flights-v1": ("a", "b")}
