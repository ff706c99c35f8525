"""What each column of a table is used as in a first spec, and why."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from serin.columns.column import Column
from serin.draft.guess_target import GuessedTarget
from serin.draft.table_sample import TableSample
from serin.etl.dataset.leaks import (
    LEAK_SCORE,
    NULL_LEAK_SCORE,
    missing_together,
    score_by_nulls,
    score_by_values,
)
from serin.etl.relational.relation import Unknown

_FEW = 12  # different integers that are taken for categories
_UNIQUE_IS_AN_ID = 1000  # rows; among fewer, unique integers may be a measurement
_DAY_US = 86_400_000_000
_YEAR_US = 365.25 * _DAY_US
_TWO_YEARS_US = 2 * 365 * _DAY_US
_BIRTHS_SPAN_YEARS = 30
_BIRTH_NAME = re.compile(
    r"(?i:birth|geburt|naissance|nacimiento|nascita|geboorte)|(^|[_\s.-])(?i:dob|d_o_b|born|geb|gebdat)($|[_\s.-])|DOB|Dob$"
)
_STRONG = 0.9  # of 1: not refused, but worth a look
_ID_NAME = re.compile(r"(?i:(^|[_\s.-])(id|key|uuid|guid|nr|no|number|code)|key)$|[a-z](Id|ID|Key)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Guess:
    """What a column is used as. `use`: numeric, categorical, time or out. `long`: a time in which every month occurs
    more than once. `notice`: the reason is worth a line on the terminal."""

    column: str
    use: str
    why: str
    nulls: bool = False
    is_id: bool = False
    long: bool = False
    notice: bool = False


def guess_columns(sample: TableSample, target: GuessedTarget, by_time: str | None) -> list[Guess]:
    """A guess for each column that the target does not read, in the order of the table."""
    guesses = [
        _guess(name, column, sample, target, is_time=name == by_time)
        for name, column in sample.columns.items()
        if name not in target.columns
    ]
    return guesses + [
        Guess(column=name, use="out", why=why, notice=True) for name, why in sample.unusable.items()
    ]


def _guess(name: str, column: Column, sample: TableSample, target: GuessedTarget, *, is_time: bool) -> Guess:
    null = column.null
    distinct = len(np.unique(column.values[~null]))
    missing = f", {null.mean():.1%} null" if null.any() else ""

    def made(use: str, why: str, *, is_id: bool = False, notice: bool = False) -> Guess:
        return Guess(column=name, use=use, why=why, nulls=bool(null.any()), is_id=is_id, notice=notice)

    if distinct < 2:
        return made("out", "holds one value only" if distinct else "holds no value", notice=True)
    if column.kind == "timestamp":
        why = "a time" + (": the split is by it, the latest rows test" if is_time else "") + missing
        moments = column.values[~null]
        return replace(made("time", why), long=int(moments.max()) - int(moments.min()) >= _TWO_YEARS_US)
    leak, strength = _leak(column, sample, target)
    if leak is not None:
        return made("out", leak, notice=True)
    identity = _identity(name, column, sample, distinct)
    if identity is not None:
        return made("out", identity, is_id=True, notice=True)
    strong = ""
    if strength > _STRONG:
        strong = f"; alone it predicts the target well ({strength:.2f} of 1): is it known beforehand?"
    if column.kind == "string":
        return _guess_text(made, sample.odd.get(name, ""), distinct, int((~null).sum()), missing + strong)
    if column.kind in ("int", "bool") and distinct <= _FEW:
        return made("categorical", f"{distinct} different values{missing}{strong}", notice=bool(strong))
    if column.kind == "int" and _ID_NAME.search(name):
        return made("categorical", f"an id that repeats, {distinct:,} different values{missing}{strong}")
    low, high = column.values[~null].min(), column.values[~null].max()
    why = f"numbers from {_shown(low)} to {_shown(high)}{missing}{strong}"
    return made("numeric", why, notice=bool(strong))


def _guess_text(made: Callable[..., Guess], odd: str, distinct: int, filled: int, more: str) -> Guess:
    mixed = f"; {odd}" if odd else ""
    if distinct > max(50, 0.5 * filled):
        why = (
            f"numbers mixed with text{mixed}"
            if odd
            else f"{distinct:,} different texts in {filled:,} rows; the step hash_bucket could use it"
        )
        return made("out", why, notice=True)
    return made("categorical", f"text, {distinct:,} different values{more}{mixed}", notice=bool(odd))


def _identity(name: str, column: Column, sample: TableSample, distinct: int) -> str | None:
    """Why a column says which row it is and nothing about it. Repeated rows do not count twice."""
    own = column[sample.first]
    filled = own.values[~own.null]
    if column.kind not in ("string", "int") or distinct < max(len(filled), 20):
        return None
    if column.kind == "string":
        return f"every row has its own text ({distinct:,} different): an id"
    if (np.diff(filled) > 0).all() and len(filled) == len(own):
        return "counts the rows"
    if _ID_NAME.search(name) or len(filled) >= _UNIQUE_IS_AN_ID:
        return f"every row has its own integer ({distinct:,} different): an id"
    return None


def _leak(column: Column, sample: TableSample, target: GuessedTarget) -> tuple[str | None, float]:
    """Why a column seems to be known only after the answer, by the rules of the ETL's leak check; and how well it
    predicts the target alone, from 0 to 1."""
    null = column.null
    counted = Unknown(len(column), int(null.sum()), int((null & target.null).sum()))
    if missing_together([counted], int(target.null.sum())):
        return "is missing where the target is missing: probably known only afterwards", 0.0
    known = np.flatnonzero(~target.null)[sample.scored]
    column, null = column[known], null[known]
    strongest = 0.0
    for answers in target.values[known].astype(np.float64).reshape(len(known), -1).T:
        if null.any() and score_by_nulls(null, answers, target.task) > NULL_LEAK_SCORE:
            return "is null or not as the target goes: probably filled only afterwards", 0.0
        strength = score_by_values(column[~null], answers[~null], target.task)
        if strength > LEAK_SCORE:
            return f"alone gives the answer away ({strength:.3f} of 1)", strength
        strongest = max(strongest, strength)
    return None, strongest


def time_column(sample: TableSample, target: Sequence[str]) -> str | None:
    """The first time that is not always the same and not a date of birth; rather one that the target does not read, and
    rather one without times in the future."""
    now = int(time.time() * 1e6)
    times = [
        name
        for name, column in sample.columns.items()
        if column.kind == "timestamp"
        and len(np.unique(column.values[~column.null])) > 1
        and not _is_birth(name, column.values[~column.null], now)
    ]
    past = [name for name in times if sample.columns[name].values.max() <= now]
    return next((name for name in [*past, *times] if name not in target), times[0] if times else None)


def _is_birth(name: str, moments: npt.NDArray[np.int64], now: int) -> bool:
    """Whether a time is a date of birth, by its name; or by its values: days over decades, in no order, as the births
    of adults are."""
    if _BIRTH_NAME.search(name):
        return True
    years = (now - moments) / _YEAR_US
    if (moments % _DAY_US).any() or np.ptp(years) < _BIRTHS_SPAN_YEARS or not 10 < np.median(years) < 90:
        return False
    rising = float(np.mean(np.diff(moments) > 0))
    return 0.25 < rising < 0.75


def _shown(value: float | int) -> str:
    return f"{value:,}" if isinstance(value, int | np.integer) else f"{value:g}"
