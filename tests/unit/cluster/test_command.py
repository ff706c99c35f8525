"""`serin controller` as a process, and commands that find it through the store."""

import json
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from serin.cluster import controller as controllers
from serin.cluster.status import ClusterStatus
from serin.commands.rollout import tell_controller
from serin.errors import NotUp, StoreUnreachable
from serin.formats.cluster.leader import KEY, Leader
from serin.rollout.run.access import find_rollouts
from serin.rollout.run.commands import Command
from serin.store.objects import FolderObjects
from tests.kit.commands import SERIN
from tests.kit.waiting import running as alive
from tests.kit.waiting import tail, until
from tests.unit.cluster.conftest import Cluster


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: Path) -> FolderObjects:
    monkeypatch.setenv("SERIN_STORE", str(tmp_path / "store"))
    return FolderObjects(tmp_path / "store")


@pytest.fixture
def controller(shared: FolderObjects, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    with (tmp_path / "controller.log").open("w") as log:
        process = subprocess.Popen(
            [*SERIN, "controller"],
            stdout=log, stderr=subprocess.STDOUT, text=True, env=dict(os.environ),
        )  # fmt: skip
    try:
        log = tail(tmp_path / "controller.log")
        until(lambda: shared.read(KEY) is not None, "a controller leads", alive=alive(process), said=log)
        yield process
    finally:
        process.kill()
        process.wait(30)


def leader(shared: FolderObjects) -> Leader:
    found = shared.read(KEY)
    return Leader.load(found.content)


def test_it_answers_commands_and_ends_cleanly(
    controller: subprocess.Popen[str], shared: FolderObjects, tmp_path: Path
) -> None:
    rollouts = find_rollouts()
    assert rollouts.log is None
    command = Command(kind="start", model="flights", version=7, by="ann")
    answer = rollouts.mailbox.ask(command, timeout_s=60.0)
    assert (answer.accepted, "version 7 is not in the store" in answer.reason) == (False, True)
    assert leader(shared).holder.partition("/")[2].startswith(f"{controller.pid}-")
    controller.terminate()
    assert controller.wait(60) == 0
    assert leader(shared).holder == "", "it has resigned"
    lines = (tmp_path / "controller.log").read_text().splitlines()
    assert lines[-1].endswith("the controller has stopped")
    assert all(line.startswith("20") for line in lines), "each line has its time, once"


def test_without_a_controller_s_record_a_machine_decides_for_itself(
    shared: FolderObjects, tmp_path: Path
) -> None:
    assert find_rollouts().log is not None
    with pytest.raises(NotUp):
        tell_controller("abort", "flights")
    shared.put(KEY, Leader(holder="one", term=1).dump())
    assert find_rollouts().log is None


@pytest.mark.parametrize("agent", [False, True])
def test_the_stack_of_this_machine_decides_unless_it_is_an_agent_s(
    shared: FolderObjects, tmp_path: Path, agent: bool
) -> None:
    from serin.machine.process import start_ticks

    shared.put(KEY, Leader(holder="one", term=1).dump())
    stack = {"supervisor_pid": os.getpid(), "supervisor_ticks": start_ticks(os.getpid()), "agent": agent}
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "stack.json").write_text(json.dumps(stack))
    assert (find_rollouts().log is None) is agent


def test_the_status_names_the_leader_the_hosts_and_where_releases_are_ready(cluster: Cluster) -> None:
    cluster.serve_first("a", "b")
    from serin.rollout.run.status import statuses

    led = cluster.leader.led
    assert led is not None
    found = ClusterStatus(
        store="s3://models",
        leader=cluster.leader.leadership.leader,
        hosts=led._hosts.reports,
        silent=frozenset("b"),
        models=tuple(statuses(cluster.rollouts)),
    )
    lines = "\n".join(found.lines())
    assert "leader   one  (term 1)" in lines
    assert "b                        SILENT" in lines
    assert "flights-v1               stable    100.00%  ready at a" in lines
    assert not found.well
    assert found.to_json()["models"][0]["releases"][0]["ready_at"] == ["a"]


def test_a_controller_that_starts_while_the_store_is_away_waits_for_it(
    shared: FolderObjects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Flaky(FolderObjects):
        away = True

        def create(self, key: str, content: bytes) -> str:
            if self.away:
                raise StoreUnreachable(url=self.url, reason="connection refused")
            return super().create(key, content)

    objects, stop, home = Flaky(tmp_path / "store"), threading.Event(), tmp_path / "home"
    monkeypatch.setattr(controllers, "open_objects", lambda _: objects)
    monkeypatch.setattr(controllers, "_STAND_BY_S", 0.02)
    running = threading.Thread(target=controllers.run, args=(home, "agents", stop), daemon=True)
    running.start()
    try:
        until(lambda: said(home) == "waits for the store\n", alive=running.is_alive)
        objects.away = False
        until(lambda: said(home) == "leads\n", alive=running.is_alive)
    finally:
        stop.set()
        running.join(60)
    assert not running.is_alive()


def said(home: Path) -> str:
    beat = home / controllers.BEAT
    return beat.read_text() if beat.exists() else ""
