"""A whole stack with two pretended GPUs and small pipelines on it, to hit at.

The pipelines train by a script, which needs no GPU and is given one all the same: leases, queue and pools are real.
"""

import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from serin.errors import StackError
from serin.host.exec_wrapper import environment_of
from serin.host.process_scan import RUN_MARK, RunProcesses, run_processes, stack_processes
from serin.host.state import POOLS, Stack, read_stack
from serin.host.supervisor import Supervisor
from serin.host.wiring import CONTROLLER, PREFECT, RECONCILER, worker_name
from serin.machine.leases import Holder, holders
from serin.machine.ports import free_ports
from serin.machine.process import start_ticks
from serin.prefect.login import make_login, stack_api
from serin.prefect.processes import prefect_server
from serin.prefect.rest_api import Api, answers, call
from serin.store.store import Store
from tests.fakes.gpus import write_inventory
from tests.fakes.small_pipeline import small_spec, write_spec
from tests.kit.commands import serin_process
from tests.signals import kill_9

T = TypeVar("T")

DEVICES = ("GPU-a", "GPU-b")
FINAL = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")
# Least squares as ONNX, in steps that are saved: a training that can be killed inside and taken up again.
TRAIN = """
import fcntl, json, os, sys, time
import numpy as np, onnx
from onnx import TensorProto, helper, numpy_helper
from serin.training.foreign.own_script import this_run
run = this_run()
saved = run.checkpoints / "step.json"
if os.environ.get("RANK", "0") != "0":  # has nothing to do, and is there to be killed
    while not saved.exists() or json.loads(saved.read_text()) < run.options["steps"]:
        time.sleep(0.05)
    sys.exit(0)
for device in os.environ["CUDA_VISIBLE_DEVICES"].split(","):  # a lock of another kind: nobody else may be here
    witness = os.open(os.path.join(os.environ["SERIN_HOME"], f"{device}.witness"), os.O_RDWR | os.O_CREAT)
    try:
        fcntl.lockf(witness, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        sys.exit(f"{device} is used by somebody else")
step = json.loads(saved.read_text()) if saved.exists() else 0
with (run.checkpoints / "starts.log").open("a") as log:
    log.write(f"{step}\\n")
while step < run.options["steps"]:
    time.sleep(0.05)
    step += 1
    saved.with_suffix(".new").write_text(json.dumps(step))
    saved.with_suffix(".new").replace(saved)
train = run.split("train")
weights, *_ = np.linalg.lstsq(np.asarray(train.num), np.asarray(train.target).reshape(-1) * 2 - 1, rcond=None)
weights = numpy_helper.from_array(np.float32(weights).reshape(-1, 1), "w")
given = helper.make_tensor_value_info("num", TensorProto.FLOAT, ["batch", train.num.shape[1]])
answer = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 1])
graph = helper.make_graph([helper.make_node("MatMul", ["num", "w"], ["logits"])], "g", [given], [answer], [weights])
onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), run.output / "model.onnx")
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    id: str
    name: str
    state: str
    since: float
    message: str
    flow: str
    parent: str | None


class Pipelines:
    """One stack in a folder of its own; runs are asked for by the command, looked at by the server's interface."""

    def __init__(self, home: Path, foreign: Api | None = None) -> None:
        """`foreign`: a Prefect server that is not the stack's."""
        self.home = home
        self.foreign = foreign
        self.environment = {
            **os.environ,
            "SERIN_HOME": str(home),
            "SERIN_STORE": str(home / "store"),
            "SERIN_INVENTORY": str(write_inventory(home, DEVICES)),
        }
        self.environment.pop("CUDA_VISIBLE_DEVICES", None)
        if foreign is not None:
            self.environment |= {
                "PREFECT_API_URL": foreign.url,
                "PREFECT_API_AUTH_STRING": foreign.login or "",
            }

    @property
    def api(self) -> Api:
        return self.foreign or stack_api(self.stack)

    @property
    def parts(self) -> tuple[str, ...]:
        """That always run."""
        server = () if self.foreign else (PREFECT,)
        return (*(worker_name(pool) for pool in POOLS), *server, CONTROLLER, RECONCILER)

    def serin(self, *arguments: str, seconds: float = 300.0, code: int | None = 0) -> str:
        done = serin_process(*arguments, env=self.environment, code=code, timeout_s=seconds)
        return done.stdout + done.stderr

    def write_spec(
        self, name: str, *, steps: int = 60, seed: int = 3, engine: str = "process", processes: int = 1
    ) -> Path:
        """A pipeline of its own: another name, other data and another training."""
        folder = self.home / "specs" / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "train.py").write_text(TRAIN)
        model = {"script": "train.py", "options": {"steps": steps, "seed": seed}}
        training = {"epochs": 1, "seed": seed, "processes": processes}
        spec = small_spec(folder, rows=1500, model=model, training=training, etl={"engine": engine})
        return write_spec(folder, {**spec, "name": name})

    def begin(self, spec: Path, *options: str) -> str:
        """The id of a new run."""
        said = self.serin("run", str(spec), "--no-serve", "--no-follow", *options)
        return next(word.rpartition("/")[2] for word in said.split() if "/runs/flow-run/" in word)

    @property
    def stack(self) -> Stack:
        found = read_stack(self.home)
        assert found is not None
        return found

    def run(self, run: str) -> Run:
        found = call(self.api, "GET", f"/flow_runs/{run}")
        return _run(found)

    def unfinished(self) -> list[Run]:
        """Runs under way, and those of pipelines that wait for their turn."""
        states = ["RUNNING", "PENDING", "PAUSED", "CANCELLING"]
        body = {"flow_runs": {"state": {"type": {"any_": states}}}, "limit": 200}
        return [_run(found) for found in call(self.api, "POST", "/flow_runs/filter", body)]

    def processes(self, run: str) -> RunProcesses | None:
        return run_processes(self.home).get(run)

    def pid(self, part: str) -> int | None:
        return Supervisor(self.home).pid(part)

    def versions(self, model: str) -> list[int]:
        return Store(str(self.home / "store")).versions(model)

    def holders(self) -> tuple[Holder, ...]:
        return holders(self.home)

    def dead_holders(self) -> list[str]:
        return [str(holder) for holder in self.holders() if start_ticks(holder.pid) is None]

    def orphans(self) -> list[int]:
        """Processes of runs whose own process is gone, and others that do not come from the supervisor."""
        runs = run_processes(self.home).values()
        attended = {pid for found in runs if found.engines for pid in (*found.engines, *found.others)}
        left = set(stack_processes(self.home)) - attended
        return sorted(pid for pid in left if not self._comes_from_supervisor(pid))

    def _comes_from_supervisor(self, pid: int) -> bool:
        """Or has ended meanwhile."""
        while pid > 1 and pid != self.stack.supervisor_pid:
            try:
                pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                return True
        return pid > 1

    def children_at(self, run: str, words: str) -> list[int]:
        """Processes of a run, or of stages it has placed, whose command line holds `words`."""
        found = []
        for pid in stack_processes(self.home):
            try:
                line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if words in line and (not run or f"{RUN_MARK}={run}".encode() in environment_of(pid)):
                found.append(pid)
        return found


def wait(look: Callable[[], T | None], what: str, seconds: float) -> T:
    """What `look` finds; a server that does not answer just now is asked again."""
    deadline = time.monotonic() + seconds
    while True:
        with suppress(StackError):
            if found := look():
                return found
        assert time.monotonic() < deadline, f"{what}: not in {seconds:g} s"
        time.sleep(0.1)


def _run(found: dict[str, Any]) -> Run:
    state = found.get("state") or {}
    return Run(
        id=found["id"],
        name=found["name"],
        state=found["state_type"],
        since=datetime.fromisoformat(state["timestamp"]).timestamp() if state else 0.0,
        message=state.get("message") or "",
        flow=found["flow_id"],
        parent=found.get("parent_task_run_id"),
    )


@contextmanager
def pipelines(*, foreign: bool = False) -> Iterator[Pipelines]:
    home = Path(tempfile.mkdtemp(prefix="serin-chaos-"))  # short: it holds unix sockets
    with ExitStack() as around:
        around.callback(shutil.rmtree, home, ignore_errors=True)
        server = around.enter_context(_company_server(home / "company")) if foreign else None
        scene = Pipelines(home, server)
        try:
            scene.serin("up", seconds=600)
            yield scene
        finally:
            scene.serin("down", code=None)
            kill_9(*stack_processes(home))


@contextmanager
def _company_server(folder: Path) -> Iterator[Api]:
    """A Prefect server that belongs to no stack and asks for a login."""
    port = free_ports(1)[0]
    process = prefect_server(folder, port)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "server.log").open("wb") as log:
        server = subprocess.Popen(
            process.command, env=dict(process.environment), cwd=folder, stdin=subprocess.DEVNULL,
            stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        api = Api(f"http://127.0.0.1:{port}/api", make_login(folder))
        wait(lambda: server.poll() is not None or answers(api), "the Prefect server", 300)
        yield api
    finally:
        server.terminate()
        server.wait(60)
        kill_9(*stack_processes(folder))


def stages_of(scene: Pipelines, run: str) -> list[dict[str, Any]]:
    shown: dict[str, Any] = json.loads(scene.serin("runs", "show", scene.run(run).name, "--json"))
    found: list[dict[str, Any]] = shown["stages"]
    return found
