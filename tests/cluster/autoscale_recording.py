"""What happened to autoscaled releases over time, and a picture of it."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx

from tests.cluster import test_kubernetes_rollout as rollout
from tests.cluster.kubernetes_cluster import Cluster

_EVERY_S = 1.0


@dataclass(frozen=True)
class Row:
    """`wanted`, `ready`: replicas by release. `share`: the candidate's percentage of the traffic. `answered`, `errors`:
    of the test that runs, so far."""

    t: float
    clients: int
    answered: int
    errors: int
    share: float
    wanted: dict[str, int]
    ready: dict[str, int]


class Recording:
    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self.rows: list[Row] = []
        self._load: Callable[[], tuple[int, int, int]] = lambda: (0, 0, 0)
        self._cluster, self._path = cluster, f"/apis/apps/v1/namespaces/{namespace}/deployments"
        self._stop = threading.Event()

    def follow(self, load: Callable[[], tuple[int, int, int]]) -> None:
        """`load`: returns clients, answers and errors."""
        self._load = load

    @contextmanager
    def running(self) -> Iterator[Recording]:
        thread = threading.Thread(target=self._record)
        thread.start()
        try:
            yield self
        finally:
            self._stop.set()
            thread.join()

    def _record(self) -> None:
        began, decided = time.monotonic(), rollout.rollouts()
        with self._cluster.plane.client() as api:
            while not self._stop.wait(_EVERY_S):
                try:
                    found = api.get(self._path).raise_for_status().json()["items"]
                except httpx.HTTPError:
                    continue
                last = decided.last(rollout.MODEL)
                wanted = {each["metadata"]["name"]: each["spec"].get("replicas", 0) for each in found}
                ready = {each["metadata"]["name"]: each["status"].get("readyReplicas", 0) for each in found}
                share = last.weight if last and not rollout.decision2rollout(last).phase.final else 0.0
                self.rows.append(Row(time.monotonic() - began, *self._load(), share, wanted, ready))


def draw(rows: Sequence[Row], path: Path) -> None:
    """Writes the picture, and beside it what is in it."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    path.with_suffix(".json").write_text(json.dumps([asdict(row) for row in rows]))
    figure = Figure(figsize=(10, 4.8), layout="constrained")
    FigureCanvasSVG(figure)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(1, 1.4))
    t = [row.t for row in rows]
    top.step(t, [row.clients for row in rows], color="#22272e", where="post")
    top.set_ylabel("clients")
    part = top.twinx()
    part.fill_between(t, [row.share for row in rows], step="post", color="#b0413e", alpha=0.2)
    part.set_ylabel("candidate, % of traffic")
    part.set_ylim(0, 100)
    names = sorted({name for row in rows for name in row.ready})
    for name, colour in zip(names, ("#2a8c6a", "#8a4fa3", "#b0413e"), strict=False):
        wanted = [row.wanted.get(name, math.nan) for row in rows]
        ready = [row.ready.get(name, math.nan) for row in rows]
        bottom.step(t, wanted, color=colour, ls=":", where="post")
        bottom.step(t, ready, color=colour, label=name, where="post")
    bottom.set_yticks(range(4))
    bottom.set_ylabel("replicas")
    bottom.set_xlabel("seconds")
    bottom.legend(frameon=False, loc="upper left", ncols=3)
    bottom.set_ylim(-0.2, 4.0)
    figure.savefig(path, metadata={"Date": None})
