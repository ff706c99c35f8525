"""lookups.json of a bundle: the tables that its graph looks columns up in, and when they were read.

With the fitted features it is all that is needed to build the front of the graph again from newer tables.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from serin.formats.dataset import DerivedDescription, LookupDescription
from serin.machine.documents import read_facts, write_facts
from serin.machine.typed_json import Document

FILE: Final = "lookups.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookups(Document, form="serin.lookups"):
    """`read`: seconds since 1970. `tables`: with their files in the bundle. `rows`: of each table. `derived`: columns
    that the model calculates from columns of the request and of lookups."""

    read: float
    tables: tuple[LookupDescription, ...]
    rows: dict[str, int]
    derived: tuple[DerivedDescription, ...] = ()


def write_lookups(folder: Path, lookups: Lookups) -> None:
    write_facts(folder / FILE, lookups.to_json())


def read_lookups(folder: Path) -> Lookups | None:
    """The lookups of the bundle in this folder; None when it has none."""
    return read_facts(folder / FILE, Lookups.from_json) if (folder / FILE).is_file() else None
