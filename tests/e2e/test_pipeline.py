"""The pipeline on a real stack: Prefect places it, a killed training goes on, Triton serves what came out.

One story in one test, since every part of it needs what the part before has built.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.fakes.small_pipeline import NAME, small_spec, write_spec

ROLLOUT = {"steps": [50, 100], "step_time": "0s", "min_requests": 0, "bake": "0s", "deadline": "30s"}
LONG_TRAINING = {
    "epochs": 4,
    "batch_rows": 16,
    "learning_rate": 0.01,
    "seed": 3,
    "checkpoint_every_steps": 50,
}


class Stack:
    """One stack in a folder of its own, spoken to by the command alone."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.environment = {**os.environ, "SERIN_HOME": str(home)}

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "serin.cli", *arguments],
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def serin(self, *arguments: str, seconds: float = 150.0) -> str:
        process = self.start(*arguments)
        try:
            said, _ = process.communicate(timeout=seconds)
        finally:
            process.kill()
        assert process.returncode == 0, (
            f"serin {' '.join(arguments)} ended with {process.returncode}:\n{said}"
        )
        return said

    def training(self) -> Path | None:
        found = sorted((self.home / "runs").glob("train-*"))
        return found[0] if found else None

    def runs(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self.serin("runs", "list", "--json"))
        return found


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    made = Stack(tmp_path / "home")
    made.serin("up")
    yield made
    made.serin("down")


@pytest.mark.timeout(300)
def test_a_killed_training_goes_on_and_the_pipeline_ends_in_a_served_model(
    stack: Stack, tmp_path: Path
) -> None:
    sections = {"training": LONG_TRAINING, "rollout": ROLLOUT}
    spec = write_spec(tmp_path, small_spec(tmp_path / "data", rows=12000, **sections))

    began = time.monotonic()
    run = stack.start("run", str(spec))
    killed = _kill_a_training_worker(stack, run)
    said, _ = run.communicate(timeout=200)
    assert run.returncode == 0, said
    print(f"first run, killed at step {killed}: {time.monotonic() - began:.1f} s")
    _was_resumed(stack, killed)

    _answers_as_it_was_trained(stack, tmp_path)

    began = time.monotonic()
    stack.serin("run", str(spec))
    print(f"second run, nothing changed: {time.monotonic() - began:.1f} s")
    assert _versions(stack) == [1]

    began = time.monotonic()
    stack.serin("run", "--placed", "--fresh", "export", str(spec))
    print(f"placed run of one stage: {time.monotonic() - began:.1f} s")
    assert _versions(stack) == [1, 2]
    kinds = [
        found["kind"] for found in stack.runs() if found["kind"] in ("pipeline", "etl", "train", "export")
    ]
    assert sorted(kinds) == ["export", "pipeline", "pipeline", "pipeline"]  # no machine for what was known


def _kill_a_training_worker(stack: Stack, run: subprocess.Popen[str]) -> int:
    """kill -9 as soon as there is a checkpoint to go on from; the step of that checkpoint."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert run.poll() is None, run.communicate()[0]
        folder = stack.training()
        saved = sorted(folder.glob("checkpoints/step-*/COMPLETE")) if folder else []
        worker = _worker_of(folder) if folder and saved else None
        if worker:
            os.kill(worker, signal.SIGKILL)
            return int(saved[-1].parent.name.removeprefix("step-"))
        time.sleep(0.02)
    raise AssertionError("no training worker with a checkpoint within 120 s")


def _worker_of(folder: Path) -> int | None:
    """The process that trains in `folder`."""
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes().decode().split("\0")
        except (OSError, UnicodeDecodeError):
            continue
        if "serin.training.worker" in words and str(folder) in words:
            return int(entry.name)
    return None


def _was_resumed(stack: Stack, killed: int) -> None:
    folder = stack.training()
    assert folder is not None
    lines = [json.loads(line) for line in (folder / "progress.jsonl").read_text().splitlines()]
    starts = [line["step"] for line in lines if line["event"] == "started"]
    assert starts[0] == 0
    assert len(starts) == 2, "killed once, so started twice"
    assert starts[1] >= killed > 0


def _answers_as_it_was_trained(stack: Stack, tmp_path: Path) -> None:
    """Through the gateway, and right more often than a coin."""
    table = pq.read_table(tmp_path / "data" / "parcels.parquet").slice(0, 200)
    rows, scores = tmp_path / "rows.parquet", tmp_path / "scores.parquet"
    pq.write_table(table.drop_columns(["hours"]), rows)
    stack.serin("predict", NAME, str(rows), "--out", str(scores))
    late = [hours > 30 for hours in table["hours"].to_pylist()]
    guessed = [score > 0.5 for score in pq.read_table(scores)["score"].to_pylist()]
    assert sum(a == b for a, b in zip(late, guessed, strict=True)) > 150


def _versions(stack: Stack) -> list[int]:
    return [entry["version"] for entry in json.loads(stack.serin("models", "list", "--json"))]
