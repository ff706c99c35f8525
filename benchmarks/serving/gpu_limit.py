"""The limit of the GPU benchmark: ONNX Runtime in this process, on the same rows, without a server."""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from serin.formats.wire import Array
from serin.scoring.session import Device, open_session

Feed = Mapping[str, Array]


class InProcess:
    """The front on the CPU and the core on the GPU with I/O binding. Strings are Python's already."""

    def __init__(self, bundle: Path, *, threads: int, device: Device = "cuda") -> None:
        if device == "cuda":
            onnxruntime.preload_dlls()
        self._front = open_session(bundle / "front.onnx", threads=threads)
        self._core = open_session(bundle / "core.onnx", threads=1, device=device)
        self._between = [tensor.name for tensor in self._core.get_inputs()]
        self._outputs = [tensor.name for tensor in self._core.get_outputs()]

    def front(self, feed: Feed) -> list[Array]:
        found: list[Array] = self._front.run(self._between, dict(feed))
        return found

    def core(self, between: Sequence[Array]) -> list[Array]:
        binding = self._core.io_binding()
        for name, values in zip(self._between, between, strict=True):
            binding.bind_cpu_input(name, values)
        for name in self._outputs:
            binding.bind_output(name)
        self._core.run_with_iobinding(binding)
        found: list[Array] = binding.copy_outputs_to_cpu()
        return found

    def score(self, feed: Feed) -> Array:
        return self.core(self.front(feed))[0]

    def rows_per_s(self, feeds: Sequence[Feed], *, callers: int, seconds: float) -> float:
        """Returns the rows per second of `callers` threads that score these requests in turn."""
        rows = len(next(iter(feeds[0].values())))
        counts, stop = [0] * callers, threading.Event()

        def call(caller: int) -> None:
            for feed in itertools.islice(itertools.cycle(feeds), caller, None):
                if stop.is_set():
                    return
                self.score(feed)
                counts[caller] += 1

        self.score(feeds[0])
        threads = [threading.Thread(target=call, args=(caller,)) for caller in range(callers)]
        begin = time.perf_counter()
        for thread in threads:
            thread.start()
        time.sleep(seconds)
        stop.set()
        for thread in threads:
            thread.join()
        return sum(counts) * rows / (time.perf_counter() - begin)

    def parts_us(self, feed: Feed, repetitions: int = 30) -> tuple[float, float]:
        """Returns what the front and the core take alone: where a request's time goes at the least."""
        between = self.front(feed)
        return _median_us(lambda: self.front(feed), repetitions), _median_us(
            lambda: self.core(between), repetitions
        )


def _median_us(work: Callable[[], Any], repetitions: int) -> float:
    laps = []
    for _ in range(repetitions):
        begin = time.perf_counter()
        work()
        laps.append(time.perf_counter() - begin)
    return statistics.median(laps) * 1e6


def difference(found: Array, wanted: Array) -> float:
    return float(np.abs(np.asarray(found, np.float64) - np.asarray(wanted, np.float64)).max())
