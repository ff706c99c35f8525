"""The figures of the orchestration benchmark, from times that are known; and that its spec is a good one."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from benchmarks.orchestration.benchmark import key_figures, table
from benchmarks.orchestration.place import Lap, write_pipeline
from serin.spec.load import load_spec


def laps(*seconds: float, start_s: float = 0.0, again_s: float = 5.0) -> list[Lap]:
    """Commands whose processes take `start_s` to begin."""
    return [
        Lap(
            seconds=each,
            call_s=each - start_s,
            cpu_s=2 * each,
            again_s=again_s,
            again_call_s=again_s - start_s,
        )
        for each in seconds
    ]


DONE = {
    "bare": laps(100.0, 200.0, 150.0),
    "inline": laps(104.0, 206.0, 154.5, start_s=2.0),
    "worker": laps(105.0, 220.0, 157.5, again_s=12.0),
    "placed": laps(120.0, 239.0, 177.0, again_s=14.0),
}


def test_overhead_is_relative_to_the_bare_stages_of_the_same_lap() -> None:
    figures = key_figures(DONE)
    assert figures["flow_overhead"] == pytest.approx(0.02)
    assert figures["inline_overhead"] == figures["inline_cpu_overhead"] == pytest.approx(0.03)
    assert figures["worker_overhead"] == pytest.approx(0.05)
    assert figures["placed_overhead"] == pytest.approx(0.195)
    assert figures["placed_overhead_s"] == pytest.approx(27.0)
    assert figures["placed_stage_s"] == pytest.approx(19.0 / 3), (
        "over the same run in one process of a worker"
    )
    assert figures["placed_5_percent_s"] == pytest.approx(540.0)
    assert (figures["unchanged_flow_s"], figures["unchanged_worker_s"]) == (3.0, 12.0)


def test_the_table_has_a_line_for_every_way() -> None:
    lines = table(DONE)
    assert [line.split()[0] for line in lines[1:7]] == [
        "bare",
        "bare,",
        "inline",
        "inline,",
        "worker",
        "placed",
    ]
    assert "19.5%" in lines[6]


def test_two_laps_have_nothing_in_common_that_could_be_found(tmp_path: Path) -> None:
    paths = [write_pipeline(tmp_path / str(seed), rows=50, epochs=1, seed=seed) for seed in (1, 2)]
    first, second = map(load_spec, paths)
    assert first.data.tables != second.data.tables
    assert first.model_copy(update={"data": second.data}) == second
    rows = [pq.read_table(path.with_name("table.parquet")) for path in paths]
    assert rows[0].schema == rows[1].schema
    assert rows[0] != rows[1], "what a table holds decides what is found, not where it lies"
