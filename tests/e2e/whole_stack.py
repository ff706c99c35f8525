"""A whole stack in a folder of its own, spoken to by the command as people do."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from serin.errors import PrefectGone
from serin.host.state import read_stack, running_stack
from serin.host.supervisor import Supervisor
from serin.prefect.login import stack_api
from serin.prefect.rest_api import call
from tests.fakes.gpus import write_inventory
from tests.kit import waiting
from tests.kit.commands import SERIN, serin_process
from tests.kit.threads import beside
from tests.signals import kill_9

_TRIES = 5
_BEGINS = ("STOPPED", "STARTING")  # of supervisord
_LOOK_S = 0.2  # servers have work to do on the same cores
until = partial(waiting.until, within_s=500.0, every_s=_LOOK_S)


class Stack:
    def __init__(self, home: Path, *, gpus: Sequence[str] | None = (), **variables: str) -> None:
        """`gpus`: those that are pretended, none at first. None: the machine's own."""
        self.home = home
        self.environment = {**os.environ, "SERIN_HOME": str(home), **variables}
        if gpus is not None:
            self.environment["SERIN_INVENTORY"] = str(write_inventory(home, gpus))
            self.environment.pop("CUDA_VISIBLE_DEVICES", None)
        self.command_lines: set[bytes] = set()

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*SERIN, *arguments],
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def serin(self, *arguments: str, code: int = 0) -> str:
        """All that the command says."""
        done = self._run(arguments, code)
        return done.stdout + done.stderr

    def ask(self, *arguments: str, code: int = 0) -> Any:
        """What the command answers as JSON."""
        return json.loads(self._run((*arguments, "--json"), code).stdout)

    def _run(self, arguments: tuple[str, ...], code: int) -> subprocess.CompletedProcess[str]:
        began = time.monotonic()
        done = serin_process(*arguments, env=self.environment, code=code)
        print(f"serin {' '.join(arguments)[:60]}: {time.monotonic() - began:.1f} s")
        return done

    def shell(self, line: str, folder: Path) -> subprocess.CompletedProcess[str]:
        """A line as people type it in a shell that finds `serin` and `prefect`."""
        programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        began = time.monotonic()
        done = subprocess.run(
            ["bash", "-c", line],
            env={**self.environment, "PATH": programs},
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=600,
        )
        print(f"{line[-60:]}: {time.monotonic() - began:.1f} s")
        return done

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """By the server's own interface. One that has too much to do is asked again."""
        for _ in range(_TRIES - 1):
            with suppress(PrefectGone):
                return call(stack_api(running_stack(self.home)), method, path, body)
        return call(stack_api(running_stack(self.home)), method, path, body)

    def state(self, run: str) -> str:
        return str(self.call("GET", f"/flow_runs/{run}")["state_type"])

    def begin(self, spec: Path, *options: str) -> str:
        """The id of a new run."""
        said = self.serin("run", str(spec), "--no-follow", *options)
        return next(word.rpartition("/")[2] for word in said.split() if "/runs/flow-run/" in word)

    @property
    def login(self) -> str:
        return (self.home / "prefect-login").read_text().strip()

    def is_well(self) -> bool:
        """Its supervisor runs, and no part has ended. A release that was just added may have no process yet."""
        up = read_stack(self.home)
        if up is None or not up.is_alive:
            return False
        return all(child.pid or child.detail in _BEGINS for child in Supervisor(self.home).children())

    def pids(self) -> dict[str, int | None]:
        return {child.name: child.pid for child in Supervisor(self.home).children()}

    def processes(self) -> list[int]:
        """Found by their environment, without any of the code under test."""
        mark = f"SERIN_STACK={self.home}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:
                continue
        return found

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Every command line that any user of the machine could have read meanwhile is kept."""
        done = threading.Event()

        def look() -> None:
            while not done.wait(_LOOK_S):
                for place in Path("/proc").glob("[0-9]*/cmdline"):
                    with suppress(OSError):
                        self.command_lines.add(place.read_bytes())

        with beside(look, stop=done):
            yield

    def kill(self) -> None:
        """Whatever is left."""
        kill_9(*self.processes())
