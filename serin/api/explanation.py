"""An explanation as notebooks and the command show it: a frame that adds up, and the largest contributions first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import pandas as pd

    from serin.scoring.explain.explanation import Contributions

_SHOWN_ROWS, _SHOWN_COLUMNS = 5, 8
OWN = ("base", "margin", "score")


class Contribution(NamedTuple):
    """A raw column with its value in the row (None where the model derived it), and what it adds."""

    column: str
    value: Any
    adds: float


@dataclass(frozen=True, slots=True)
class ExplainedRow:
    """One score: `margin` is `base` plus everything that the columns add, the largest contribution first. `output`:
    the class or target, None where there is only one."""

    row: Any
    output: str | None
    base: float
    margin: float
    score: float
    contributions: tuple[Contribution, ...]


class Explanation:
    """Which raw columns made each score.

    `frame` has the index of the rows and one column for each raw column, then `base`, `margin` and `score`: the raw
    columns and `base` add up to `margin`, in the unit that `scale` names (log-odds for a probability), and `score` is
    what `predict` answers. With several classes or targets it has a row for each of them, and `output` is the second
    level of the index. `sources` says of each raw column whether a request brings it, or the model looks it up or
    derives it. `method` is TreeSHAP or integrated gradients; `note` names a difference between what is explained and
    what is served, if there is one.

    A notebook shows the first rows, with the largest contributions first."""

    frame: pd.DataFrame
    scale: str
    method: str
    sources: dict[str, str]
    note: str

    def __init__(self, found: Contributions, rows: pd.DataFrame) -> None:
        self.scale, self.method, self.note = found.scale, found.method, found.note
        self.sources = dict(found.sources)
        self._found, self._rows = found, rows
        self.frame = _frame(found, rows)

    def __len__(self) -> int:
        return len(self._found)

    def rows(self, *, likeliest: bool = False) -> Iterator[ExplainedRow]:
        """Each score with its contributions, the largest first. `likeliest`: of several classes, only the one that
        the model chooses."""
        found = self._found
        looked_up = found.look_up()
        for at in range(len(found)):
            chosen = [int(found.score[at].argmax())] if likeliest else range(len(found.outputs))
            values = {name: self._rows[name].iloc[at] for name in found.columns if name in self._rows}
            values |= {name: column[at] for name, column in looked_up.items()}
            for output in chosen:
                order = np.argsort(-np.abs(found.values[at, output]), kind="stable")
                names = [found.columns[place] for place in order]
                adds = found.values[at, output, order].tolist()
                yield ExplainedRow(
                    row=self._rows.index[at],
                    output=found.outputs[output] if len(found.outputs) > 1 else None,
                    base=float(found.base[at, output]),
                    margin=float(found.margin[at, output]),
                    score=float(found.score[at, output]),
                    contributions=tuple(
                        Contribution(name, values.get(name), each)
                        for name, each in zip(names, adds, strict=True)
                    ),
                )

    def __repr__(self) -> str:
        return f"{self._title()}\n{self.frame!r}"

    def _title(self) -> str:
        return f"{len(self):,} rows explained by {self.method}, in units of: {self.scale}"

    def _repr_html_(self) -> str:
        several = self.scale == "logit of each class"
        shown = []
        for row in self.rows(likeliest=several):
            shown.append(_html(row))
            if len(shown) == _SHOWN_ROWS:
                break
        left = len(self) - _SHOWN_ROWS
        more = f"<p>{left:,} more rows are in <code>frame</code>.</p>" if left > 0 else ""
        note = f"<p>{escape(self.note)}</p>" if self.note else ""
        return f"<div><strong>{escape(self._title())}</strong>{''.join(shown)}{more}{note}</div>"


def in_frame(name: str) -> str:
    """The name of a raw column in a frame; one that the frame itself has is marked."""
    return f"{name} (column)" if name in OWN else name


def _frame(found: Contributions, rows: pd.DataFrame) -> pd.DataFrame:
    import pandas as pd

    outputs = len(found.outputs)
    index: pd.Index[Any] = rows.index
    if outputs > 1:
        levels: list[Any] = [index, list(found.outputs)]
        name = "row" if index.name is None else index.name
        index = pd.MultiIndex.from_product(levels, names=[name, "output"])
    values = found.values.reshape(len(found) * outputs, len(found.columns))
    columns: dict[str, Any] = {in_frame(name): values[:, place] for place, name in enumerate(found.columns)}
    own = {name: getattr(found, name).reshape(-1) for name in OWN}
    return pd.DataFrame({**columns, **own}, index=index)


def _html(row: ExplainedRow) -> str:
    """A table for one score, with bars that show the size and the direction of each contribution."""
    largest = max((abs(each.adds) for each in row.contributions), default=0.0) or 1.0
    cells = []
    for each in row.contributions[:_SHOWN_COLUMNS]:
        width, colour = 100 * abs(each.adds) / largest, "#b2533a" if each.adds > 0 else "#2c6e8f"
        bar = f'<div style="width:{width:.0f}px;height:0.8em;background:{colour}"></div>'
        value = "" if each.value is None else str(each.value)
        cells.append(
            f'<tr><th style="text-align:left">{escape(each.column)}</th><td>{escape(value)}</td>'
            f"<td>{each.adds:+.4f}</td><td>{bar}</td></tr>"
        )
    rest = row.contributions[_SHOWN_COLUMNS:]
    if rest:
        total = sum(each.adds for each in rest)
        cells.append(f"<tr><th>{len(rest)} other columns</th><td></td><td>{total:+.4f}</td><td></td></tr>")
    name = f"row {row.row}" if row.output is None else f"row {row.row}, {row.output}"
    head = f"{name}: score {row.score:.4f} (margin {row.margin:.4f} from base {row.base:.4f})"
    return f"<p>{escape(head)}</p><table>{''.join(cells)}</table>"
