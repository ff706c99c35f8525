"""The processes of runs (deployments/workers); a run is given to them by hand, on a real server. e2e/ tests the worker
that does it."""

import contextlib
import gc
import importlib.util
import inspect
import os
import signal
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from prefect.settings import get_current_settings
from prefect.workers.base import BaseWorker

from deployments.workers import run_output, standby, warm_process
from deployments.workers.standby import APPLICATION, Source, Standby, end_group
from deployments.workers.warm_process import Sources
from serin.errors import PrefectRefused
from serin.host.process_scan import RUN_MARK, record_run, run_processes
from serin.machine import environment
from serin.prefect import rest_api
from serin.prefect.processes import WORKER_TYPE
from tests.kit.waiting import until
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


@pytest.fixture
def quick_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sources whose forks run tests/fakes/run_engine.py; returns the home of their records."""
    home = tmp_path / "home"
    monkeypatch.setenv("SERIN_HOME", str(home))
    monkeypatch.setenv("SERIN_STACK", str(home))
    monkeypatch.setattr(standby, "_WAITING", "tests.fakes.warm_source")
    monkeypatch.setattr(standby, "_ENGINE", "tests.fakes.run_engine")
    return home


def _variables(run: str, asked: str, **more: str) -> dict[str, str]:
    return environment.child_environment(PREFECT__FLOW_RUN_ID=run, PREFECT__TEST=asked, **more)


@contextlib.asynccontextmanager
async def _source() -> AsyncIterator[Source]:
    source = await Source.start(environment.child_environment())
    try:
        yield source
    finally:
        await source.end()


def test_a_source_without_runs_ends_with_its_worker(quick_source: Path) -> None:
    async def story() -> int:
        source = await Source.start(environment.child_environment())
        source._channel.shutdown(socket.SHUT_RDWR)
        with anyio.fail_after(60):
            code = await source._process.wait()
        await source.end()
        return code

    assert anyio.run(story) == 0


def test_every_run_gets_its_own_fork_and_reports_its_exit_code(quick_source: Path) -> None:
    async def story() -> list[tuple[int, int]]:
        async with _source() as source:
            forks = [
                await source.fork(name, _variables(name, code)) for name, code in (("a", "0"), ("b", "7"))
            ]
            with anyio.fail_after(60):
                return [(fork.pid, await fork.wait()) for fork in forks if fork is not None]

    (first, code), (second, other_code) = anyio.run(story)
    assert (code, other_code) == (0, 7)
    assert first != second
    written = (quick_source / "logs" / "runs.log").read_text().splitlines()
    assert sorted(line.split() for line in written) == [["a", str(first)], ["b", str(second)]]


def test_a_fork_is_recorded_and_leads_its_own_session_before_the_worker_knows_it(quick_source: Path) -> None:
    async def story() -> tuple[int, int, Any, int]:
        async with _source() as source:
            fork = await source.fork(RUN, _variables(RUN, "wait"))
            assert fork is not None
            found = run_processes(quick_source)
            session = os.getsid(fork.pid)
            await end_group(fork.pid, grace_s=30.0)
            with anyio.fail_after(60):
                return fork.pid, session, found[RUN].engines, await fork.wait()

    pid, session, engines, code = anyio.run(story)
    assert (session, engines, code) == (pid, (pid,), -signal.SIGTERM)


def test_a_run_survives_the_death_of_its_source_and_its_end_is_seen(quick_source: Path) -> None:
    async def story() -> int:
        async with _source() as source:
            fork = await source.fork(RUN, _variables(RUN, "wait"))
            assert fork is not None
            hit(source._process.pid)
            with anyio.fail_after(60):
                await source._process.wait()
                while await source.fork("later", {}) is not None:  # noqa: ASYNC110 (its socket's end is read)
                    await anyio.sleep(0.01)
            assert run_processes(quick_source)[RUN].engines == (fork.pid,)
            hit(fork.pid)
            with anyio.fail_after(60):
                return await fork.wait()

    assert anyio.run(story) != 0  # the worker then asks the server how the run ended


def test_a_run_gets_a_new_process_when_its_source_has_ended(quick_source: Path) -> None:
    async def story() -> int:
        keeper = Standby()
        await keeper.prepare()
        ended = keeper._source
        hit(ended._process.pid)
        await ended._process.wait()
        process = await keeper.take(RUN, _variables(RUN, "5"))
        try:
            assert keeper._source not in (None, ended)
            with anyio.fail_after(60):
                return await process.wait()
        finally:
            await process.aclose()
            await keeper.dismiss()

    assert anyio.run(story) == 5


def test_a_run_with_another_environment_replaces_the_fork_by_a_new_program(quick_source: Path) -> None:
    async def story() -> tuple[bytes, int]:
        async with _source() as source:
            fork = await source.fork(RUN, _variables(RUN, "wait", OMP_NUM_THREADS="3"))
            assert fork is not None
            with anyio.fail_after(60):
                shown = await anyio.to_thread.run_sync(_environment_of_the_engine, fork.pid)
                await end_group(fork.pid, grace_s=30.0)
                return shown, await fork.wait()

    shown, code = anyio.run(story)
    assert b"OMP_NUM_THREADS=3" in shown.split(b"\0")
    assert code == -signal.SIGTERM


def _environment_of_the_engine(pid: int) -> bytes:
    program, shown = Path(f"/proc/{pid}/cmdline"), Path(f"/proc/{pid}/environ")
    until(lambda: b"tests.fakes.run_engine" in program.read_bytes(), "the engine as a new program")
    return shown.read_bytes()


def test_a_process_with_threads_or_an_open_gpu_is_not_forked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = threading.Event()
    monkeypatch.setattr(warm_process.threading, "active_count", lambda: 1)
    assert warm_process.survives_a_fork()
    monkeypatch.setattr(warm_process, "_GPU_FILES", str(tmp_path))
    assert warm_process.survives_a_fork()
    with (tmp_path / "nvidia0").open("w"):
        assert not warm_process.survives_a_fork()
    monkeypatch.undo()
    thread = threading.Thread(target=done.wait)
    thread.start()
    try:
        assert not warm_process.survives_a_fork()
    finally:
        done.set()
        thread.join()


def test_what_is_imported_later_is_watched_for_changes_and_may_be_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "imported_late.py"
    module.write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(warm_process, "_IMPORTED_LATER", ("imported_late", "is_not_installed"))
    imports = warm_process.Imports()
    imports.add(())
    assert (str(module) in imports.sources.files, imports.idle_s) == (False, warm_process._IDLE_S)
    imports.add_next()
    assert str(module) in imports.sources.files
    imports.add_next()
    gc.unfreeze()
    assert imports.idle_s is None
    assert gc.isenabled()


_IMPORT_ALL = """
from deployments.workers import warm_process

imports = warm_process.Imports()
imports.add(warm_process._IMPORTED)
while imports.idle_s is not None:
    imports.add_next()
print(warm_process.survives_a_fork(), imports.sources.are_unchanged())
"""


def test_a_process_that_has_imported_everything_is_still_forked() -> None:
    said = subprocess.run([sys.executable, "-c", _IMPORT_ALL], capture_output=True, text=True, check=True)
    assert said.stdout.split() == ["True", "True"]


def test_a_group_that_ignores_sigterm_is_killed() -> None:
    deaf = "trap '' TERM; echo here; while :; do sleep 0.1; done"

    async def end() -> int:
        process = await anyio.open_process(["sh", "-c", deaf], start_new_session=True)
        await process.stdout.receive()
        await end_group(process.pid, grace_s=0.1)
        code = await process.wait()
        await process.aclose()
        return code

    assert anyio.run(end) == -9


def test_a_long_log_of_runs_is_put_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_output, "LONGEST_BYTES", 3)
    monkeypatch.setenv("SERIN_HOME", str(tmp_path))
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "runs.log").write_text("long")
    with run_output.open_run_output() as output:
        assert output.name == str(logs / "runs.log")
    assert (logs / "runs.log.1").read_text() == "long"
    assert (logs / "runs.log").stat().st_mode & 0o777 == 0o600


@pytest.mark.usefixtures("prefect_server", "home")
def test_forks_of_a_warm_process_are_runs_of_prefect() -> None:
    """The second one is replaced by a new program, because it wants another environment."""
    url = str(get_current_settings().api.url)
    deployment = _deploy(url, "flows.watch.watch")
    own = {"PREFECT_API_URL": url, "AN_API_TOKEN": "hush-hush"}
    runs = [rest_api.call(url, "POST", f"/deployments/{deployment}/create_flow_run", {}) for _ in range(2)]

    async def story() -> list[int]:
        source = await Source.start(environment.child_environment(**own))
        try:
            codes = []
            for run, asked in zip(runs, ({}, {"SERIN_STORE": "another"}), strict=True):
                variables = environment.child_environment(**own, **asked, **{RUN_MARK: run["id"]})
                with anyio.fail_after(400):
                    fork = await source.fork(run["id"], variables)
                    codes.append(await fork.wait())
            return codes
        finally:
            await source.end()

    said = environment.home() / "logs" / "runs.log"
    assert anyio.run(story) == [0, 0], said.read_text()
    for run in runs:
        ended = rest_api.call(url, "GET", f"/flow_runs/{run['id']}")
        assert (ended["state_type"], ended["run_count"]) == ("COMPLETED", 1), said.read_text()


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


def _deploy(url: str, entrypoint: str) -> str:
    flow = rest_api.call(url, "POST", "/flows/", {"name": "watch"})["id"]
    body: dict[str, Any] = {
        "name": f"by-hand-{uuid.uuid4().hex[:8]}",
        "flow_id": flow,
        "entrypoint": entrypoint,
        "pull_steps": [{"serin.prefect.pull.enter_application": {}}],
    }
    return str(rest_api.call(url, "POST", "/deployments/", body)["id"])
