"""A spec compared with the columns of its tables, before anything is built."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from serin.spec.pipeline import PipelineSpec
from serin.store.store import Store

if TYPE_CHECKING:
    from serin.etl.sources.layout import Layout


def check_tables(spec: PipelineSpec) -> Layout:
    """What the served model will ask of its clients; DataError or SpecError for what does not fit the tables."""
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
