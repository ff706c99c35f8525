"""The same file in ONNX Runtime with the same threads, for every peer."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnxruntime

TEXTS = 4
NUMBERS = 6


class Graph:
    """Columns in, scores out. The path comes from the environment, because some peers start their own processes."""

    def __init__(self) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = int(os.environ["BENCH_THREADS"])
        options.inter_op_num_threads = 1
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        self._session = onnxruntime.InferenceSession(
            os.environ["BENCH_MODEL"], options, providers=["CPUExecutionProvider"]
        )

    def score(self, columns: Mapping[str, Sequence[Any]]) -> list[float]:
        feed: dict[str, Any] = {}
        for index in range(TEXTS):
            feed[f"t{index}"] = np.array(columns[f"t{index}"], dtype=object).reshape(-1, 1)
        for index in range(NUMBERS):
            feed[f"n{index}"] = np.array(columns[f"n{index}"], dtype=np.float32).reshape(-1, 1)
        scores: list[float] = self._session.run(["score"], feed)[0].reshape(-1).tolist()
        return scores

    def score_bytes(self, body: bytes) -> bytes:
        """Scores a body of plain bytes and returns float32 scores.

        The body: the number of rows (uint32), all numbers column after column (float32), all strings column after
        column with a newline between them.
        """
        rows = int.from_bytes(body[:4], "little")
        end = 4 + 4 * NUMBERS * rows
        numbers = np.frombuffer(body, "<f4", NUMBERS * rows, 4).reshape(NUMBERS, rows, 1)
        texts = np.array(body[end:].decode().split("\n"), dtype=object).reshape(TEXTS, rows, 1)
        feed = {f"t{index}": texts[index] for index in range(TEXTS)}
        feed |= {f"n{index}": numbers[index] for index in range(NUMBERS)}
        scores: bytes = self._session.run(["score"], feed)[0].tobytes()
        return scores

    def score_all(self, batch: Sequence[Mapping[str, Sequence[Any]]]) -> list[list[float]]:
        """Scores several requests in one run."""
        joined = {name: [value for columns in batch for value in columns[name]] for name in batch[0]}
        scores = self.score(joined)
        found, start = [], 0
        for columns in batch:
            end = start + len(columns["n0"])
            found.append(scores[start:end])
            start = end
        return found
