"""Writes a first spec for a table: types, target and features guessed, each guess explained in a comment."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from serin.columns.column import Column, column_from_arrow, kind_of_type
from serin.draft.guess_target import GuessedTarget, guess_target
from serin.draft.sniff_csv import sniff_table, table_lines
from serin.errors import ColumnMissing, TableUnusable
from serin.etl.sources.find import find_table
from serin.etl.sources.partitions import Read
from serin.etl.sources.tables import cut, open_table, read_piece
from serin.expressions import parse
from serin.metrics import auc
from serin.spec.tables import TableSource

SAMPLE_ROWS = 200_000
_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_RESERVED = {"y", "n", "yes", "no", "on", "off", "true", "false", "null", "none"}


@dataclass(frozen=True, slots=True)
class Guess:
    """What a column is used as, and why."""

    column: str
    use: str  # numeric, categorical, time, out
    why: str


def guess_spec(
    table: Path | str,
    target: str | None = None,
    *,
    path_in_spec: str | None = None,
    name: str | None = None,
) -> str:
    """A commented spec (YAML) for the table at this path or URL. `target`: a column or an expression; None: guessed.
    `path_in_spec`: how the spec's file refers to the table, when not by the path given. `name`: the pipeline's; None:
    made of the table's."""
    sniffed = sniff_table(str(table))
    columns, rows = _sample(sniffed.source(str(table)))
    guessed = guess_target(columns, target)
    for used in parse(guessed.expression).columns:
        if used not in columns:
            raise ColumnMissing(column=used, table=str(table), used_by="target", known=columns)
    time = _time_column(columns)
    guesses = [
        _guess(each, column, guessed, is_time=each == time)
        for each, column in columns.items()
        if each not in parse(guessed.expression).columns
    ]
    if not any(guess.use in ("numeric", "categorical", "time") for guess in guesses):
        raise TableUnusable(table=str(table), problem="no column is left to make a feature of")
    source = table_lines(path_in_spec or str(table), sniffed)
    return _yaml(name or _model_name(str(table)), source, rows, guessed, time, guesses)


def _sample(source: TableSource) -> tuple[dict[str, Column], int]:
    """The table's first rows, and how many it has in all. Text that is a time throughout is one."""
    with tempfile.TemporaryDirectory() as scratch:
        opened = open_table("main", find_table("main", source), Path(scratch))
        kinds = {name: kind_of_type(arrow) for name, arrow in opened.types.items()}
        reads = [Read(column=name, kind=kind) for name, kind in kinds.items() if kind is not None]
        columns = read_piece(cut(opened, SAMPLE_ROWS)[0], reads)
    for name, column in columns.items():
        if column.kind == "string":
            columns[name] = _as_time(column)
    return columns, opened.rows


def _as_time(column: Column) -> Column:
    assert column.dictionary is not None
    if len(column.dictionary) == 0:
        return column
    try:
        return column_from_arrow(column.to_arrow(), "timestamp")
    except ValueError:  # pa.ArrowInvalid is one
        return column


def _time_column(columns: dict[str, Column]) -> str | None:
    times = [name for name, column in columns.items() if column.kind == "timestamp" and not column.null.all()]
    return next((name for name in times if len(np.unique(columns[name].values)) > 1), None)


def _guess(name: str, column: Column, target: GuessedTarget, *, is_time: bool) -> Guess:
    null = column.null
    distinct = len(np.unique(column.values[~null]))
    rows = len(column)
    missing = f", {null.mean():.1%} null" if null.any() else ""
    if distinct < 2:
        return Guess(name, "out", "holds one value only" if distinct else "holds no value")
    if column.kind == "timestamp":
        why = "a time" + (": the split is by it, the latest rows test" if is_time else "")
        return Guess(name, "time", why + missing)
    leak = _leak(column, null, target)
    if leak:
        return Guess(name, "out", leak)
    if column.kind == "string":
        if distinct > max(50, 0.5 * (~null).sum()):
            return Guess(name, "out", f"nearly every row has its own text ({distinct:,} different)")
        return Guess(name, "categorical", f"text, {distinct:,} different values{missing}")
    if column.kind == "int" and distinct == rows and (np.diff(column.values) > 0).all():
        return Guess(name, "out", "counts the rows")
    if column.kind in ("int", "bool") and distinct <= 12:
        return Guess(name, "categorical", f"{distinct} different values{missing}")
    numbers = column.floats()[~null]
    return Guess(name, "numeric", f"numbers from {numbers.min():g} to {numbers.max():g}{missing}")


def _leak(column: Column, null: npt.NDArray[np.bool_], target: GuessedTarget) -> str | None:
    """Why a column seems to be known only after the answer; None when it does not."""
    unknown = target.null
    if unknown.any() and null.sum() >= 0.001 * len(column):
        both = (null & unknown).sum()
        if both > 0.8 * unknown.sum() and both > 0.5 * null.sum():
            return "is missing where the target is missing: probably known only afterwards"
    if column.kind == "string" or target.task == "multiclass":
        return None
    used = ~null & ~unknown
    values, answers = column.floats()[used], target.values[used]
    if len(values) < 10 or np.ptp(values) == 0 or np.ptp(answers) == 0:
        return None
    if target.task == "binary":
        area = float(auc(answers, values))
        strength = max(area, 1 - area)
        return f"alone gives the answer away (AUC {strength:.2f})" if strength > 0.9 else None
    strength = abs(float(np.corrcoef(values.astype(np.float64), answers.astype(np.float64))[0, 1]))
    return f"alone gives the answer away (correlation {strength:.2f})" if strength > 0.95 else None


def _yaml(
    name: str,
    table: Sequence[str],
    rows: int,
    target: GuessedTarget,
    time: str | None,
    guesses: Sequence[Guess],
) -> str:
    chosen = {
        use: [guess for guess in guesses if guess.use == use]
        for use in ("numeric", "categorical", "time", "out")
    }
    lines = [
        f"# A first spec, guessed from {rows:,} rows. Read the comments, correct what is wrong, then `serin check`.",
        f"name: {name}",
        "data:",
        "  tables:",
        *table,
        f"  # {target.why}",
        f"  target: {{expression: {_quoted(target.expression)}, task: {target.task}}}",
    ]
    if time is not None:
        lines += [
            f"  # {time} is the time: train on the past, test on the latest rows",
            f"  time: {_word(time)}",
        ]
    else:
        lines += ["  # no time column was found: rows are split by a hash of their position"]
    lines += ["  split: {train: 0.8, valid: 0.1, test: 0.1}"]
    if chosen["out"]:
        lines += ["  # Columns that were left out; put one back into the features if the reason is wrong."]
        lines += [f"  #   {guess.column}: {guess.why}" for guess in chosen["out"]]
    lines += ["features:"]
    least = 10 if rows >= 10_000 else 1
    lines += _feature(chosen["numeric"], "[fill_median, clip: {q: [0.001, 0.999]}, normalize]")
    lines += _feature(chosen["categorical"], f"[categorify: {{min_count: {least}}}]")
    lines += _feature(chosen["time"], "[date_parts: [hour, weekday, month]]")
    lines += ["model: {kind: mlp}", "training: {epochs: 5}"]
    return "\n".join(lines) + "\n"


def _feature(guesses: Sequence[Guess], steps: str) -> list[str]:
    if not guesses:
        return []
    lines = [f"  # {guess.column}: {guess.why}" for guess in guesses]
    return [
        *lines,
        f"  - columns: [{', '.join(_word(guess.column) for guess in guesses)}]",
        f"    steps: {steps}",
    ]


def _word(text: str) -> str:
    return text if _WORD.fullmatch(text) and text.lower() not in _RESERVED else _quoted(text)


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _model_name(path: str) -> str:
    stem = re.sub(r"[^a-z0-9]+", "-", path.rstrip("/").rsplit("/", 1)[-1].split(".")[0].lower()).strip("-")
    return (stem if stem[:1].isalpha() else f"model-{stem}")[:60].strip("-") or "model"
