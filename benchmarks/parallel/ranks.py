"""A contender with two ranks: this process is the first; it starts the second and sends it each lap over stdin.

    python -m benchmarks.parallel.ranks benchmarks.parallel.raw_peer

On a GPU there is one rank, alone in an NCCL process group.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import socket
import subprocess
import sys
from contextlib import ExitStack
from typing import Any

import torch

from benchmarks.child import ROOT
from serin.training.parallel.ranks import Ranks, open_world

_ENDS_S = 20
_open: dict[str, Any] = {}


def lap(module: str, request: dict[str, Any]) -> dict[str, Any]:
    """Runs one lap on all ranks and returns the first one's answer."""
    if not _open:
        _start(module)
    second = _open["second"]
    if second is not None:
        second.stdin.write(json.dumps(request) + "\n")
        second.stdin.flush()
    return dict(importlib.import_module(module).lap(request, _open["world"]))


def _start(module: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    gpu = torch.cuda.is_available()
    size = "1" if gpu else "2"
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=port,
        WORLD_SIZE=size,
        RANK="0",
        LOCAL_RANK="0",
        OMP_NUM_THREADS="1",
    )
    _open["second"] = None
    if not gpu:
        _open["second"] = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.parallel.ranks", module],
            cwd=ROOT,
            env={**os.environ, "RANK": "1", "LOCAL_RANK": "1"},
            stdin=subprocess.PIPE,
            stdout=sys.stderr,
            text=True,
        )
    stack = ExitStack()
    _open["world"] = stack.enter_context(open_world(gpu=gpu, group=True))
    atexit.register(_stop, stack)


def _stop(stack: ExitStack) -> None:
    second = _open["second"]
    if second is not None:
        second.stdin.close()
        try:
            second.wait(_ENDS_S)
        except subprocess.TimeoutExpired:
            second.kill()
            second.wait()
    stack.close()


def main(module: str) -> None:
    contender = importlib.import_module(module)
    with open_world(gpu=False) as world:
        assert isinstance(world, Ranks)
        for line in sys.stdin:
            contender.lap(json.loads(line), world)


if __name__ == "__main__":
    main(sys.argv[1])
