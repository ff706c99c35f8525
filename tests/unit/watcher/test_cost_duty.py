"""What serving costs: counters of a real process and of Triton's metrics, added up over restarts."""

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from serin.formats.serving.serving_cost import Counters, ServingCost, read_serving_cost
from serin.machine.hardware import Device
from serin.machine.process import Process, ProcessState
from serin.serving.triton.process import TritonPorts
from serin.serving.triton.release_record import CheckedRows, Record, Served, add_checked, write_record
from serin.store.artifacts import Release
from serin.watcher import cost_duty
from serin.watcher.cost_duty import CostDuty, Look, add_look, parse_counts
from tests.fakes.gpus import pretend_gpus
from tests.kit.web import Handler, web_server

RELEASE = Release(model="late", version=3)
GPU = Device(id="GPU-a", name="Stand-in", memory_bytes=1 << 30)
ON_GPU = Served(backend="onnx_native", devices=("GPU-a",), bytes=1 << 29)
METRICS = """# HELP nv_inference_count Number of inferences performed
nv_inference_request_success{model="late",version="3"} 30
nv_inference_count{model="late",version="3"} 1020
nv_inference_count{model="late-front",version="3"} 7
nv_inference_count{model="late",version="2"} 9
"""


class Driver:
    """A GPU whose energy grows."""

    def __init__(self) -> None:
        self.energy = 1000.0

    def busy_share(self, device: str) -> float | None:
        return 0.5

    def free_bytes(self, device: str) -> int | None:
        return 1 << 29

    def process_bytes(self, device: str) -> dict[int, int]:
        return {}

    def joules(self, device: str) -> float | None:
        self.energy += 50.0
        return self.energy


class OneChild:
    def __init__(self, pid: int) -> None:
        self._pid = pid

    def start(self, process: Process) -> None: ...

    def stop(self, name: str) -> None: ...

    def state(self, name: str) -> ProcessState:
        return "running"

    def pid(self, name: str) -> int | None:
        return self._pid


class Metrics(Handler):
    def do_GET(self) -> None:
        self.answer(METRICS.encode())


def counters(at: float, **values: float) -> Counters:
    return Counters(at=at, process=(1, 100.0), **values)  # type: ignore[arg-type]


def look(now: Counters, **values: object) -> Look:
    given = {"memory_bytes": 1000, "served": ON_GPU, "devices": (GPU,), **values}
    return Look(counters=now, **given)  # type: ignore[arg-type]


def test_each_look_adds_what_is_new_and_a_restarted_process_counts_from_zero() -> None:
    cost = ServingCost(release=RELEASE.name, since=100.0)
    first = look(counters(110, cpu_s=2.0, rows=130, requests=40, asked=10, joules=500.0), busy_share=0.2)
    cost = add_look(cost, first, price=3600.0)
    assert (cost.seconds, cost.predictions, cost.requests, cost.cpu_s) == (10, 100, 10, 2.0)
    assert cost.gpu_s == 5.0, "half of the GPU's memory is reserved"
    assert cost.cost == pytest.approx(5.0)
    assert cost.joules is None, "nobody looked at the counter before"
    second = look(counters(120, cpu_s=3.0, rows=340, requests=50, asked=20, joules=900.0), busy_share=0.6)
    cost = add_look(cost, second, price=3600.0)
    assert (cost.seconds, cost.predictions, cost.requests, cost.cpu_s) == (20, 310, 20, 3.0)
    assert (cost.joules, cost.joules_predictions) == (400.0, 210)
    assert cost.busy_share == pytest.approx(0.4)
    assert cost.per_1000()["joules"] == pytest.approx(400 / 210 * 1000)
    again = Counters(at=135, process=(2, 130.0), cpu_s=1.0, rows=12, requests=4, asked=2)
    cost = add_look(cost, replace(second, counters=again), price=None)
    assert (cost.seconds, cost.predictions, cost.cpu_s) == (25, 320, 4.0)
    assert cost.joules == 400.0
    assert cost.cost == pytest.approx(10.0)


def test_energy_counts_only_between_two_looks_at_which_nobody_else_used_the_gpu() -> None:
    cost = ServingCost(release=RELEASE.name, since=100.0)
    for at, joules in ((110, 500.0), (120, None), (130, 900.0), (140, 1000.0)):
        cost = add_look(cost, look(counters(at, rows=at, requests=1, asked=1, joules=joules)), price=None)
    assert cost.joules == 100.0
    assert cost.joules_predictions == 10


def test_a_release_without_clients_has_no_predictions() -> None:
    cost = add_look(
        ServingCost(release=RELEASE.name, since=100.0),
        look(counters(110, rows=500, requests=40), served=Served(backend="onnx_native"), devices=()),
        price=7200.0,
    )
    assert (cost.predictions, cost.gpu_s, cost.per_1000()) == (0, 0.0, {})


def test_triton_s_counters_are_those_of_the_release() -> None:
    assert parse_counts(METRICS, RELEASE) == (1020, 30)
    assert parse_counts("", RELEASE) == (0, 0)


def test_a_running_release_is_measured_and_its_file_is_added_to(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_gpus(tmp_path, monkeypatch, ("GPU-a",))
    monkeypatch.setattr(cost_duty, "requests_of", lambda *_: 20)
    with (
        web_server(Metrics) as port,
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child,
    ):
        place = TritonPorts(http_port=1, grpc_port=2, metrics_port=port, shared_memory_prefix="x")
        write_record(
            home / "releases" / RELEASE.name, Record(release=RELEASE.name, place=place, served=ON_GPU)
        )
        folder, another = home / "releases" / RELEASE.name, child.pid + 1
        for process, rows in ((another, 500), (child.pid, 30), (child.pid, 10)):
            add_checked(folder, process, CheckedRows(rows=rows, requests=rows // 10))
        duty = CostDuty(home, OneChild(child.pid), Driver())
        began = psutil.Process(child.pid).create_time()
        for seconds in (10.0, 20.0):
            duty.tick(began + seconds)
        found = read_serving_cost(home, RELEASE.name)
        child.communicate(b"\n", timeout=60)
    assert found.seconds == pytest.approx(20.0, abs=0.1)
    assert (found.predictions, found.requests) == (1020 - 40 - (30 - 4 - 20), 20), (
        "rows of checks are no client's"
    )
    assert found.joules == 50.0
    assert found.gpu_s == pytest.approx(10.0, abs=0.1)
    assert found.peak_memory_bytes > 1_000_000
    duty.tick(time.time())  # the process is gone: nothing is added, and nothing fails
    assert read_serving_cost(home, RELEASE.name) == found
