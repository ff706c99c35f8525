from pathlib import Path

import pytest

from serin.errors import BundleBroken
from serin.formats.statistics import CategoryStatistics, NumberStatistics, read_statistics, write_statistics

COLUMNS = {
    "price": NumberStatistics(kind="float", rows=10, nulls=1, edges=(0.0, 1.5, 3.0), counts=(4, 5)),
    "city": CategoryStatistics(
        kind="string", rows=10, nulls=0, distinct=7, values=("Köln", "Pisa"), counts=(3, 2), others=5
    ),
}


def test_statistics_come_back_as_they_were_written(tmp_path: Path) -> None:
    write_statistics(tmp_path / "statistics.json", COLUMNS)
    assert read_statistics(tmp_path / "statistics.json") == COLUMNS


def test_a_file_that_is_none_of_ours_is_refused(tmp_path: Path) -> None:
    (tmp_path / "statistics.json").write_text("{}", encoding="utf-8")
    with pytest.raises(BundleBroken, match=r"statistics\.json"):
        read_statistics(tmp_path / "statistics.json")
