"""Times a lap: seconds of the clock, and CPU seconds of the process with all its threads and its ended children."""

from __future__ import annotations

import resource
import time


class Watch:
    """Begins when it is made. CPU seconds say what work costs, whatever else the machine does."""

    def __init__(self) -> None:
        self._cpu_s, self._began = cpu_s(), time.perf_counter()

    def read(self) -> dict[str, float]:
        """Returns what a contender answers: `seconds` and `cpu_s`."""
        seconds = time.perf_counter() - self._began
        return {"seconds": seconds, "cpu_s": cpu_s() - self._cpu_s}


def cpu_s() -> float:
    """The children that still run are not counted."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + used.ru_utime + used.ru_stime
