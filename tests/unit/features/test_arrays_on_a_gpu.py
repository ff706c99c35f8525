"""Every operator on arrays that refuse, as cupy's do, to be mixed with numpy's: the same fits and the same features."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serin.columns.column import Column
from serin.features.aggregates.aggregate import Aggregate
from serin.features.plan import FeaturePlan
from serin.features.sample import Sample
from tests.fakes.cupy import FakeCupy, install
from tests.unit.features.measured import Columns, columns_of
from tests.unit.features.random_tables import KINDS, features, tables, wire, with_values


def on_gpu(columns: Columns, cupy: FakeCupy, host: set[str]) -> Columns:
    """All but those that stay on the host."""
    there = {
        name: Column(kind=column.kind, values=cupy.asarray(column.values), dictionary=column.dictionary)  # type: ignore[arg-type]
        for name, column in columns.items()
        if name not in host
    }
    return {**columns, **there}


@settings(max_examples=25, deadline=None)
@given(tables, features, st.sets(st.sampled_from(list(KINDS)), max_size=6))
def test_features_are_the_same_on_a_gpu(training: Any, specs: Any, left: set[str]) -> None:
    table = with_values(training)
    ids = np.arange(len(table))
    host = Sample(
        columns=columns_of(wire(table), KINDS),
        fold_ids=ids,
        target=(ids % 3).astype(np.float32),
        training=len(ids),
    )
    with pytest.MonkeyPatch.context() as patch, np.errstate(all="ignore"):
        there = replace(host, columns=on_gpu(host.columns, install(patch), left))

        def answer(aggregates: tuple[Aggregate, ...]) -> list[Any]:
            return [each.measure(there if getattr(each, "on_gpu", False) else host) for each in aggregates]

        plan = FeaturePlan.fit(specs, KINDS, answer)
        expected = FeaturePlan.fit(
            specs, KINDS, lambda aggregates: [each.measure(host) for each in aggregates]
        )
        made = [array.get() for array in plan.transform(there.columns, ids)]  # type: ignore[attr-defined]
        wanted = expected.transform(host.columns, ids)
    assert plan.to_json() == expected.to_json()
    for ours, theirs in zip(made, wanted, strict=True):
        assert ours.tobytes() == theirs.tobytes()
