"""What serving a release has cost so far, `<home>/costs/<release>.json`: predictions, CPU, GPU, energy, money.

Written by the watcher, again and again. `last` holds the counters at the time of writing, so that the next look, also
by another process, adds only what is new.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from serin.machine.durable import write_whole
from serin.machine.typed_json import Document

_PER = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """Counters that only grow while one process of the release lives. `process`: its id and the time of its start.

    `rows` and `requests` are Triton's own, without the golden rows of checks; `asked` are the requests of clients, by
    the gateway's log. `joules` are those of the release's GPUs, None while somebody else uses them."""

    at: float
    process: tuple[int, float]
    cpu_s: float = 0.0
    rows: int = 0
    requests: int = 0
    asked: int = 0
    joules: float | None = None

    @property
    def predictions(self) -> int:
        """Rows that were scored for clients. Triton's other requests are probes of one row each."""
        return max(0, self.rows - max(0, self.requests - self.asked)) if self.asked else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingCost(Document):
    """`seconds`: while it was watched. `gpu_s`: of GPUs, by the share of their memory that it has reserved.

    Energy is measured for a whole GPU, so it counts only while nobody else used one of the release's GPUs: `joules`
    belong to `joules_predictions`. `busy_share` is the mean of such times, too. None: not measured."""

    release: str
    since: float
    seconds: float = 0.0
    predictions: int = 0
    requests: int = 0
    cpu_s: float = 0.0
    peak_memory_bytes: int = 0
    gpu_s: float = 0.0
    gpu_peak_bytes: int | None = None
    busy_share: float | None = None
    busy_looks: int = 0
    joules: float | None = None
    joules_predictions: int = 0
    cost: float | None = None
    last: Counters | None = field(default=None)

    def per_1000(self) -> dict[str, float]:
        """The costs of 1,000 predictions, those that are known; nothing before the first prediction."""
        found: dict[str, float] = {}
        if self.predictions:
            found["cpu_s"] = self.cpu_s / self.predictions * _PER
            if self.gpu_s:
                found["gpu_s"] = self.gpu_s / self.predictions * _PER
            if self.cost is not None:
                found["cost"] = self.cost / self.predictions * _PER
        if self.joules is not None and self.joules_predictions:
            found["joules"] = self.joules / self.joules_predictions * _PER
        return found

    def view(self) -> dict[str, Any]:
        """What commands show."""
        shown = asdict(self)
        del shown["last"]
        return {**shown, "per_1000": self.per_1000()}


def cost_file(home: Path, release: str) -> Path:
    return home / "costs" / f"{release}.json"


def read_serving_cost(home: Path, release: str) -> ServingCost | None:
    """None for a release that was never watched, and for a file of another form."""
    try:
        return ServingCost.load(cost_file(home, release).read_bytes())
    except (OSError, ValueError):
        return None


def write_serving_cost(home: Path, cost: ServingCost) -> None:
    path = cost_file(home, cost.release)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, cost.dump())
