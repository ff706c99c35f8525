"""A spec compared with the columns of its tables, before anything is built."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from serin.spec.pipeline import PipelineSpec
from serin.store.store import Store

if TYPE_CHECKING:
    from serin.etl.sources.layout import Layout
    from serin.formats.schema import InputColumn


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class CheckedSpec:
    """A spec that fits its tables. `inputs`: what clients of the served model send for each row. `lookups`: columns
    that the model looks up itself, with the key and the table."""

    spec: PipelineSpec
    inputs: tuple[InputColumn, ...] = ()
    lookups: tuple[tuple[tuple[str, ...], tuple[str, ...], str], ...] = ()

    def __str__(self) -> str:
        return "\n".join(self._lines())

    __repr__ = __str__

    def _lines(self) -> Iterator[str]:
        spec = self.spec
        if not spec.has_data:
            yield f"{spec.name} is good: a {spec.model.kind} that defines its own inputs, {spec.model.task}"
            return
        yield f"{spec.name} is good: {len(spec.features)} groups of features, {spec.data.target.task}"
        yield "clients of the served model will send"
        for column in self.inputs:
            yield f"  {column.name:<20} {column.kind:<10} {column.dtype:<6} null: {column.null}"
        for columns, key, table in self.lookups:
            yield f"looked up inside the model, by {', '.join(key)}: {', '.join(columns)} (from {table})"


def check_spec(spec: PipelineSpec) -> CheckedSpec:
    """What the served model will ask of its clients; DataError or SpecError for what does not fit the tables."""
    if not spec.has_data:
        return CheckedSpec(spec=spec)
    layout = _lay_out(spec)
    lookups = tuple(
        (tuple(join.columns.values()), tuple(join.spec.on), join.spec.table) for join in layout.lookups
    )
    return CheckedSpec(spec=spec, inputs=layout.inputs, lookups=lookups)


def _lay_out(spec: PipelineSpec) -> Layout:
    from serin.etl.sources.file_cache import FileCache
    from serin.etl.sources.files import find_files
    from serin.etl.sources.layout import lay_out
    from serin.etl.sources.tables import open_table

    with (
        Store.open().using_kept() as kept,  # the build that follows need not convert again
        tempfile.TemporaryDirectory(prefix="serin-check-") as scratch,
    ):
        converted = FileCache.converted(kept)
        tables = {
            name: open_table(name, find_files(name, path, converted.digests), Path(scratch), converted)
            for name, path in spec.data.tables.items()
        }
        return lay_out(spec.data, spec.features, tables)
