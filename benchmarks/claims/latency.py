"""Claims about answering: ONNX Runtime instead of torch, and rows of several requests in one run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks.claims.claim import Claim
from benchmarks.claims.trainings import SHAPE, Place, Settings, Table, train
from serin.export.convert.torch2onnx import torch2onnx
from serin.machine.hardware import core_count
from serin.models.build import build_model
from serin.scoring.session import open_session

SIZES = (1, 64, 4096)
APART = 5e-3  # of a logit; products on a GPU are rounded to TF32
JOINED = 64
_ROUNDS, _ROUND_S = 5, 0.05


class Answers:
    """The same trained network for torch and for ONNX Runtime; both get arrays of the host and give one back."""

    def __init__(self, table: Table, place: Place, hidden: tuple[int, ...]) -> None:
        rows, batch = (2**18, 8192) if place == "cuda" else (2**14, 1024)
        trained = train(table, Settings(hidden=hidden, rows=rows, batch_rows=batch, epochs=1, place=place))
        network = build_model(trained.model, SHAPE)
        network.load_state_dict(dict(trained.state))
        self.graph = torch2onnx(network, SHAPE)
        self.network, self._table = network.eval(), table

    def feed(self, size: int, at: int = 0) -> dict[str, Any]:
        begin = self._table.train_rows + at
        num, cat, _ = self._table.arrays(begin, begin + size)
        return {"num": np.ascontiguousarray(num), "cat": cat.astype(np.int64)}

    def torch(self, size: int, on: Place) -> Callable[[], Any]:
        network, feed, device = self.network.to(on), self.feed(size), torch.device(on)

        def answer() -> Any:
            with torch.inference_mode():
                num, cat = (torch.from_numpy(feed[name]).to(device) for name in ("num", "cat"))
                return network(num, cat).cpu().numpy()

        return answer

    def onnxruntime(self, size: int, on: Place) -> Callable[[], Any]:
        threads = 1 if on == "cuda" or size == 1 else core_count()
        session, feed = open_session(self.graph, threads=threads, device=on), self.feed(size)
        return lambda: session.run(["logits"], feed)[0]


def runtime(table: Table, place: Place) -> Claim:
    """Medians of calls in turns, at three sizes of a request."""
    answers = Answers(table, place, (512, 256))
    torch.set_num_threads(core_count())
    places: tuple[Place, ...] = ("cpu", "cuda") if place == "cuda" else ("cpu",)
    cases, lines, figures = {}, [], {}
    for on in places:
        for size in SIZES:
            eager, session = answers.torch(size, on), answers.onnxruntime(size, on)
            if np.abs(eager() - session()).max() > APART:
                raise ValueError(f"torch and ONNX Runtime differ at {size} rows on {on}")
            found = _in_turns({"torch": eager, "onnxruntime": session})
            times = found["torch"] / found["onnxruntime"]
            rows = "1 row" if size == 1 else f"{size:,} rows"
            cases[f"{rows} on {on}"] = times >= 2
            figures[f"ort_{on}_{size}"] = times
            lines.append(
                f"{rows} on {on}: torch eager {found['torch'] * 1e6:,.0f} us, "
                f"ONNX Runtime {found['onnxruntime'] * 1e6:,.0f} us: {times:.2f} times as fast"
            )
    says = "ONNX Runtime halves the latency of torch"
    return Claim(name="runtime", says=says, cases=cases, lines=lines, figures=figures)


def joined(table: Table, place: Place) -> Claim:
    """What joining can gain at most: 64 runs of one row against one run of 64, without a server."""
    cases, lines, figures = {}, [], {}
    kinds = {"a middle network": (512, 256), "a large one": (2048, 2048)}
    for name, hidden in kinds.items():
        answers = Answers(table, place, hidden)
        one, many = answers.onnxruntime(1, place), answers.onnxruntime(JOINED, place)
        found = _in_turns({"one": one, "many": many})
        times = found["one"] * JOINED / found["many"]
        cases[f"{name} on {place}"] = times >= 4
        figures[f"joined_{name.split()[1]}"] = times
        lines.append(
            f"{name} {list(hidden)} on {place}: {found['one'] * 1e6:,.0f} us for a row, "
            f"{found['many'] * 1e6:,.0f} us for {JOINED}: {times:.1f} times the rows per second"
        )
    says = f"joining {JOINED} requests gives several times the throughput (at least 4)"
    return Claim(name="joined", says=says, cases=cases, lines=lines, figures=figures)


def _in_turns(calls: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Returns the median of the mean seconds of a call, over rounds."""
    means: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(_ROUNDS + 1):
        for name, call in calls.items():
            count, began = 0, time.perf_counter()
            while time.perf_counter() - began < _ROUND_S or count < 3:
                call()
                count += 1
            if turn:
                means[name].append((time.perf_counter() - began) / count)
    return {name: statistics.median(found) for name, found in means.items()}
