"""Programs that hold memory of a GPU until they are killed.

python -m tests.gpu.holders train FOLDER DEVICE    a training that lasts; DEVICE: cpu, or a GPU's id
python -m tests.gpu.holders etl FOLDER DEVICE      two Dask workers that share the GPU, with half a gigabyte each
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.signals import kill_9

HOLDING = "holding"
_kept: list[Any] = []


@contextmanager
def holder(kind: str, folder: Path, device: str) -> Iterator[subprocess.Popen[str]]:
    """The program as a process, from the time when it holds memory. It is killed in the end."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "tests.gpu.holders", kind, str(folder), device]
    log = folder / "holder.log"
    with log.open("w") as errors:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
        )
    try:
        assert process.stdout is not None
        line = next((line for line in process.stdout if line.startswith(HOLDING)), "")
        assert line, f"it ended before it held memory: {log.read_text()[-3000:]}"
        yield process
    finally:
        kill_9(process.pid)
        process.communicate()


def train(folder: Path, device: str) -> None:
    """Says that it holds memory at its first checkpoint."""
    from serin.spec.model import ModelSpec
    from serin.spec.training import TrainingSpec
    from serin.training.launch.launcher import train as launch
    from tests.fakes.datasets import make_dataset

    dataset = make_dataset(folder / "dataset", rows={"train": 100_000, "valid": 1000, "test": 1000})

    def hear(record: dict[str, Any]) -> None:
        if record["event"] == "started":
            print("worker", record["pid"], flush=True)
        if record["event"] == "checkpoint" and not _kept:
            _kept.append(record)
            print(HOLDING, flush=True)

    launch(
        ModelSpec(hidden=(512, 256)),
        TrainingSpec(epochs=100_000, batch_rows=512, checkpoint_every_steps=20, precision="fp32"),
        dataset,
        folder=folder / "run",
        devices=() if device == "cpu" else (device,),
        hear=hear,
    )


def etl(folder: Path, device: str) -> None:
    """As the engine `dask-cuda` starts them."""
    from serin.etl.engines.dask_engine import cuda_cluster

    os.environ["CUDA_VISIBLE_DEVICES"] = device
    with cuda_cluster(2, folder) as client:
        client.run(_hold)
        print("workers", *client.run(os.getpid).values(), flush=True)
        print(HOLDING, flush=True)
        sys.stdin.read()


def _hold() -> None:
    import cupy

    _kept.append(cupy.ones(1 << 29, dtype="u1"))
    cupy.cuda.Device().synchronize()


if __name__ == "__main__":
    {"train": train, "etl": etl}[sys.argv[1]](Path(sys.argv[2]), sys.argv[3])
