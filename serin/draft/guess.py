"""Drafts a first spec for a table: types, target, features and model guessed, each guess explained in a comment."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from serin.draft.guess_columns import Guess, guess_columns, time_column
from serin.draft.guess_target import GuessedTarget, guess_target
from serin.draft.sniff_csv import sniff_table, table_lines
from serin.draft.table_sample import TableSample, sample_table
from serin.draft.write_spec import Guessed, spec_text
from serin.errors import TableUnusable
from serin.spec.rename import is_reserved


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """`text`: the commented spec. `notices`: what its author should know, one line each."""

    text: str
    notices: tuple[str, ...]


def draft_table(
    table: Path | str,
    target: str | Sequence[str] | None = None,
    *,
    path_in_spec: str | None = None,
    name: str | None = None,
) -> Draft:
    """A commented spec (YAML) for the table at this path or URL. `target`: a column or an expression, or several; None:
    guessed. `path_in_spec`: how the spec's file refers to the table, when not by the path given. `name`: the
    pipeline's; None: made of the table's."""
    sniffed = sniff_table(str(table))
    sample = sample_table(sniffed.source(str(table)))
    guessed = guess_target(sample.columns, target)
    renamed = free_names(sample.columns, kept=guessed.columns)
    sample = sample.renamed(renamed)
    time = time_column(sample, guessed.columns)
    guesses = guess_columns(sample, guessed, time)
    if not any(guess.use in ("numeric", "categorical", "time") for guess in guesses):
        raise TableUnusable(table=str(table), problem="no column is left to make a feature of")
    found = Guessed(
        name=name or model_name(str(table)),
        table=tuple(table_lines(path_in_spec or str(table), sniffed)),
        seen=sniffed.seen,
        sample=sample,
        target=guessed,
        time=time,
        columns=guesses,
        renamed=renamed,
    )
    return Draft(text=spec_text(found), notices=tuple(_notices(sample, guessed, found, guesses)))


def _notices(
    sample: TableSample, target: GuessedTarget, found: Guessed, guesses: Sequence[Guess]
) -> Iterator[str]:
    yield f"read {sample.source}"
    yield f"the model is called {found.name} (`name` in the spec)"
    yield from found.seen
    yield target.why + (f"; {target.rare}" if target.rare else "")
    if missing := int(target.null.sum()):
        yield f"{missing:,} of these rows have no target: such rows are dropped"
    if found.time is not None:
        yield f"{found.time} is the time: the latest rows are the test rows"
    for old, new in found.renamed.items():
        yield f"{old} is called {new} in the spec and in requests, since answers use that name (data.rename)"
    if sample.repeated:
        yield found.repeated
    for guess in guesses:
        if guess.notice:
            verb = "left out" if guess.use == "out" else guess.use
            yield f"{guess.column} ({verb}): {guess.why}"
    yield f"model: {found.model}, because {found.why_model}"
    if found.model == "xgboost" and importlib.util.find_spec("xgboost") is None:
        yield "XGBoost is not installed here: pip install 'serin[xgboost]'"


def model_name(path: str) -> str:
    """What a model is called after a path, which may be a file, a folder or a URL."""
    stem = re.sub(r"[^a-z0-9]+", "-", path.rstrip("/").rsplit("/", 1)[-1].split(".")[0].lower()).strip("-")
    return (stem if stem[:1].isalpha() else f"model-{stem}")[:60].strip("-") or "model"


def free_names(columns: Collection[str], *, kept: Collection[str]) -> dict[str, str]:
    """Reserved name -> a new name that no column has. `kept`: what the target reads, which no client sends."""
    found: dict[str, str] = {}
    for name in columns:
        if is_reserved(name) and name not in kept:
            new = f"input_{name or 'without_name'}"
            while new in columns or new in found.values():
                new = f"input_{new}"
            found[name] = new
    return found
