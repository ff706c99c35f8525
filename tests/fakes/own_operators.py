"""Operators as users write them: one that fits nothing, one that fits, one on text, one that makes codes."""

from typing import Any, Self

import numpy as np


class Squash:
    """x / (1 + |x|), which keeps everything within -1 and 1."""

    makes, reads = "numeric", "numbers"

    def transform(self, values: np.ndarray) -> np.ndarray:
        bounded = np.clip(values, np.float32(-1e30), np.float32(1e30))
        return bounded / (np.abs(bounded) + np.float32(1))

    def to_onnx(self, graph: Any, values: str) -> str:
        low, high = graph.constant(np.float32(-1e30)), graph.constant(np.float32(1e30))
        bounded = graph.op("Where", graph.op("Less", values, low), low, values)
        bounded = graph.op("Where", graph.op("Greater", bounded, high), high, bounded)
        one = graph.constant(np.float32(1))
        return graph.op("Div", bounded, graph.op("Add", graph.op("Abs", bounded), one))

    def describe(self) -> str:
        return "squashed between -1 and 1"

    def to_json(self) -> dict[str, Any]:
        return {}

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Self:
        return cls()


class AboveMost:
    """1 where a value is larger than all but a few of the training split's, else 0; null stays null."""

    makes, reads = "numeric", "numbers"

    def __init__(self, few: int = 3, limit: float | None = None) -> None:
        self.few, self.limit = few, limit

    def measure(self, values: np.ndarray) -> np.ndarray:
        return np.sort(values[np.isfinite(values)])[-self.few :]

    def merge(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        return np.sort(np.concatenate([left, right]))[-self.few :]

    def fit(self, measured: np.ndarray) -> Self:
        return type(self)(self.few, float(measured[0]) + 0.0 if len(measured) else 0.0)

    def transform(self, values: np.ndarray) -> np.ndarray:
        return np.where(np.isnan(values), values, (values > np.float32(self.limit)).astype(np.float32))

    def to_onnx(self, graph: Any, values: str) -> str:
        above = graph.op("Cast", graph.op("Greater", values, graph.constant(np.float32(self.limit))), to=1)
        return graph.op("Where", graph.op("IsNaN", values), values, above)

    def describe(self) -> str:
        return f"1 above {self.limit}"

    def to_json(self) -> dict[str, Any]:
        return {"few": self.few, "limit": self.limit}

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Self:
        return cls(**document)


class Known:
    """1 for a text from a list, 2 for another, 0 for null."""

    makes, reads, accepts, size = "categorical", "column", ("string",), 3

    def __init__(self, words: list[str]) -> None:
        self.words = words

    def transform(self, column: Any) -> np.ndarray:
        table = [1 if text in self.words else 2 for text in column.dictionary.to_pylist()]
        return np.asarray([*table, 0], np.int32)[column.values]

    def to_onnx(self, graph: Any, values: str) -> str:
        attributes = {
            "keys_strings": ["", *self.words],
            "values_int64s": [0, *(1 for _ in self.words)],
            "default_int64": 2,
        }
        return graph.op("LabelEncoder", values, domain="ai.onnx.ml", **attributes)

    def describe(self) -> str:
        return "1 if listed"

    def to_json(self) -> dict[str, Any]:
        return {"words": self.words}

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Self:
        return cls(**document)
