import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serin.etl.process_engine import ProcessEngine
from serin.etl.relation import Prepared
from serin.etl.split import hash_split, time_split
from serin.etl.target import TargetPart
from serin.spec.data import SplitSpec

SPLIT = SplitSpec(train=0.7, valid=0.2, test=0.1)


def piece(rows: np.ndarray, time: np.ndarray) -> Prepared:
    target = TargetPart(values=np.zeros(len(rows)), null=np.zeros(len(rows), bool))
    return Prepared(columns={}, rows=rows, target=target, time=time, dropped={}, checks=())


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.one_of(st.integers(-3, 3), st.integers(-(2**63) + 1, 2**63 - 1)), min_size=3, max_size=80),
    st.integers(1, 5),
)
def test_a_split_by_time_is_a_cut_of_the_rows_sorted_by_time_and_id(times: list[int], pieces: int) -> None:
    time, rows = np.asarray(times, np.int64), np.arange(len(times)) * 3
    with ProcessEngine(1) as engine:
        held = engine.hold(
            lambda cut: piece(rows[cut], time[cut]), np.array_split(np.arange(len(times)), pieces)
        )
        rule = time_split(SPLIT, engine, held, len(times))
    order = np.lexsort((rows, time))
    place = rule.place(rows, time)[order]
    ends = [int(0.7 * len(times) + 0.5), int(0.9 * len(times) + 0.5)]
    ends = [min(end, len(times) - 1) for end in ends]
    assert place.tolist() == [sum(index >= end for end in ends) for index in range(len(times))]


def test_a_split_by_hash_depends_on_the_row_id_alone() -> None:
    rule = hash_split(SPLIT)
    rows = np.arange(100_000, dtype=np.int64)
    place = rule.place(rows, None)
    assert np.array_equal(rule.place(rows[::-1], None)[::-1], place)
    assert np.bincount(place) / len(rows) == pytest.approx([0.7, 0.2, 0.1], abs=0.01)
