"""explain/columns.json of a bundle: which raw column each feature belongs to, and the baseline of explanations.

Beside it, in the same folder, is the trained model itself (formats.trained): trees.ubj or weights.safetensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from serin.machine.documents import read_facts, write_facts
from serin.machine.typed_json import Document

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
class ExplainRecord(Document, form="serin.explain"):
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
    write_facts(folder / FILE, record.to_json())


def read_explain(folder: Path) -> ExplainRecord:
    """The record of a bundle's folder `explain`; BundleBroken when it cannot be read."""
    return read_facts(folder / FILE, ExplainRecord.from_json)
