"""Writes a trace of a few steps on request, for Perfetto or chrome://tracing: what ran when, on the host and the
GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile, schedule

from serin.training.launch.progress import tell
from serin.training.parallel.ranks import Ranks

_SKIPPED = 10  # the first steps are not representative
_WARM_UP = 3
_TRACED = 20


def trace_file(folder: Path) -> Path:
    return folder / "trace.json"


@contextmanager
def profiled(wanted: bool, folder: Path, world: Ranks, steps: int) -> Iterator[Callable[[], None]]:
    """Yields a function to call after each step. The first rank's steps are traced; fewer in a short run."""
    if not wanted or not world.first:
        yield _nothing
        return
    skipped = min(_SKIPPED, steps // 4)
    traced = max(1, min(_TRACED, steps - skipped - _WARM_UP))
    activities = [ProfilerActivity.CPU]
    if world.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)

    def write(trace: Any) -> None:
        trace.export_chrome_trace(str(trace_file(folder)))
        tell(folder, "trace", path=str(trace_file(folder)), steps=traced)

    plan = schedule(wait=0, warmup=_WARM_UP, active=traced, repeat=1, skip_first=skipped)
    with profile(activities=activities, schedule=plan, on_trace_ready=write) as running:
        yield running.step


def _nothing() -> None:
    pass
