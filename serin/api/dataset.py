"""A dataset as notebooks use it: rows as frames, and the page about it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from serin.api.page import Page
from serin.api.result import Result
from serin.pipeline.stage import StageResult
from serin.store import artifacts

if TYPE_CHECKING:
    import pandas as pd

_REPORT = "report.html"


class Dataset(Result):
    """The features and targets that a model learns from, split into train, valid and test.

    `digest` names the content; `rows` counts the rows of each split; `path` is the folder. `ran` says whether it was
    built by this call, `why` gives the reason, `receipt` the cost (None when an earlier dataset was found).

    Examples:
        >>> dataset = pipeline.build_dataset()
        >>> sorted(dataset.rows)
        ['test', 'train', 'valid']
        >>> dataset.to_pandas("test").columns.tolist()
        ['weight', 'distance', 'carrier', 'target']
    """

    digest: str
    rows: dict[str, int]

    def __init__(self, result: StageResult[artifacts.Dataset]) -> None:
        super().__init__(result)
        self.digest, self.rows = result.value.digest, dict(result.value.rows)

    def to_pandas(self, split: Literal["train", "valid", "test"] = "train") -> pd.DataFrame:
        """The rows of a split: numeric features as the model gets them (filled, clipped, scaled), categories as the
        values that their codes mean, then `target`. The index is the row's number in the main table."""
        from serin.pipeline.frames import read_frame

        return read_frame(self.path, split)

    def report(self) -> Page:
        """The page about the dataset: distributions, nulls, relation to the target, warnings. A notebook shows it."""
        return Page(self.path / _REPORT)

    def _title(self) -> str:
        return f"Dataset {self.digest[:12]}"

    def _facts(self) -> dict[str, object]:
        return {"rows": ", ".join(f"{split} {count:,}" for split, count in self.rows.items())}
