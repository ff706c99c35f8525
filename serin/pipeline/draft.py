"""A table to a first spec, guessed and commented: for `serin init` and Pipeline.draft."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd


def draft_spec(
    table: pd.DataFrame | Path | str, *, target: str | Sequence[str] | None, name: str | None
) -> str:
    """The YAML text of a spec for a frame, or for the table at a path or URL.

    `target`: a column or an expression over columns, or several; None: guessed. `name`: of the pipeline; None: the
    file's, or for a frame the target's.
    """
    from serin.draft.guess import draft_table
    from serin.pipeline.frames import keep_frame

    if isinstance(table, str | Path):
        path = str(table) if "://" in str(table) else str(Path(table).expanduser().absolute())
        return draft_table(path, target, name=name).text
    path = str(keep_frame(table))
    return draft_table(path, target, name=name or _name_of(target)).text


def _name_of(target: str | Sequence[str] | None) -> str:
    first = target if isinstance(target, str) else next(iter(target or ()), "")
    words = re.findall(r"[A-Za-z_][A-Za-z0-9_]*", first)
    return words[0].lower().replace("_", "-").strip("-") if words else "model"
