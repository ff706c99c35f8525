"""explain/columns.json of a bundle: which raw column each feature belongs to, and the baseline of explanations.

Beside it, in the same folder, is the trained model itself (formats.trained): trees.ubj or weights.safetensors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from serin.errors import BundleBroken

FORMAT, VERSION = "serin.explain", 1
FOLDER, FILE = "explain", "columns.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureColumns:
    """For each feature, in the order of the model's inputs, the raw column that it belongs to. `sources` says of every
    raw column where its values come from."""

    numeric: tuple[str, ...]
    categorical: tuple[str, ...]
    sources: dict[str, str]

    @property
    def names(self) -> tuple[str, ...]:
        """The raw columns, each once, in the order of the features."""
        return tuple(dict.fromkeys((*self.numeric, *self.categorical)))

    @property
    def places(self) -> tuple[int, ...]:
        """For each feature, numeric ones first, the place of its raw column in `names`."""
        names = self.names
        return tuple(names.index(name) for name in (*self.numeric, *self.categorical))


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainRecord:
    """`num_tensor` and `cat_tensor`: the names of the feature tensors inside model.onnx. `baseline_num` and
    `baseline_cat`: the mean of each number and the most frequent code among the training rows, from which integrated
    gradients start."""

    num_tensor: str
    cat_tensor: str
    columns: FeatureColumns
    baseline_num: tuple[float, ...]
    baseline_cat: tuple[int, ...]


def write_explain(folder: Path, record: ExplainRecord) -> None:
    """Writes columns.json into the bundle's folder `explain`."""
    document = {"format": FORMAT, "version": VERSION, **asdict(record)}
    text = json.dumps(document, indent=1, allow_nan=False, ensure_ascii=False)
    (folder / FILE).write_text(text + "\n", encoding="utf-8")


def read_explain(folder: Path) -> ExplainRecord:
    """The record of a bundle's folder `explain`; BundleBroken when it cannot be read."""
    path = folder / FILE
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document.get("format") != FORMAT or document.get("version") != VERSION:
            raise ValueError(f"not a {FORMAT} version {VERSION} document")
        return ExplainRecord(
            num_tensor=document["num_tensor"],
            cat_tensor=document["cat_tensor"],
            columns=_columns(document["columns"]),
            baseline_num=tuple(float(value) for value in document["baseline_num"]),
            baseline_cat=tuple(int(code) for code in document["baseline_cat"]),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BundleBroken(path=str(path), reason=f"{type(error).__name__}: {error}") from error


def _columns(entry: Mapping[str, Any]) -> FeatureColumns:
    return FeatureColumns(
        numeric=tuple(entry["numeric"]),
        categorical=tuple(entry["categorical"]),
        sources=dict(entry["sources"]),
    )
