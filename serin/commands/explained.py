"""Explanations on the screen and in files: those of rows in a file, and how one row is shown."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from serin.api.explanation import ExplainedRow, Explanation
from serin.commands.output import counted, show, show_json
from serin.commands.predictions import open_bundle
from serin.errors import RowsUnfit
from serin.formats.rows import read_rows, write_rows
from serin.scoring.explain.explainer import Explainer

SHOWN_ROWS: Final = 20
CLASSES: Final = "logit of each class"
_SHOWN_COLUMNS = 5


def explain_file(model: str, rows: Path, *, number: int | None, out: Path | None, as_json: bool) -> None:
    """Shows or writes the contributions to the scores of a file's rows."""
    bundle = open_bundle(model)
    pieces = _explain_file(Explainer(bundle.path, digest=bundle.digest), rows, Path(bundle.path), number)
    if out is not None:
        count = _write(pieces, out)
        show(f"{counted(count, 'row')} explained by {model} into {out}")
    elif as_json:
        show_json([to_entry(row) for piece in pieces for row in piece.rows()])
    else:
        _show(pieces, number or SHOWN_ROWS)


def to_entry(row: ExplainedRow) -> dict[str, Any]:
    entry: dict[str, Any] = {"row": row.row, "score": row.score, "margin": row.margin, "base": row.base}
    if row.output is not None:
        entry["output"] = row.output
    return entry | {"contributions": {each.column: each.adds for each in row.contributions}}


def show_unit(explanation: Explanation) -> None:
    show(f"{explanation.method}; contributions, base and margin in units of: {explanation.scale}")


def show_row(row: ExplainedRow, name: str) -> None:
    what = name if row.output is None else f"{name}, {row.output}"
    show(f"\n{what}: score {row.score:.4f} (margin {row.margin:+.4f}, base {row.base:+.4f})")
    first, rest = row.contributions[:_SHOWN_COLUMNS], row.contributions[_SHOWN_COLUMNS:]
    lines = [(each.column, _value(each.value), f"{each.adds:+.4f}") for each in first]
    if rest:
        lines.append((f"{len(rest)} other columns", "", f"{sum(each.adds for each in rest):+.4f}"))
    widths = [max(len(line[place]) for line in lines) for place in range(3)]
    for column, value, adds in lines:
        show(f"  {column:<{widths[0]}}  {value:<{widths[1]}}  {adds:>{widths[2]}}")


def _value(value: object) -> str:
    text = "" if value is None else str(value)
    return text if len(text) <= 24 else f"{text[:21]}..."


def _explain_file(
    explainer: Explainer, rows: Path, bundle: Path, number: int | None
) -> Iterator[Explanation]:
    """A piece of the file at a time, the first `number` rows or all; the index counts the rows of the file from 0."""
    done = 0
    for table in read_rows(rows, explainer.schema, bundle):
        if number is not None:
            table = table.slice(0, number - done)
        if not len(table):
            break
        frame = table.to_pandas()
        frame.index += done
        done += len(frame)
        yield Explanation(explainer.explain(table), frame)
    if not done:
        raise RowsUnfit(column="", reason=f"in {rows} has no rows")


def _write(pieces: Iterator[Explanation], out: Path) -> int:
    count = 0
    with write_rows(out) as writer:
        for piece in pieces:
            frame = piece.frame.rename_axis("row") if piece.frame.index.nlevels == 1 else piece.frame
            writer.write_table(pa.Table.from_pandas(frame.reset_index(), preserve_index=False))
            count += len(piece)
    return count


def _show(pieces: Iterator[Explanation], most: int) -> None:
    shown = total = 0
    last = None
    for piece in pieces:
        total += len(piece)
        last = piece
        if shown == 0:
            show_unit(piece)
        for row in piece.rows(likeliest=piece.scale == CLASSES):
            if shown == most:
                break
            show_row(row, f"row {row.row}")
            shown += 1
    if last is not None and last.note:
        show(last.note)
    if total > shown:
        show(f"{shown:,} of {total:,} rows are shown; --out FILE writes all of them")
