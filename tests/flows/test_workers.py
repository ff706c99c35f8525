"""The processes that wait for a run (deployments/workers); a run is given to them by hand, on a real server. e2e/ tests
the worker that does it."""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import anyio
import pytest
from prefect.settings import get_current_settings
from prefect.workers.base import BaseWorker

from deployments.workers import standby, warm_process
from deployments.workers.standby import APPLICATION, Standby, end_group
from deployments.workers.warm_process import Sources
from serin.errors import PrefectRefused
from serin.machine import environment
from serin.stack.host.run_processes import RUN_MARK, record_run, run_processes
from serin.stack.prefect import rest_api
from serin.stack.prefect.processes import WORKER_TYPE
from tests.e2e.whole_stack import until
from tests.signals import hit

RUN = "0d9f1f6e-6a3c-4f2f-9a55-1c2b3d4e5f60"
_FORKS = "import os, sys; child = os.fork(); child and print(child, flush=True); sys.stdin.read()"


def test_prefect_finds_the_worker_type_by_the_entry_point() -> None:
    found = BaseWorker.get_worker_class_from_type(WORKER_TYPE)
    assert found is not None
    assert Path(inspect.getfile(found)) == APPLICATION / "deployments" / "workers" / "worker.py"


def test_a_recorded_process_and_what_it_forked_belong_to_its_run(tmp_path: Path) -> None:
    """Also after the process was killed; not when its pid has become another process."""
    with subprocess.Popen(
        [sys.executable, "-c", _FORKS],
        env=environment.child_environment(SERIN_STACK=str(tmp_path)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        assert run_processes(tmp_path) == {}
        record_run(tmp_path, RUN, process.pid)
        found = run_processes(tmp_path)[RUN]
        assert (found.engines, found.others) == ((process.pid,), (child,))
        process.kill()
        process.wait(10)
        left = run_processes(tmp_path)[RUN]
        assert (left.engines, left.others) == ((), (child,))
        hit(child)
    (tmp_path / "stack" / "runs" / str(os.getpid())).write_text(f"{RUN} 1\n")  # another process had this pid
    until(lambda: run_processes(tmp_path) == {}, "the killed child is gone")


@pytest.mark.parametrize(
    ("changes", "fits"),
    [
        ({"PREFECT__FLOW_RUN_ID": RUN, "PREFECT__WORKER_NAME": "ada"}, True),
        ({"PREFECT_API_URL": "http://elsewhere/api"}, False),  # read when Prefect is imported
        ({"OMP_NUM_THREADS": "3"}, False),
        ({"PATH": None}, False),
    ],
)
def test_a_process_is_used_for_a_run_whose_environment_is_its_own(
    changes: dict[str, str | None], fits: bool
) -> None:
    assert warm_process.fits(environment.child_environment(**changes)) is fits


def test_a_source_that_was_edited_replaced_or_removed_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, copy = tmp_path / "edited.py", tmp_path / "copy.py"
    file.write_text("x = 1\n")
    copy.write_text("x = 2\n")
    os.utime(copy, (1, 1))  # as archives and copies with their times have it
    spec = importlib.util.spec_from_file_location("edited", file)
    assert spec is not None
    monkeypatch.setattr(warm_process.sys, "modules", {"edited": importlib.util.module_from_spec(spec)})
    written = file.stat().st_mtime_ns
    seen = Sources.of_this_process(written)
    (tmp_path / "linked.py").hardlink_to(file)  # into another environment
    assert seen.are_unchanged()
    assert not Sources.of_this_process(written - 1).are_unchanged()
    copy.replace(file)
    assert not seen.are_unchanged()
    assert Sources.of_this_process(written).are_unchanged()
    file.unlink()
    assert not seen.are_unchanged()
    assert not Sources.of_this_process(written).are_unchanged()


def test_a_process_that_gets_no_run_ends_with_its_worker() -> None:
    with _waiting({}) as process:
        assert process.communicate(timeout=400)[0] == ""
        assert process.returncode == 0


def test_a_worker_ends_although_its_waiting_process_has_ended_before() -> None:
    async def dismiss_ended() -> None:
        ended = Standby()
        ended._process = await anyio.open_process(["true"], stdin=subprocess.PIPE)
        await ended._process.wait()
        await ended.dismiss()

    anyio.run(dismiss_ended)


def test_a_group_that_ignores_sigterm_is_killed() -> None:
    deaf = "trap '' TERM; echo here; while :; do sleep 0.1; done"

    async def end() -> int:
        process = await anyio.open_process(["sh", "-c", deaf], start_new_session=True)
        assert process.stdout is not None
        await process.stdout.receive()
        await end_group(process.pid, grace_s=0.1)
        code = await process.wait()
        await process.aclose()
        return code

    assert anyio.run(end) == -9


def test_a_run_prints_where_its_worker_s_death_is_not_felt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standby, "_LOG_BYTES", 3)
    monkeypatch.setenv("SERIN_HOME", str(tmp_path))
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "runs.log").write_text("long")

    async def start() -> set[str]:
        process = await standby._start("this_module_is_missing", environment.child_environment())
        try:
            return _outputs(process.pid)
        finally:
            await standby._end(process)

    assert anyio.run(start) == {str(logs / "runs.log")}
    assert (logs / "runs.log.1").read_text() == "long"
    assert (logs / "runs.log").stat().st_mode & 0o777 == 0o600


@pytest.mark.usefixtures("prefect_server", "home")
@pytest.mark.parametrize("asked", [{}, {"SERIN_STORE": "another"}], ids=["as it is", "replaced by a new one"])
def test_a_waiting_process_becomes_the_run_it_is_given(asked: dict[str, str]) -> None:
    url = str(get_current_settings().api.url)
    deployment = _deploy(url, "flows.watch.watch")
    run = rest_api.call(url, "POST", f"/deployments/{deployment}/create_flow_run", {})
    own = {"PREFECT_API_URL": url, "AN_API_TOKEN": "hush-hush"}
    variables = environment.child_environment(**own, **asked, **{RUN_MARK: run["id"]})
    with _waiting(own) as process:
        said, _ = process.communicate(json.dumps(variables) + "\n", timeout=400)
    assert process.returncode == 0, said
    ended = rest_api.call(url, "GET", f"/flow_runs/{run['id']}")
    assert ended["state_type"] == "COMPLETED", said
    assert ended["run_count"] == 1


@pytest.mark.usefixtures("prefect_server")
def test_a_pool_of_another_type_is_replaced() -> None:
    url, name = str(get_current_settings().api.url), f"pool-{uuid.uuid4().hex[:8]}"
    for kind in ("process", WORKER_TYPE, WORKER_TYPE):
        rest_api.ensure_pool(url, name, kind=kind, template={}, slots=2)
        found = rest_api.call(url, "GET", f"/work_pools/{name}")
        assert (found["type"], found["concurrency_limit"]) == (kind, 2)
    rest_api.call(url, "DELETE", f"/work_pools/{name}")
    with pytest.raises(PrefectRefused):
        rest_api.call(url, "GET", f"/work_pools/{name}")


def _outputs(pid: int) -> set[str]:
    return {str(Path(f"/proc/{pid}/fd/{number}").readlink()) for number in (1, 2)}


def _waiting(variables: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "deployments.workers.warm_process"],
        cwd=APPLICATION,
        env=environment.child_environment(**variables),
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
