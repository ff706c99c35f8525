"""Drafts a first spec for a table: types, target, features and model guessed, each guess explained in a comment."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from serin.draft.guess_columns import Guess, guess_columns, time_column
from serin.draft.guess_target import GuessedTarget, guess_target
from serin.draft.sniff_csv import sniff_table, table_lines
from serin.draft.table_sample import TableSample, sample_table
from serin.errors import TableUnusable
from serin.spec.data import is_reserved

TREE_CLASSES = 30
"""Trees grow one tree per class and round, so a target with more classes gets a network."""
_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_RESERVED = {"y", "n", "yes", "no", "on", "off", "true", "false", "null", "none"}
_MANY_ROWS = 10_000


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
    return Draft(text=spec_text(found), notices=tuple(_notices(found)))


def _notices(found: Guessed) -> Iterator[str]:
    sample, target = found.sample, found.target
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
    for guess in found.columns:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Guessed:
    """Everything that goes into a drafted spec. `table`: the lines below `tables`. `seen`: how its files are
    written. `renamed`: names in the file -> names in the spec, where they differ."""

    name: str
    table: tuple[str, ...]
    seen: tuple[str, ...]
    sample: TableSample
    target: GuessedTarget
    time: str | None
    columns: Sequence[Guess]
    renamed: Mapping[str, str]

    @property
    def model(self) -> str:
        return "mlp" if self.target.classes > TREE_CLASSES else "xgboost"

    @property
    def why_model(self) -> str:
        if self.model == "mlp":
            return f"trees would be grown for each of {self.target.classes:,} classes"
        return "trees are the better first model for most tables"

    @property
    def key(self) -> str | None:
        """A column that tells rows apart once repeated ones are left out; None when not all rows were read."""
        ids = [guess.column for guess in self.columns if guess.is_id and not guess.nulls]
        return ids[0] if ids and self.sample.complete else None

    @property
    def repeated(self) -> str:
        """What is said about repeated rows."""
        count = f"{self.sample.repeated:,} of {self.sample.read:,} rows repeat another one in every column"
        if self.key is not None:
            return f"{count}: one of each is kept (data.unique)"
        return f"{count}: all are kept, so a test row may be among the training rows; data.unique keeps one of each"

    def uses(self, use: str) -> list[Guess]:
        return [guess for guess in self.columns if guess.use == use]


def spec_text(guessed: Guessed) -> str:
    """The spec. It holds only settings that its model uses."""
    lines = [
        f"# A first spec, guessed from {guessed.sample.source}.",
        "# Read the comments, correct what is wrong, then `serin check`.",
        f"name: {guessed.name}",
        "data:",
        "  tables:",
        *guessed.table,
        *_rename(guessed.renamed),
        *_data(guessed),
        "features:",
        *_features(guessed),
        *_model(guessed),
    ]
    return "\n".join(lines) + "\n"


def _rename(renamed: Mapping[str, str]) -> Iterator[str]:
    if renamed:
        yield "  # Answers use these names, so the columns have other ones in the spec and in requests."
        yield "  rename:"
        yield "    main:"
        yield from (f"      {word(old)}: {word(new)}" for old, new in renamed.items())


def _data(guessed: Guessed) -> Iterator[str]:
    target, time = guessed.target, guessed.time
    if guessed.sample.repeated:
        yield f"  # {guessed.repeated}"
        if guessed.key is not None:
            yield f"  unique: {{by: {word(guessed.key)}}}"
    yield f"  # {target.why}"
    if len(target.columns) > 1:
        yield f"  # Its columns ({', '.join(target.columns)}) cannot be features. If clients know one of them"
        yield "  # when they ask, name it here: known_at_serving: [COLUMN]"
    yield f"  target: {{{_expressions(target)}, task: {target.task}}}"
    kind = ""
    if time is not None:
        yield f"  # {time} is the time: train on the past, test on the latest rows"
        yield f"  time: {word(time)}"
    elif target.rare:
        yield f"  # no time column was found; {target.rare}, and each split gets its share of them"
        kind = ", kind: stratified"
    else:
        yield "  # no time column was found: rows are split by a hash of their position"
    yield f"  split: {{train: 0.8, valid: 0.1, test: 0.1{kind}}}"
    out = guessed.uses("out")
    if out:
        yield "  # Columns that were left out; put one back into the features if the reason is wrong."
        yield from (f"  #   {guess.column}: {guess.why}" for guess in out)


def _expressions(target: GuessedTarget) -> str:
    if len(target.expressions) == 1:
        return f"expression: {quoted(next(iter(target.expressions.values())))}"
    each = ", ".join(f"{name}: {quoted(text)}" for name, text in target.expressions.items())
    return f"expressions: {{{each}}}"


def _features(guessed: Guessed) -> Iterator[str]:
    numbers = guessed.uses("numeric")
    least = 10 if guessed.sample.rows >= _MANY_ROWS else 1
    if guessed.model == "mlp":
        yield from _feature(numbers, "[fill_median, clip: {q: [0.001, 0.999]}, normalize]")
    else:
        filled, holed = ([one for one in numbers if one.nulls == nulls] for nulls in (False, True))
        yield from _feature(filled, "[fill_median, normalize]")
        yield from _feature(holed, "[fill_median: {indicator: true}, normalize]")
    yield from _feature(guessed.uses("categorical"), f"[categorify: {{min_count: {least}}}]")
    times = guessed.uses("time")
    yield from _feature([each for each in times if each.long], "[date_parts: [hour, weekday, month]]")
    short = [each for each in times if not each.long]
    if short:
        yield "  # no month: within two years the test rows may be of months that no training row has"
    yield from _feature(short, "[date_parts: [hour, weekday]]")


def _feature(guesses: Sequence[Guess], steps: str) -> Iterable[str]:
    if not guesses:
        return
    yield from (f"  # {guess.column}: {guess.why}" for guess in guesses)
    yield f"  - columns: [{', '.join(word(guess.column) for guess in guesses)}]"
    yield f"    steps: {steps}"


def _model(guessed: Guessed) -> Iterator[str]:
    why = guessed.why_model
    if guessed.model == "mlp":
        yield f"# {why[0].upper()}{why[1:]}, so this is a network."
        yield "model: {kind: mlp}"
    else:
        yield f"# Gradient-boosted {why}. For a network, write kind: mlp."
        yield "model: {kind: xgboost}"
    if guessed.target.rare:
        rare = guessed.target.rare
        yield f"# {rare[0].upper()}{rare[1:]}. With class weights they count more in training,"
        yield "# and the scores are no longer probabilities:"
        yield "# training: {class_weights: balanced}"
        yield "# A new version is compared with the live one by the precision among its highest scores."
        yield "champion: {metric: average_precision}"


def word(text: str) -> str:
    """The text as a YAML value, quoted only where that is needed."""
    return text if _WORD.fullmatch(text) and text.lower() not in _RESERVED else quoted(text)


def quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
