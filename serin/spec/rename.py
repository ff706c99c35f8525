"""The key `data.rename`: other names for columns than their files have, and the names that no column may have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from serin.errors import nearest

RESERVED = ("score", "label", "probabilities", "row", "target")
"""Names that answers and golden rows use. No column of a request may have one of them."""
RESERVED_PREFIXES = ("num__", "cat__")
"""What the names of features in golden rows begin with."""


def is_reserved(name: str) -> bool:
    """Whether no column of a request may have this name."""
    return not name or name in RESERVED or name.startswith(RESERVED_PREFIXES)


def by_table(given: Any, tables: Mapping[str, Any]) -> Any:
    """The mapping as it is given; ValueError that shows the right form when the table's name is left out."""
    if isinstance(given, dict) and (flat := {old: new for old, new in given.items() if isinstance(new, str)}):
        table = next(iter(tables), "main")
        names = ", ".join(f"{old}: {new}" for old, new in flat.items())
        raise ValueError(f"names the columns of no table; write rename: {{{table}: {{{names}}}}}")
    return given


def rename_problems(
    rename: Mapping[str, Mapping[str, str]], tables: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    """What is wrong whatever columns the files have, as (key, problem and how to fix it)."""
    for table, names in rename.items():
        if table not in tables:
            yield f"data.rename.{table}", f"no table {table!r} in data.tables{nearest(table, tables)}"
            continue
        taken: dict[str, str] = {}
        for old, new in names.items():
            if problem := _problem(old, new, names, taken):
                yield f"data.rename.{table}.{old}", problem
            taken.setdefault(new, old)


def _problem(old: str, new: str, names: Mapping[str, str], taken: Mapping[str, str]) -> str | None:
    if not new:
        return "the new name is empty; choose another"
    if old == new:
        return f"{old!r} is its name already; take it out"
    if new in names:
        return (
            f"{new!r} is renamed itself, and names are not exchanged or passed on; choose a name that no column of "
            f"the table has, such as {new + '_renamed'!r}"
        )
    if new in taken:
        return f"{taken[new]!r} is renamed to {new!r} too; choose another name for one of them"
    if is_reserved(new):
        return f"{new!r} is reserved for answers and golden rows; choose another name"
    return None
