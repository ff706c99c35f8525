"""Runs the load generator in C++ (load.cc): every server is called by the same program, over HTTP and gRPC.

A generator in Python takes about as much of a shared core as the servers that it measures, and grpc.aio several times
as much for each request as HTTP. serin.serving.tuning.load, which users have, can do more: TLS and an open loop.
"""

from __future__ import annotations

import math
import subprocess
from dataclasses import dataclass
from pathlib import Path

from benchmarks.child import ROOT, ContenderFailed
from serin.serving.native.compiler import build_mark, obtain_compiler
from serin.serving.tuning.load_connections import Target
from tests.kit.load import INFER_METHOD, GrpcTarget

SOURCES = Path(__file__).parent
ENVIRONMENT = ROOT / ".venv-bench"  # has the compiler where the machine has none
_FLAGS = ("-std=c++17", "-O2")


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The requests after the warm-up; `all_requests` has those of the warm-up, too. Latencies are of good answers."""

    seconds: float
    all_requests: int
    good: int
    failed: int
    p50_ms: float
    p99_ms: float
    why: str = ""  # a connection that failed

    @property
    def requests_per_s(self) -> float:
        return self.good / self.seconds


def build_generator(folder: Path) -> Path:
    """Compiles the generator into `folder` unless it is there, and returns its path."""
    source = SOURCES / "load.cc"
    program = folder / f"load-{build_mark([source, SOURCES / 'wire.h'], *_FLAGS)[:16]}"
    if not program.exists():
        compiler = obtain_compiler(ENVIRONMENT)
        scratch = program.with_suffix(".new")
        command = [*compiler.command, *_FLAGS, "-o", str(scratch), str(source)]
        done = subprocess.run(command, capture_output=True, text=True, env=compiler.variables())
        if done.returncode:
            raise ContenderFailed(f"the load generator cannot be compiled: {done.stderr[-2000:]}")
        scratch.rename(program)
    return program


def run_generator(
    program: Path, target: Target, *, clients: int, seconds: float, warm_up_s: float = 0.0
) -> Result:
    """Sends requests in a closed loop. A connection that cannot be opened or breaks is a failed request."""
    if target.address.tls or (isinstance(target, GrpcTarget) and target.metadata):
        raise ValueError("the load generator knows neither TLS nor metadata")
    host = "127.0.0.1" if target.address.host == "localhost" else target.address.host
    numbers = (clients, seconds, warm_up_s, target.timeout_s)
    command = [
        str(program),
        host,
        str(target.address.port),
        "grpc" if isinstance(target, GrpcTarget) else "http",
        *map(str, numbers),
        INFER_METHOD,
    ]
    sent = b"".join(len(request).to_bytes(4, "little") + request for request in target.requests)
    done = subprocess.run(command, input=sent, capture_output=True)
    if done.returncode == 1:
        return Result(
            seconds=seconds,
            all_requests=1,
            good=0,
            failed=1,
            p50_ms=math.nan,
            p99_ms=math.nan,
            why=done.stderr.decode().strip(),
        )
    if done.returncode:
        raise ContenderFailed(f"the load generator ended with {done.returncode}: {done.stderr.decode()}")
    found = done.stdout.split()
    measured_s, p50_s, p99_s = float(found[0]), float(found[4]), float(found[5])
    return Result(
        seconds=measured_s,
        all_requests=int(found[1]),
        good=int(found[2]),
        failed=int(found[3]),
        p50_ms=p50_s * 1000,
        p99_ms=p99_s * 1000,
    )
