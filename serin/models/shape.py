"""What a network must know of its table: how many columns of each kind, how many outputs. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

from serin.formats.dataset import DatasetDescription


@dataclass(frozen=True, slots=True, kw_only=True)
class TableShape:
    """`sizes`: for each categorical column its number of codes, null and out-of-vocabulary included. `units`: is the
    answer a value in a unit of its own (a regression), not logits?"""

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
    """What a model must take and give to fit the dataset."""
    return TableShape(
        numeric=len(data.numeric),
        sizes=tuple(column.size for column in data.categorical),
        outputs=data.outputs,
        units=data.task == "regression",
    )
