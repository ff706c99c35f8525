"""Exact sums on a real GPU: correctly rounded numbers of every magnitude, subnormal ones too. Skipped without one."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from serin.columns.column import Column
from serin.etl.engines.device import usable_gpus
from serin.features.aggregates.exact_sums import ExactSums, GroupSums
from serin.features.fitted import Sample
from serin.features.numbers import Numbers
from serin.features.plan import FeaturePlan
from tests.unit.features.exact_tables import FEATURES, KINDS, check_against_fractions, sample_of, tables

cupy = pytest.importorskip("cupy", reason="cupy is not installed")
pytestmark = pytest.mark.skipif(not usable_gpus().count, reason="no GPU")


def on_gpu(host: Sample) -> Sample:
    columns = {
        name: Column(kind=column.kind, values=cupy.asarray(column.values), dictionary=column.dictionary)
        for name, column in host.columns.items()
    }
    return replace(host, columns=columns)


@pytest.mark.timeout(600)
@settings(max_examples=60, deadline=None)
@given(tables)
def test_what_is_fitted_is_the_correctly_rounded_exact_number(table: Any) -> None:
    there = on_gpu(sample_of(table))
    plan = FeaturePlan.fit(FEATURES, KINDS, lambda asked: [each.measure(there) for each in asked])
    check_against_fractions(plan, table)


def test_many_rows_give_the_host_s_integers() -> None:
    random = np.random.default_rng(1)
    rows = 3_000_000
    bits = random.integers(0, 2**32, rows, dtype=np.uint64).astype(
        np.uint32
    )  # of every magnitude, NaN among them
    host = Sample(
        columns={
            "f": Column(kind="float", values=bits.view(np.float32)),
            "i": Column(kind="int", values=random.integers(-(2**63) + 1, 2**63 - 1, rows)),
            "k": Column(kind="int", values=random.integers(0, 1000, rows)),
        }
    )
    there = on_gpu(host)
    single = ExactSums(Numbers(column="f", kind="float"))
    assert single.measure(there) == single.measure(host)
    for column, kind in (("f", "float"), ("i", "int")):
        grouped = GroupSums("k", Numbers(column=column, kind=kind), squares=True, ends=True)  # type: ignore[arg-type]
        ours, theirs = grouped.measure(there), grouped.measure(host)
        places = [np.argsort(table.keys.to_numpy()) for table in (ours, theirs)]
        for name in ("sums", "squares"):
            left, right = (
                getattr(table, name)[place] for table, place in zip((ours, theirs), places, strict=True)
            )
            assert left.base == right.base
            assert np.array_equal(left.digits, right.digits)
        assert ours.ends is not None
        assert theirs.ends is not None
        assert ours.ends[places[0]].tobytes() == theirs.ends[places[1]].tobytes()
