"""The process that waits for its run (deployments/engine.py): given one by hand, on a real server. That a worker gives
it one is seen in e2e/."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import anyio
import pytest
from prefect.settings import get_current_settings

from deployments import engine
from deployments.engine import APPLICATION, ENGINE, waiting_environment
from serin.machine import environment
from serin.stack.host.process_scan import RUN_MARK
from serin.stack.prefect import rest_api

RUN = "0d9f1f6e-6a3c-4f2f-9a55-1c2b3d4e5f60"


def test_a_process_shows_the_run_it_works_for_where_the_stack_looks() -> None:
    program = (
        "import sys; from pathlib import Path; from deployments.engine import _show_run; "
        "assert _show_run(sys.argv[1]); print(Path('/proc/self/environ').read_text())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, RUN],
        cwd=APPLICATION,
        env=waiting_environment(environment.child_environment(LAST="one")),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    shown = done.stdout.strip().split("\0")
    assert f"{RUN_MARK}={RUN}" in shown
    assert "LAST=one" in shown
    assert not [word for word in shown if word.startswith(engine.PLACEHOLDER)]


def test_a_process_without_room_for_the_mark_says_that_it_cannot_show_it() -> None:
    assert not engine._show_run(RUN)


@pytest.mark.parametrize(
    ("changes", "fits"),
    [
        ({"PREFECT__FLOW_RUN_ID": RUN, "PREFECT__CONTROL_PORT": "4711"}, True),
        ({"PREFECT_API_URL": "http://elsewhere/api"}, False),  # read when Prefect is imported
        ({"OMP_NUM_THREADS": "3"}, False),
        ({"PATH": None}, False),
    ],
)
def test_a_process_is_used_for_a_run_whose_environment_is_its_own(
    changes: dict[str, str | None], fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "_edited_since", lambda _: False)
    assert engine._fits(environment.child_environment(**changes), 0) is fits


def test_a_source_that_was_edited_or_is_gone_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "edited.py"
    file.write_text("x = 1\n")
    spec = importlib.util.spec_from_file_location("edited", file)
    assert spec is not None
    monkeypatch.setattr(engine.sys, "modules", {"edited": importlib.util.module_from_spec(spec)})
    began = time.time_ns() + 1
    while file.stat().st_ctime_ns >= began:  # a clock that is coarser than the other
        began += 1
    assert not engine._edited_since(began)
    assert engine._edited_since(file.stat().st_ctime_ns - 1)
    file.unlink()
    assert engine._edited_since(began)


def test_a_process_nobody_tells_anything_ends_with_its_worker() -> None:
    with _waiting({}) as process:
        assert process.communicate(timeout=400)[0] == ""
        assert process.returncode == 0


def test_a_worker_ends_although_its_spare_process_has_ended_before() -> None:
    from deployments.worker import Spare

    async def dismiss_ended() -> None:
        spare = Spare()
        spare._process = await anyio.open_process(["true"], stdin=subprocess.PIPE)
        await spare._process.wait()
        await spare.dismiss()

    anyio.run(dismiss_ended)


def test_a_run_prints_where_its_worker_s_death_is_not_felt(tmp_path: Path) -> None:
    program = """if True:
        import anyio, os
        from deployments import worker
        async def main():
            worker._LOG_BYTES = 3
            for _ in range(2):
                process = await worker.Spare._start()
                print(*{os.readlink(f"/proc/{process.pid}/fd/{number}") for number in (1, 2)})
                process.kill()
                await process.wait()
        anyio.run(main)
    """
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "runs.log").write_text("long")
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=APPLICATION,
        env=environment.child_environment(SERIN_HOME=str(tmp_path)),
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == [str(logs / "runs.log")] * 2, done.stderr
    assert (logs / "runs.log.1").read_text() == "long"
    assert (logs / "runs.log").stat().st_mode & 0o777 == 0o600


@pytest.mark.usefixtures("prefect_server", "home")
@pytest.mark.parametrize(
    "asked", [{}, {"SERIN_STORE": "another"}], ids=["as it is", "after it has begun anew"]
)
def test_a_waiting_process_becomes_the_run_it_is_told(asked: dict[str, str], tmp_path: Path) -> None:
    """It has the same id in the end, and the pull step's mask is on when the flow logs."""
    url = str(get_current_settings().api.url)
    deployment = _deploy(url, "flows.watch.watch")
    run = rest_api.call(url, "POST", f"/deployments/{deployment}/create_flow_run", {})
    own = {"PREFECT_API_URL": url, "AN_API_TOKEN": "hush-hush"}
    config = tmp_path / "supervisor.json"
    config.write_text(
        json.dumps(
            {
                "flow_run_id": run["id"],
                "workspace_root": str(tmp_path),
                "manifest_path": str(tmp_path / "manifest.json"),
            }
        )
    )
    order = {
        "config": str(config),
        "folder": str(tmp_path),
        "environment": environment.child_environment(**own, **asked, PREFECT__FLOW_RUN_ID=run["id"]),
    }
    with _waiting(own) as process:
        said, _ = process.communicate(json.dumps(order) + "\n", timeout=400)
    assert process.returncode == 0, said
    ended = rest_api.call(url, "GET", f"/flow_runs/{run['id']}")
    assert ended["state_type"] == "COMPLETED", said
    assert ended["run_count"] == 1
    assert json.loads((tmp_path / "manifest.json").read_text())["working_directory"] == str(APPLICATION)


def _waiting(variables: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "deployments.engine", ENGINE],
        cwd=APPLICATION,
        env=waiting_environment(environment.child_environment(**variables)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _deploy(url: str, entrypoint: str) -> str:
    flow = rest_api.call(url, "POST", "/flows/", {"name": "watch"})["id"]
    body: dict[str, Any] = {
        "name": f"by-hand-{uuid.uuid4().hex[:8]}",
        "flow_id": flow,
        "entrypoint": entrypoint,
        "pull_steps": [{"serin.stack.prefect.pull.enter_application": {}}],
    }
    return str(rest_api.call(url, "POST", "/deployments/", body)["id"])
