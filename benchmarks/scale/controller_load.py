"""A controller of three hosts with many models: what a tick costs, and its memory. A contender for child.py.

The controller is the real one in this process, with journals, desired states and reports in a folder store. The hosts
are another process that writes their reports and evidence (hosts_reports.py).
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks.scale.hosts_reports import HOSTS
from serin.cluster.controller import LedController
from serin.formats.bundle import write_manifest
from serin.formats.cluster.host_report import PREFIX
from serin.formats.schema import InputColumn, OutputTensor, Schema, write_schema
from serin.formats.serving.journal import DecisionCache
from serin.rollout.decide.plan import Plan
from serin.rollout.run.commands import Command, Mailbox
from serin.rollout.run.leadership import Leadership
from serin.store.open import open_objects
from serin.store.store import Store

_REACHED_S = 240.0
_TICK_S = 0.25
_PLAN = Plan(steps=(50.0, 100.0), step_s=600.0, bake_s=0.0)  # a rollout stays in its first step
_SCHEMA = Schema(
    task="binary",
    inputs=(InputColumn(name="x", kind="float", dtype="FP32", null="NaN"),),
    outputs=(OutputTensor(name="score", dtype="FP32", dims=(1,)),),
)


def run(request: Mapping[str, Any]) -> dict[str, Any]:
    """All `models` become live; then `rollouts` of them shift traffic. Returns the milliseconds of a tick in both
    states, of the CPU and in all, and the memory."""
    count, rollouts, ticks = request["models"], request["rollouts"], request["ticks"]
    models = [f"model-{number:03d}" for number in range(count)]
    with tempfile.TemporaryDirectory(prefix="serin-scale-") as folder, _Scene(Path(folder), models) as scene:
        scene.start(models, version=1)
        scene.tick_until(lambda: scene.live() == count)
        settled, settled_wall = scene.measure(ticks)
        scene.start(models[:rollouts], version=2)
        scene.tick_until(lambda: scene.shifting() == rollouts)
        shifting, shifting_wall = scene.measure(ticks)
        return {
            "settled_ms": settled,
            "settled_wall_ms": settled_wall,
            "shifting_ms": shifting,
            "shifting_wall_ms": shifting_wall,
            "memory_mb": psutil.Process().memory_info().rss / 1e6,
        }


class _Scene:
    def __init__(self, folder: Path, models: Sequence[str]) -> None:
        store = str(folder / "store")
        os.environ["SERIN_HOME"], os.environ["SERIN_STORE"] = str(folder / "home"), store
        self._store, self._objects, self._ended = Store.open(), open_objects(store), threading.Event()
        for model in models:
            for _ in range(2):
                _publish(self._store, model)
        command = [sys.executable, "-m", "benchmarks.scale.hosts_reports", store]
        self._hosts = subprocess.Popen(command)
        self._leadership = Leadership(self._objects, "benchmark")
        self._leadership.step()
        self._renewing = threading.Thread(target=self._leadership.run, args=(self._ended,), daemon=True)
        self._renewing.start()
        term = self._leadership.term
        assert term is not None, "nobody else is there"
        self._led = LedController(
            objects=self._objects,
            store=self._store,
            leadership=self._leadership,
            term=term,
            cache=DecisionCache(self._objects),
            fleet="agents",
        )
        self._wait_for(lambda: len(self._objects.keys(PREFIX)) == len(HOSTS))
        self._led.take_over()

    def __enter__(self) -> _Scene:
        return self

    def __exit__(self, *_: object) -> None:
        self._hosts.kill()
        self._hosts.wait()
        self._led.close()
        self._ended.set()
        self._renewing.join()

    def start(self, models: Sequence[str], *, version: int) -> None:
        for model in models:
            command = Command(kind="start", model=model, version=version, by="benchmark", plan=_PLAN)
            Mailbox(self._objects).submit(command)

    def tick(self) -> tuple[float, float]:
        """Returns the milliseconds of one tick: of the CPU, and in all. The pause after it is the controller's own."""
        assert self._hosts.poll() is None, "the hosts' process ended"
        cpu, began = time.process_time(), time.perf_counter()
        self._led.tick()
        cpu, seconds = time.process_time() - cpu, time.perf_counter() - began
        time.sleep(max(0.0, _TICK_S - seconds))
        return 1000 * cpu, 1000 * seconds

    def tick_until(self, done: Callable[[], bool]) -> None:
        self._wait_for(done, self.tick)

    def _wait_for(
        self, done: Callable[[], bool], act: Callable[[], object] = lambda: time.sleep(0.05)
    ) -> None:
        end = time.monotonic() + _REACHED_S
        while not done():
            reasons = {now.reason for now in self._rollouts()}
            assert time.monotonic() < end, f"not reached in {_REACHED_S:g} s: {reasons}"
            act()

    def measure(self, ticks: int) -> tuple[float, float]:
        """Returns the medians of a tick."""
        cpu, wall = zip(*(self.tick() for _ in range(ticks)), strict=True)
        return statistics.median(cpu), statistics.median(wall)

    def live(self) -> int:
        return sum(now.phase.final and now.live is not None for now in self._rollouts())

    def shifting(self) -> int:
        return sum(not now.phase.final and 0 < now.weight_percent < 100 for now in self._rollouts())

    def _rollouts(self) -> list[Any]:
        return self._led._rollouts()  # noqa: SLF001


def _publish(store: Store, model: str) -> None:
    version = store.reserve_version(model)
    with store.workspace() as folder:
        write_schema(folder, _SCHEMA)
        (folder / "spec.yaml").write_text("objectives: {latency_ms: 50}\n", encoding="utf-8")
        write_manifest(
            folder, name=model, model_version=version, spec_digest="0" * 64, lineage={}, metrics={}
        )
        store.publish_bundle(model, version, folder)
