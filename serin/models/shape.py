"""The shape of a table as a network needs it: columns of each kind, outputs. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from serin.formats.dataset import DatasetDescription
from serin.formats.trained import WEIGHTS, ModelRecord
from serin.spec.model import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class TableShape:
    """The shape of a table.

    `sizes`: for each categorical column its number of codes, null and out-of-vocabulary included. `units`: the answer
    is a value in the target's unit (a regression), not logits.
    """

    numeric: int
    sizes: tuple[int, ...]
    outputs: int
    units: bool = False

    def __post_init__(self) -> None:
        if self.numeric + len(self.sizes) == 0:
            raise ValueError(
                "a table without feature columns cannot be learned from; name some under features:"
            )
        if self.numeric < 0 or self.outputs < 1 or any(size < 1 for size in self.sizes):
            raise ValueError(f"no table has this shape: {self}")


def shape_of(data: DatasetDescription) -> TableShape:
    """Returns the shape that a model must have to fit the dataset."""
    return TableShape(
        numeric=len(data.numeric),
        sizes=tuple(column.size for column in data.categorical),
        outputs=data.outputs,
        units=data.task == "regression",
    )


def shape_of_record(record: ModelRecord) -> TableShape:
    """Returns the shape of the table that a model of model.json was trained on."""
    shape = record.shape
    assert shape is not None  # of a model with columns it is always known
    units = record.task == "regression"
    return TableShape(numeric=shape.numeric, sizes=shape.sizes, outputs=shape.outputs, units=units)


def record_of(model: ModelSpec, data: DatasetDescription, file: str = WEIGHTS) -> dict[str, Any]:
    """Returns the fields of model.json for a model in `file` that was trained on the dataset."""
    shape = shape_of(data)
    columns = {"numeric": shape.numeric, "sizes": shape.sizes, "outputs": shape.outputs}
    return {"model": model.model_dump(), "shape": columns, "task": data.task, "file": file}
