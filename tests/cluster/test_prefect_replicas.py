"""One Prefect replica is killed and the other is cut off while placed pipelines run: none is lost, none is doubled."""

import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from serin.host.process_scan import stack_processes
from serin.prefect.rest_api import call
from tests.chaos.pipelines import Pipelines, wait
from tests.chaos.strikes import Scene
from tests.cluster.part import need
from tests.cluster.prefect_server import REPLICAS, PrefectServer, prefect_server
from tests.signals import hit, kill_9

_PIPELINES = 3
_STEPS = 400  # of a twentieth of a second
_REACH_S, _END_S = 600.0, 900.0


@pytest.fixture(scope="module")
def server() -> Iterator[PrefectServer]:
    for part in ("namespaces", "postgres", "valkey"):
        need(part)
    folder = Path(tempfile.mkdtemp(prefix="serin-replicas-"))
    try:
        with prefect_server(folder, prefix="198.18.70") as made, made.machine.inside():
            yield made
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def stack(server: PrefectServer) -> Iterator[Pipelines]:
    home = Path(tempfile.mkdtemp(prefix="serin-chaos-"))  # short: it holds unix sockets
    scene = Pipelines(home, server.api)
    try:
        scene.serin("up", seconds=600)
        yield scene
    finally:
        scene.serin("down", code=None)
        kill_9(*stack_processes(home))
        shutil.rmtree(home, ignore_errors=True)


@pytest.mark.timeout(2400)
def test_placed_runs_survive_a_killed_replica_and_one_that_is_cut_off(
    server: PrefectServer, stack: Pipelines
) -> None:
    first, second, third = (_begin(stack, number) for number in range(_PIPELINES))
    wait(lambda: first.steps > 5, "the first training", _REACH_S)

    killed = server.replicas[REPLICAS[0]]
    hit(killed.pid)
    killed.wait()
    wait(lambda: second.steps > 5, "the second training, with one replica", _REACH_S)
    server.start_replica(REPLICAS[0])  # as systemd does

    wait(lambda: not first.placed() or first.steps > 20, "the first pipeline to go on", _REACH_S)
    cut = server.network[REPLICAS[1]]
    cut.cut()
    assert wait(first.ended, "the first pipeline", _END_S) == "COMPLETED"
    assert wait(second.ended, "the second pipeline", _END_S) == "COMPLETED"
    cut.restore()
    hit(server.services.pid, signal.SIGKILL)
    server.services.wait()
    server.start_services()
    assert wait(third.ended, "the third pipeline", _END_S) == "COMPLETED"

    for scene in (first, second, third):
        assert stack.versions(scene.name) == [1]
        assert scene.training is not None
        starts = (scene.training / "checkpoints" / "starts.log").read_text().splitlines()
        assert starts == ["0"], f"{scene.name} was trained {len(starts)} times"
    runs = _all_runs(stack)
    stages = Counter(run["flow"] for run in runs)
    assert stages == {"pipeline": 3, "etl": 3, "train": 3, "export": 3}
    for run in runs:
        states = [
            state["type"] for state in call(stack.api, "GET", f"/flow_run_states/?flow_run_id={run['id']}")
        ]
        assert Counter(states)["RUNNING"] == 1, f"{run['flow']} {run['name']}: {states}"
        assert not {"FAILED", "CRASHED", "CANCELLED"} & set(states), f"{run['flow']} {run['name']}: {states}"


def _begin(stack: Pipelines, number: int) -> Scene:
    name = f"replicas-{number}"
    spec = stack.write_spec(name, seed=number, steps=_STEPS)
    return Scene(stack=stack, name=name, run=stack.begin(spec, "--placed"))


def _all_runs(stack: Pipelines) -> list[dict[str, Any]]:
    """Of pipelines and their stages; not those that a schedule began."""
    found = call(stack.api, "POST", "/flow_runs/filter", {"limit": 200})
    flows = {flow["id"]: flow["name"] for flow in call(stack.api, "POST", "/flows/filter", {"limit": 200})}
    wanted = ("pipeline", "etl", "train", "export")
    return [{**run, "flow": flows[run["flow_id"]]} for run in found if flows[run["flow_id"]] in wanted]
