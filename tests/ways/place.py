"""A place where runs work, as the person who starts them sees it: commands on the machine that sends, the Prefect
server and the store. Each place but the same machine shares no project folder with its workers."""

from __future__ import annotations

import os
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serin.errors import PrefectGone
from serin.host.state import running_stack
from serin.prefect.rest_api import Api, call
from serin.store.file_systems import file_system
from serin.store.store import Store
from tests.e2e.whole_stack import Stack
from tests.kit.waiting import until
from tests.ways.projects import write_index

ROOT = Path(__file__).resolve().parents[2]
PREFECT = (sys.executable, "-m", "prefect", "--no-prompt")
COMMAND_S = 900.0
NO_STORE = "s3://serin-no-such-bucket/prefix"


@dataclass(frozen=True, slots=True)
class Done:
    """How a command ended. `said`: its output and its errors."""

    code: int
    said: str


class Place(ABC):
    """`desk`: a folder of the machine that sends, which exists there alone."""

    name: str
    placed = False  # whether commands ask for a worker that suits each stage

    def __init__(self, desk: Path, api: Api) -> None:
        self.desk, self.api = desk, api

    @abstractmethod
    def run(self, *command: str | Path, cwd: Path, **variables: str) -> Done:
        """A command of the person who sends."""

    @property
    @abstractmethod
    def store(self) -> Store:
        """Use it within `inside`."""

    def inside(self) -> AbstractContextManager[None]:
        """This process reaches the Prefect server and the store within the block."""
        return nullcontext()

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """Prefect's API. A busy server is asked again."""
        with self.inside():
            for _ in range(4):
                try:
                    return call(self.api, method, path, body)
                except PrefectGone:
                    continue
            return call(self.api, method, path, body)

    def versions(self, model: str) -> list[int]:
        with self.inside():
            return list(self.store.versions(model))

    def write_project(self, kind: str, model: str) -> Path:
        """The folder of a new project, on the desk."""
        folder = self.desk / model
        words = (sys.executable, "-m", "tests.ways.projects", kind, folder, model)
        done = self.run(*words, cwd=ROOT, PYTHONPATH=str(ROOT))
        assert done.code == 0, done.said
        return folder

    def write(self, path: Path, text: str) -> None:
        script = "import pathlib, sys; pathlib.Path(sys.argv[1]).write_text(sys.argv[2])"
        done = self.run(sys.executable, "-c", script, path, text, cwd=ROOT)
        assert done.code == 0, done.said

    def publish_spec(self, model: str, spec: Mapping[str, Any]) -> str | None:
        """The URL of a spec in the object store, beside its table; None where there is no object store."""
        return None

    def stop_schedules(self) -> None:
        """Serin's own schedules would take the cores from what is tried."""
        for name in ("watch/scheduled", "retrain/scheduled"):
            found = self.call("GET", f"/deployments/name/{name}")
            self.call("PATCH", f"/deployments/{found['id']}", {"paused": True})


class Machine(Place):
    """The stack of `serin up`, and the person on the same machine."""

    name = "machine"

    def __init__(self, stack: Stack, desk: Path) -> None:
        running = running_stack(stack.home)
        super().__init__(desk, Api(running.prefect_api_url, stack.login))
        self._stack = stack

    def run(self, *command: str | Path, cwd: Path, **variables: str) -> Done:
        env = {**self._stack.environment, "PREFECT_API_URL": self.api.url, **variables}
        env["PREFECT_API_AUTH_STRING"] = self._stack.login
        return run_here(command, cwd, env)

    @property
    def store(self) -> Store:
        return Store(str(self._stack.home / "store"))


class Elsewhere(Place):
    """Workers on other machines, an object store, and a person with the variables that the docs name."""

    def __init__(self, desk: Path, api: Api, variables: Mapping[str, str]) -> None:
        super().__init__(desk, api)
        self.variables = {
            **sender_variables(desk),
            **variables,
            "PREFECT_API_URL": api.url,
            "PREFECT_API_AUTH_STRING": api.login or "",
        }

    def run(self, *command: str | Path, cwd: Path, **variables: str) -> Done:
        return run_here(command, cwd, {**self.variables, **variables})

    @property
    def store(self) -> Store:
        return Store.open()

    def publish_spec(self, model: str, spec: Mapping[str, Any]) -> str | None:
        import pyarrow as pa
        import pyarrow.parquet as pq
        import yaml

        from tests.fakes.small_pipeline import parcels

        url, table = f"{self.variables['SERIN_STORE']}-specs/{model}", pa.BufferOutputStream()
        pq.write_table(parcels(3000), table)
        files = {
            "spec.yaml": yaml.safe_dump(dict(spec)).encode(),
            "parcels.parquet": table.getvalue().to_pybytes(),
        }
        with self.inside():
            for name, content in files.items():
                system, path = file_system(f"{url}/{name}")
                system.pipe_file(path, content)
        return f"{url}/spec.yaml"


def sender_variables(desk: Path) -> dict[str, str]:
    """The environment of a person who has Serin installed, and a home that the workers do not see."""
    return {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": str(desk),
        "LANG": os.environ.get("LANG", "C.UTF-8"),
        "SERIN_HOME": str(desk / "home"),
        "PREFECT_HOME": str(desk / "prefect"),
        "OMP_NUM_THREADS": "1",
        "DO_NOT_TRACK": "1",
    }


def run_here(command: tuple[str | Path, ...], cwd: Path, env: Mapping[str, str]) -> Done:
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd, env=dict(env), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        timeout=COMMAND_S, check=False,
    )  # fmt: skip
    return Done(done.returncode, done.stdout)


def wait_for_deployments(place: Place) -> None:
    def deployed() -> bool:
        found = place.call("POST", "/deployments/filter", {})
        return {"inline", "placed"} <= {each["name"] for each in found}

    until(deployed, "the deployments", within_s=300.0, every_s=0.5)


@contextmanager
def machine(folder: Path) -> Iterator[Machine]:
    """Starts a stack, and ends it after the block."""
    index, desk = folder / "index", folder / "desk"
    write_index(index)
    desk.mkdir()
    nowhere = {
        "AWS_ENDPOINT_URL": "http://127.0.0.1:9",
        "AWS_ACCESS_KEY_ID": "none",
        "AWS_SECRET_ACCESS_KEY": "none",
    }
    stack = Stack(folder / "home", UV_DEFAULT_INDEX=index.as_uri(), **nowhere)
    try:
        stack.serin("up")
        place = Machine(stack, desk)
        wait_for_deployments(place)
        yield place
        stack.serin("down")
    finally:
        stack.kill()
