"""Processes that need Prefect's prepared database at the same time: one makes it, the others use it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from serin.stack.prefect import prepared

# A real process; only the half minute of Prefect's work is replaced, by a database that appears when a file allows it.
_PROCESS = """
import logging, os, sqlite3, sys, time
from pathlib import Path
from serin.stack.prefect import template

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


def _until(holds: object, processes: list[subprocess.Popen[str]]) -> None:
    assert callable(holds)
    deadline = time.monotonic() + 120
    while not holds():
        assert all(process.poll() is None for process in processes), "a process has ended early"
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_of_two_processes_one_makes_the_template_and_the_other_uses_it(scene: Scene) -> None:
    first, second = scene.start(), scene.start()
    _until(lambda: scene.makers() and (scene.waits(0) or scene.waits(1)), [first, second])
    scene.may_end.touch()
    assert (first.wait(60), second.wait(60)) == (0, 0)
    assert len(scene.makers()) == 1
    answers = {scene.log(number).read_text().splitlines()[-1] for number in (0, 1)}
    assert len(answers) == 1
    assert prepared.revision(Path(answers.pop())) == "1"


def test_a_process_that_waits_makes_the_template_when_the_maker_is_killed(scene: Scene) -> None:
    first = scene.start()
    _until(scene.makers, [first])
    second = scene.start()
    _until(lambda: scene.waits(1), [first, second])
    assert scene.makers() == [first.pid]
    first.kill()
    _until(lambda: len(scene.makers()) == 2, [second])
    leftovers = [path.name for path in (scene.cache / "serin" / "prefect").glob(".new-*")]
    assert leftovers == [f".new-{second.pid}"]  # what the killed one left was removed
    scene.may_end.touch()
    assert second.wait(60) == 0
    assert scene.makers() == [first.pid, second.pid]
