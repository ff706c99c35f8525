"""Datasets, trained weights and published versions as notebooks use them: frames, metrics, scores, their pages."""

from __future__ import annotations

import webbrowser
from abc import abstractmethod
from collections.abc import Mapping
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from serin.errors import NotFound
from serin.pipeline.stage import StageResult
from serin.store import artifacts
from serin.store.receipt import Receipt
from serin.store.store import Store

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas as pd

    from serin.api.explanation import Explanation
    from serin.pipeline.labels import LabelsAdded
    from serin.scoring.explain.explainer import Explainer
    from serin.scoring.predict import Scorer

_CARD = "card.md"
_REPORT = "report.html"
_HEIGHT_PX = 600


class Result:
    """The result of a stage. `ran`: False when an earlier result was found. `why`: why it ran, or what was found.
    `receipt`: what the work cost; None when nothing was done."""

    path: Path
    ran: bool
    why: str
    receipt: Receipt | None

    def __init__(self, result: StageResult[Any]) -> None:
        self.path = Path(result.value.path)
        self.ran, self.why, self.receipt = result.ran, result.why, result.receipt

    @abstractmethod
    def _title(self) -> str: ...

    @abstractmethod
    def _facts(self) -> dict[str, object]: ...

    def _story(self) -> dict[str, object]:
        done: dict[str, object] = {"ran" if self.ran else "found": self.why}
        if self.receipt is not None:
            done["seconds"] = f"{self.receipt.seconds:.1f}"
            if self.receipt.advice:
                done["advice"] = self.receipt.advice
        return done

    def __repr__(self) -> str:
        facts = {**self._facts(), **self._story(), "path": self.path}
        width = max(map(len, facts))
        return "\n".join([self._title(), *(f"  {name:<{width}}  {value}" for name, value in facts.items())])

    def _repr_html_(self) -> str:
        return facts_table(self._title(), {**self._facts(), **self._story(), "path": self.path})


class Page:
    """A page on disk: HTML or Markdown. A notebook shows it; `open` shows it in a browser; `text` is its source."""

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise NotFound(kind="page", name=str(path), known=[])
        self.path = path

    @property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    def open(self) -> None:
        """Shows the page in the default browser."""
        webbrowser.open(self.path.as_uri())

    def __str__(self) -> str:
        return f"page in {self.path}" if self._is_html else self.text

    def __repr__(self) -> str:
        return f"Page({str(self.path)!r})"

    def _repr_html_(self) -> str | None:
        """In a frame, so that its style does not touch the notebook; it has no script."""
        if not self._is_html:
            return None
        frame = f'style="width:100%;height:{_HEIGHT_PX}px;border:1px solid #ccc" sandbox=""'
        return f'<iframe {frame} srcdoc="{escape(self.text)}"></iframe>'

    def _repr_markdown_(self) -> str | None:
        return None if self._is_html else self.text

    @property
    def _is_html(self) -> bool:
        return self.path.suffix == ".html"


def facts_table(title: str, facts: Mapping[str, object]) -> str:
    """A title and a table of names and values, as HTML."""
    rows = "".join(
        f'<tr><th style="text-align:left">{escape(name)}</th><td style="text-align:left">{escape(str(value))}</td></tr>'
        for name, value in facts.items()
    )
    return f"<div><strong>{escape(title)}</strong><table>{rows}</table></div>"


class Checkpoint(Result):
    """Trained weights.

    `metrics`: measured on the valid and test rows. `step`: the optimizer step with the best valid metric. `ran`, `why`
    and `receipt`: as those of a Dataset.

    Examples:
        >>> checkpoint = pipeline.train()
        >>> sorted(checkpoint.metrics)
        ['test_auc', 'test_average_precision', 'test_logloss', 'valid_auc', 'valid_average_precision', 'valid_logloss']
    """

    metrics: dict[str, float]
    step: int

    def __init__(self, result: StageResult[artifacts.Checkpoint]) -> None:
        super().__init__(result)
        self.metrics, self.step = dict(result.value.metrics), result.value.step

    def _title(self) -> str:
        return f"Checkpoint of step {self.step:,}"

    def _facts(self) -> dict[str, object]:
        return {name: f"{value:.4f}" for name, value in sorted(self.metrics.items())}


class Model(Result):
    """A published model version: one ONNX graph from raw columns to scores that has passed the gate.

    `name` and `version` are what clients and `serin rollout start` ask for; `digest` names the content. `ran`, `why`
    and `receipt`: as those of a Dataset.

    Examples:
        >>> model = pipeline.export()
        >>> (model.name, model.version)
        ('late-parcels', 1)
        >>> model.predict(frame).columns.tolist()
        ['score']
        >>> Model.load("late-parcels", 1).version
        1
        >>> model.explain(frame.head()).frame.columns.tolist()
        ['weight', 'distance', 'carrier', 'base', 'margin', 'score']
    """

    name: str
    version: int
    digest: str
    metrics: dict[str, float]

    def __init__(self, result: StageResult[artifacts.Bundle]) -> None:
        super().__init__(result)
        bundle = result.value
        self.name, self.version, self.digest = bundle.model, bundle.version, bundle.digest
        self.metrics = dict(bundle.metrics)
        self._bundle = bundle

    @classmethod
    def load(cls, name: str, version: int | str = "live") -> Self:
        """A version that was published before, by its number (`3e2`: edition 2 of its lookups), or as `live`,
        `candidate` or `previous`. NotFound names those there are. BundleUntrusted when signatures are required and no
        trusted key has signed it."""
        from serin.store.trust import find_trusted

        bundle = find_trusted(Store.open(), name, version)
        return cls(StageResult(value=bundle, ran=False, why=f"published version {bundle.version}"))

    def predict(self, frame: pd.DataFrame) -> pd.DataFrame:
        """The model's answers for raw rows, computed in this process by the published graph: `score`, or for several
        classes `label` and a column of probabilities for each. The index is the frame's; other columns are ignored.

        RowsUnfit names a column that is missing or of the wrong kind."""
        from serin.pipeline.frames import answer_frame

        return answer_frame(self._scorer, frame)

    def explain(self, frame: pd.DataFrame) -> Explanation:
        """Which raw columns made the scores of raw rows: TreeSHAP for trees, integrated gradients for networks. The
        contributions of a row and its base value add up to its margin (log-odds for a probability).

        ExplanationRefused for a model whose inside Serin does not know, such as a graph from elsewhere; RowsUnfit
        names a column that is missing or of the wrong kind."""
        from serin.api.explanation import Explanation

        return Explanation(self._explainer.explain(frame), frame)

    def add_labels(
        self,
        frame: pd.DataFrame,
        *,
        request_id: str | None = None,
        row: str | None = None,
        client_id: str | None = None,
        on: Sequence[str] = (),
        value: str | None = None,
        time: str | None = None,
    ) -> LabelsAdded:
        """Stores the truth about answers that this model gave, as `serin labels add` does; each argument names a column
        of the frame. Late, repeated and corrected labels are normal: of several for one row the newest counts, by
        `time` or by arrival. Returns how many were matched with recorded rows, and how many were not.

        LabelsUnfit names a column that is missing, of the wrong type, or with a value that is not a label."""
        from serin.formats.wire import as_arrow
        from serin.monitoring.quality.labels import Columns
        from serin.watcher.cluster_state import store_labels

        columns = Columns(id=request_id, row=row, client_id=client_id, on=tuple(on), value=value, time=time)
        return store_labels(self._bundle, as_arrow(frame), columns)

    def card(self) -> Page:
        """The model card: inputs, features, metrics, gate and lineage. A notebook shows it."""
        return Page(self.path / _CARD)

    @cached_property
    def _scorer(self) -> Scorer:
        from serin.scoring.predict import Scorer

        return Scorer(self.path, digest=self.digest)

    @cached_property
    def _explainer(self) -> Explainer:
        from serin.scoring.explain.explainer import Explainer

        return Explainer(self.path, digest=self.digest)

    def _title(self) -> str:
        return f"{self.name}, version {self.version}"

    def _facts(self) -> dict[str, object]:
        return {name: f"{value:.4f}" for name, value in sorted(self.metrics.items())}


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
