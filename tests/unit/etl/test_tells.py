"""What a column tells of the target: counted as the metric counts it, and alike however the column is kept."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serin.columns.column import Column, column_from_arrow
from serin.etl.dataset.leak_scores import FEWEST, score_by_nulls, score_by_values
from serin.etl.relational.groups import sampled
from serin.metrics import auc

RANDOM = np.random.default_rng(4)
TARGET = (RANDOM.random(400) < 0.3).astype(np.float64)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.sampled_from([-np.float32(2.5), -0.0, 0.0, 1e-30, 3.0, 7e20]), min_size=5, max_size=20),
    st.integers(0, 50),
)
def test_numbers_tell_by_their_order_as_the_metric_says(values: list[float], seed: int) -> None:
    column = np.resize(np.asarray(values, np.float32), 300)
    target = (np.random.default_rng(seed).random(300) < 0.4).astype(np.float64)
    told = score_by_values(Column(kind="float", values=column), target, "binary")
    if np.ptp(column) == 0:
        assert told == 0
    else:
        area = auc(target, column)
        assert told == max(area, 1 - area)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_nulls_tell_by_their_order_as_the_metric_says(share: float) -> None:
    null = np.where(TARGET == 1, RANDOM.random(400) < share, RANDOM.random(400) < 0.02)
    area = auc(TARGET, null.astype(np.float32))
    assert score_by_nulls(null, TARGET, "binary") >= max(area, 1 - area)
    assert score_by_nulls(TARGET == 1, TARGET, "binary") == score_by_nulls(TARGET == 0, TARGET, "binary") == 1


@pytest.mark.parametrize("spread", [1, 10**15])
def test_whole_numbers_tell_by_order_and_by_value(spread: int) -> None:
    turned = (
        np.where(TARGET == 1, 5, RANDOM.integers(0, 2, 400) * 10) * spread
    )  # between the others: no order
    column = Column(kind="int", values=turned)
    assert score_by_values(column, TARGET, "binary") == 1
    noise = Column(kind="int", values=RANDOM.integers(0, 4, 400) * spread)
    assert score_by_values(noise, TARGET, "binary") < 0.7


@pytest.mark.parametrize("task", ["binary", "regression", "multiclass"])
def test_words_that_name_the_target_are_found_for_every_task(task: str) -> None:
    target = RANDOM.integers(0, 2 if task == "binary" else 4, 600).astype(np.float64)
    names = column_from_arrow(pa.array([f"word {each}" for each in target]), "string")
    assert score_by_values(names, target, task) > 0.99
    shuffled = column_from_arrow(pa.array([f"word {each}" for each in RANDOM.permutation(target)]), "string")
    assert score_by_values(shuffled, target, task) < 0.7


def test_a_column_with_a_different_word_in_every_row_predicts_nothing() -> None:
    own = column_from_arrow(pa.array([f"id {row}" for row in range(400)]), "string")
    assert score_by_values(own, TARGET, "binary") == 0


def test_nulls_tell_and_few_rows_do_not() -> None:
    assert score_by_nulls(TARGET == 1, TARGET, "binary") == 1
    assert score_by_nulls(RANDOM.random(400) < 0.5, TARGET, "binary") < 0.7
    few = FEWEST - 1
    values = Column(kind="float", values=TARGET[:few].astype(np.float32))
    assert score_by_values(values, TARGET[:few], "binary") == 0


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**9), st.floats(0.001, 1.5), st.integers(1, 5), st.booleans())
def test_a_sample_follows_from_row_ids_alone(first: int, share: float, pieces: int, gaps: bool) -> None:
    rows = np.arange(first, first + 4000)
    if gaps:
        rows = rows[RANDOM.random(4000) < 0.5]
    whole = rows[sampled(rows, share)]
    parts = [part[sampled(part, share)] for part in np.array_split(rows, pieces)]
    assert np.array_equal(np.concatenate(parts), whole)
    expected = min(1.0, share) * len(rows)
    assert 0.4 * expected - 20 <= len(whole) <= 2 * expected + 20
