from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from serin.columns.column import Column, column_from_arrow
from serin.etl.dataset.split import LEFT_OUT, SplitRule, TimeSplit, hash_split, stratified_split, time_split
from serin.etl.engines.process_engine import ProcessEngine
from serin.etl.relational.groups import group_hashes
from serin.etl.relational.relation import Prepared
from serin.etl.relational.target import TargetPart
from serin.spec.split import SplitSpec

SPLIT = SplitSpec(train=0.7, valid=0.2, test=0.1)


def piece(
    rows: np.ndarray,
    time: np.ndarray | None = None,
    labels: np.ndarray | None = None,
    group: Column | None = None,
) -> Prepared:
    labels = np.zeros(len(rows)) if labels is None else labels
    target = TargetPart(values=labels, null=np.zeros(len(rows), bool))
    return Prepared(
        columns={},
        rows=rows,
        target=target,
        time=time,
        group=None if group is None else group_hashes(group),
        id=None,
        dropped={},
        checks=(),
        unknown={},
    )


def place(rule: SplitRule, prepared: Prepared) -> list[int]:
    return rule.place(prepared, prepared.target.coded(())).tolist()


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.one_of(st.integers(-3, 3), st.integers(-(2**63) + 1, 2**63 - 1)), min_size=3, max_size=80),
    st.integers(1, 5),
    st.sampled_from([0, 5, 2**20]),
    st.booleans(),
)
@example([0, -1, -2, 2**63 - 1], 2, 5, False)  # a range as wide as all times, and a row before it
def test_a_split_by_time_is_a_cut_of_the_rows_sorted_by_time_and_id(
    times: list[int], pieces: int, few_rows: int, in_order: bool
) -> None:
    time, rows = np.asarray(sorted(times) if in_order else times, np.int64), np.arange(len(times)) * 3
    with ProcessEngine(1) as engine, patch("serin.etl.dataset.time_ranks.FEW_ROWS", few_rows):
        held = engine.hold(
            lambda cut: piece(rows[cut], time[cut]), np.array_split(np.arange(len(times)), pieces)
        )
        rule = time_split(SPLIT, engine, held, len(times))
    order = np.lexsort((rows, time))
    found = np.asarray(place(rule, piece(rows, time)))[order]
    ends = [int(0.7 * len(times) + 0.5), int(0.9 * len(times) + 0.5)]
    ends = [min(end, len(times) - 1) for end in ends]
    assert found.tolist() == [sum(index >= end for end in ends) for index in range(len(times))]


def test_a_split_by_hash_depends_on_the_row_id_alone() -> None:
    rule = hash_split(SPLIT)
    rows = np.arange(100_000, dtype=np.int64)
    found = place(rule, piece(rows))
    assert place(rule, piece(rows[::-1]))[::-1] == found
    assert np.bincount(found) / len(rows) == pytest.approx([0.7, 0.2, 0.1], abs=0.01)


def test_a_gap_leaves_out_the_rows_just_before_the_next_split() -> None:
    rule = TimeSplit(((100, 0), (200, 0)), gap_us=10)
    times = np.asarray([0, 90, 91, 99, 100, 190, 191, 200, 999])
    assert place(rule, piece(np.arange(9), times)) == [0, 0, LEFT_OUT, LEFT_OUT, 1, 1, LEFT_OUT, 2, 2]


def test_a_group_is_never_torn_and_hashes_alike_in_every_piece() -> None:
    rule = hash_split(SPLIT, by_group=True)
    names = [f"user {number % 700}" for number in range(5000)]
    whole = column_from_arrow(pa.array(names), "string")
    found = place(rule, piece(np.arange(5000), group=whole))
    part = column_from_arrow(pa.array(names[4000:]), "string")
    assert place(rule, piece(np.arange(4000, 5000), group=part)) == found[4000:]
    homes: dict[str, set[int]] = {}
    for name, split in zip(names, found, strict=True):
        homes.setdefault(name, set()).add(split)
    assert all(len(home) == 1 for home in homes.values())
    assert np.bincount([min(home) for home in homes.values()]) / 700 == pytest.approx(
        [0.7, 0.2, 0.1], abs=0.05
    )


@pytest.mark.parametrize("pieces", [1, 4])
def test_a_stratified_split_gives_every_class_its_shares_to_the_row(pieces: int) -> None:
    rows = np.arange(20_000)
    labels = (rows % 97 == 0).astype(np.float32)  # 207 of one class
    with ProcessEngine(1) as engine:
        held = engine.hold(
            lambda cut: piece(rows[cut], labels=labels[cut]), np.array_split(np.arange(len(rows)), pieces)
        )
        rule = stratified_split(SPLIT, engine, held, ())
    found = np.asarray(place(rule, piece(rows, labels=labels)))
    assert np.bincount(found[labels == 1]).tolist() == [144, 42, 21]
    assert np.bincount(found[labels == 0]).tolist() == [13855, 3958, 1980]
