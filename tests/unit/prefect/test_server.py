"""The stack's Prefect server: its secret, what it keeps, and its prepared database."""

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
from prefect.settings import Settings

from serin.errors import StackError
from serin.host.standing import stack_environment
from serin.prefect import prepared
from serin.prefect.login import login_file, make_login, read_login
from serin.prefect.processes import prefect_environment, prefect_server
from tests.kit import commands
from tests.kit.waiting import running, until

URL = "http://127.0.0.1:4200/api"


def test_a_login_is_made_once_and_only_its_owner_can_read_it(tmp_path: Path) -> None:
    assert read_login(tmp_path) is None
    made = make_login(tmp_path)
    assert make_login(tmp_path) == read_login(tmp_path) == made
    user, password = made.split(":")
    assert user == "serin"
    assert len(password) >= 40
    assert stat.S_IMODE(login_file(tmp_path).stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["prefect-login"]


def test_all_who_make_it_at_once_get_the_same(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(make_login, [tmp_path] * 32))) == 1


def test_two_homes_have_two_logins(tmp_path: Path) -> None:
    assert make_login(tmp_path / "one") != make_login(tmp_path / "two")


def test_a_login_that_others_could_read_is_refused(tmp_path: Path) -> None:
    make_login(tmp_path)
    login_file(tmp_path).chmod(0o644)
    with pytest.raises(StackError, match=r"can be read by others; run `serin down`, remove it"):
        make_login(tmp_path)


@pytest.mark.parametrize("content", ["", "password", "serin:", "a:b:c"])
def test_a_file_without_a_login_is_refused(tmp_path: Path, content: str) -> None:
    login_file(tmp_path).touch(mode=0o600)
    login_file(tmp_path).write_text(content)
    with pytest.raises(StackError, match="contains no secret"):
        read_login(tmp_path)


def test_our_own_server_wants_what_its_clients_bring_and_pickles_nothing(tmp_path: Path) -> None:
    server, client = prefect_server(tmp_path, 4200).environment, prefect_environment(tmp_path, URL, own=True)
    login = read_login(tmp_path)
    assert server["PREFECT_SERVER_API_AUTH_STRING"] == client["PREFECT_API_AUTH_STRING"] == login
    assert server["PREFECT_SERVER_CSRF_PROTECTION_ENABLED"] == "true"
    assert client["PREFECT_RESULTS_DEFAULT_SERIALIZER"] == "json"
    assert "PREFECT_SERVER_API_AUTH_STRING" not in client


def test_nobody_elses_server_gets_our_login_and_no_served_model_gets_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_API_KEY", "theirs")
    foreign = prefect_environment(tmp_path, "https://prefect.example/api", own=False)
    assert foreign["PREFECT_API_KEY"] == "theirs"
    assert not login_file(tmp_path).exists()
    assert "PREFECT_API_KEY" not in stack_environment(tmp_path)
    assert "PREFECT_API_KEY" not in prefect_environment(tmp_path, URL, own=True)


_ABOUT = ("PREFECT_SERVER_EVENTS_", "PREFECT_SERVER_SERVICES_")


def _settings(home: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    for name, value in prefect_server(home, 4200).environment.items():
        if name.startswith(_ABOUT):
            monkeypatch.setenv(name, value)
    return Settings()


def test_events_are_kept_for_a_day_and_runs_for_a_month(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = _settings(tmp_path, monkeypatch).server
    vacuum = server.services.db_vacuum
    assert server.events.retention_period == timedelta(days=1)
    assert {"events", "flow_runs"} <= vacuum.enabled_vacuum_types
    assert vacuum.retention_period == timedelta(days=30)
    assert server.services.event_persister.batch_size == 200


def test_the_caller_decides_how_long_runs_and_events_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_SERVER_SERVICES_DB_VACUUM_RETENTION_PERIOD", "7776000")
    monkeypatch.setenv("PREFECT_SERVER_EVENTS_RETENTION_PERIOD", "P7D")
    server = _settings(tmp_path, monkeypatch).server
    assert server.services.db_vacuum.retention_period == timedelta(days=90)
    assert server.events.retention_period == timedelta(days=7)


# A transaction waits for the write lock, and a cursor of its connection is garbage:
# the thread that collects it waits too.
PROGRAM = """
import gc, sqlite3, sys, threading, time
from serin.prefect import server

class Cycle:
    pass

def connect():
    return sqlite3.connect(sys.argv[1], timeout=8, isolation_level=None, check_same_thread=False)

holder, waiter, ended = connect(), connect(), []
holder.execute("CREATE TABLE numbers (number)")
holder.execute("INSERT INTO numbers VALUES (1), (2)")
{collect}
left = Cycle()
left.self, left.cursor = left, waiter.execute("VALUES (1), (2)")  # a row is left: the statement is active
holder.execute("BEGIN IMMEDIATE")

def wait():
    try:
        waiter.execute("INSERT INTO numbers VALUES (3)")
        ended.append("written")
    except sqlite3.OperationalError as error:
        ended.append(str(error))

writing = threading.Thread(target=wait)
writing.start()
time.sleep(1)  # it is in SQLite's busy handler; too short a wait hides the stall and fails nothing
del left
{garbage}
time.sleep(3)
holder.execute("COMMIT")
writing.join()
print(ended[0])
"""


def run(tmp_path: Path, *, collect: str, garbage: str) -> str:
    program = PROGRAM.format(collect=collect, garbage=garbage)
    return commands.run(sys.executable, "-c", program, tmp_path / "db").stdout.strip()


def test_the_server_s_garbage_does_not_stop_its_loop(tmp_path: Path) -> None:
    assert run(tmp_path, collect="server.collect_beside()", garbage="") == "written"


def test_garbage_that_the_loop_collects_does(tmp_path: Path) -> None:
    assert run(tmp_path, collect="", garbage="gc.collect()") == "database is locked"


# A real process; only the half minute of Prefect's work is replaced, by a database that appears when a file allows it.
_PROCESS = """
import logging, os, sqlite3, sys, time
from pathlib import Path
from serin.prefect import template

def make(folder, digest, whole):
    with open(os.environ["MADE"], "a") as made:
        made.write(f"{os.getpid()}\\n")
    (folder / f".new-{os.getpid()}").mkdir()
    while not Path(os.environ["MAY_END"]).exists():
        time.sleep(0.01)
    with sqlite3.connect(whole) as database:
        database.execute("CREATE TABLE alembic_version (version_num TEXT)")
        database.execute("INSERT INTO alembic_version VALUES ('1')")

template._make_template = make
logging.basicConfig(stream=sys.stdout, format="%(message)s", level=logging.INFO)
print(template.obtain_template(), flush=True)
"""


class Scene:
    """A cache folder, and processes that need a template in it."""

    def __init__(self, folder: Path) -> None:
        self.cache, self.made, self.may_end = folder / "cache", folder / "made", folder / "may-end"
        self._folder = folder
        self.started: list[subprocess.Popen[str]] = []

    def start(self) -> subprocess.Popen[str]:
        places = {"XDG_CACHE_HOME": self.cache, "MADE": self.made, "MAY_END": self.may_end}
        log = self.log(len(self.started)).open("w")
        process = subprocess.Popen(
            [sys.executable, "-u", "-c", _PROCESS],
            env={**os.environ, **{name: str(path) for name, path in places.items()}},
            stdout=log,
            stderr=subprocess.STDOUT,
            text=True,
        )
        log.close()
        self.started.append(process)
        return process

    def log(self, number: int) -> Path:
        return self._folder / f"{number}.log"

    def makers(self) -> list[int]:
        return [int(line) for line in self.made.read_text().split()] if self.made.exists() else []

    def waits(self, number: int) -> bool:
        return "waiting for it" in self.log(number).read_text()


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    made = Scene(tmp_path)
    yield made
    for process in made.started:
        process.kill()
        process.wait()


def test_of_two_processes_one_makes_the_template_and_the_other_uses_it(scene: Scene) -> None:
    first, second = scene.start(), scene.start()
    until(lambda: scene.makers() and (scene.waits(0) or scene.waits(1)), alive=running(first, second))
    scene.may_end.touch()
    assert (first.wait(60), second.wait(60)) == (0, 0)
    assert len(scene.makers()) == 1
    answers = {scene.log(number).read_text().splitlines()[-1] for number in (0, 1)}
    assert len(answers) == 1
    assert prepared.revision(Path(answers.pop())) == "1"


def test_a_process_that_waits_makes_the_template_when_the_maker_is_killed(scene: Scene) -> None:
    first = scene.start()
    until(scene.makers, alive=running(first))
    second = scene.start()
    until(lambda: scene.waits(1), alive=running(first, second))
    assert scene.makers() == [first.pid]
    first.kill()
    until(lambda: len(scene.makers()) == 2, alive=running(second))
    leftovers = [path.name for path in (scene.cache / "serin" / "prefect").glob(".new-*")]
    assert leftovers == [f".new-{second.pid}"]  # what the killed one left was removed
    scene.may_end.touch()
    assert second.wait(60) == 0
    assert scene.makers() == [first.pid, second.pid]
