"""The controller with a clock that can be set: `python -m tests.chaos.stepped_clock STEPS`, with its usual environment.

The machine's own clock belongs to everything else that runs on it. So what setting it would do is done to what the
controller sees of it: its `time.time()`, and the times in the request log, which are of the same clock. STEPS is a
file of lines "WHEN AHEAD_S": since the true time WHEN the clock is AHEAD_S ahead. Monotonic clocks go on, as they do.
"""

import json
import sys
import threading
import time
from bisect import bisect_right
from pathlib import Path

from serin.cluster import home_controller as controller
from serin.host.wiring import request_log
from serin.machine import environment

_true_time = time.time


def ahead_s(steps: Path, t: float) -> float:
    rows = [tuple(map(float, line.split())) for line in steps.read_text().splitlines()]
    before = bisect_right([when for when, _ in rows], t)
    return rows[before - 1][1] if before else 0.0


def copy_log(steps: Path, source: Path, target: Path) -> None:
    """Line by line, with the times that the set clock would have given them; goes on for ever."""
    while not source.exists():
        time.sleep(0.05)
    with source.open() as log, target.open("a") as copy:
        rest = ""
        while True:
            text = rest + log.read()
            whole, newline, rest = text.rpartition("\n")
            for line in whole.splitlines() if newline else ():
                row = json.loads(line)
                t = float(row["t"])
                copy.write(json.dumps(row | {"t": f"{t + ahead_s(steps, t):.6f}"}) + "\n")
            copy.flush()
            time.sleep(0.05)


def main() -> None:
    steps = Path(sys.argv[1])
    time.time = lambda: (now := _true_time()) + ahead_s(steps, now)
    copies = steps.with_name(f"requests-{int(_true_time() * 1000)}.jsonl")
    controller.request_log = lambda home: copies  # type: ignore[attr-defined]
    arguments = (steps, request_log(environment.home()), copies)
    threading.Thread(target=copy_log, args=arguments, daemon=True).start()
    controller.main()


if __name__ == "__main__":
    main()
