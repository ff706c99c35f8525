from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from serin.formats.captures import hours_captured
from serin.monitoring.quality.key_index import KeyIndex, hashes
from serin.monitoring.quality.keys import Key
from serin.monitoring.quality.labels import Columns, add_labels
from serin.monitoring.quality.scan import search
from tests.fakes.labelled import BEGAN, MODEL, record, schema, truth_of, watched

NOW = BEGAN + 2 * 86_400


@pytest.mark.parametrize("most_rows", [0, 40, 1 << 20])
def test_an_index_of_any_size_finds_every_row_also_those_that_came_after_it_was_made(
    home: Path, most_rows: int
) -> None:
    record(home, 300, every_s=300.0)
    index = KeyIndex(home, MODEL, most_rows)
    for seed in (1, 2):
        made = record(home, 100, seed=seed, every_s=300.0)  # into hours that the index knows
        added = add_labels(home, truth_of(), made.labels(), Columns(), NOW + seed)
        assert added.file is not None
        *_, found = search(home, MODEL, added.file, added.file.read(), {1: watched(1)}.get, index)
        assert found.labels == set(range(100))
        assert sum(table.num_rows for tables in found.rows.values() for table in tables) == 100


def test_an_hour_without_any_of_the_keys_is_not_read(home: Path) -> None:
    record(home, 200, every_s=600.0)
    index, key = KeyIndex(home, MODEL), Key(by=("_id",))
    wanted = hashes(pa.array(["0-1-0\x1f0"]))
    hours = hours_captured(home, MODEL, 1)
    assert [hour for hour in hours if index.may_have(1, hour, key, schema(), wanted)] == [hours[0]]
    assert len(hours) > 30
