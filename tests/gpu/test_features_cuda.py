"""Every operator on a real GPU: the host's fits and features. Skipped without one."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from serin.columns.column import Column
from serin.columns.exact import alike, ulps_apart
from serin.etl.engines.device import usable_gpus
from serin.etl.engines.subnormals import keep_subnormals
from serin.features.aggregates.aggregate import Aggregate
from serin.features.fitted import Sample
from serin.features.plan import FeaturePlan
from serin.spec.features import FeatureSpec
from tests.unit.features.measured import columns_of
from tests.unit.features.random_tables import KINDS, features, tables, wire, with_values

cupy = pytest.importorskip("cupy", reason="cupy is not installed")
pytestmark = pytest.mark.skipif(not usable_gpus().count, reason="no GPU")


@pytest.fixture(scope="module", autouse=True)
def as_the_engines_do() -> None:
    keep_subnormals()


@pytest.mark.timeout(600)
@settings(max_examples=60, deadline=None)
@given(tables, features)
def test_features_are_the_host_s(training: Any, specs: Any) -> None:
    table = with_values(training)
    ids = np.arange(len(table))
    columns = columns_of(wire(table), KINDS)
    host = Sample(columns=columns, fold_ids=ids, target=(ids % 3).astype(np.float32), training=len(ids))
    with np.errstate(all="ignore"):
        compare(host, specs, ids)


def test_subnormal_numbers_are_the_host_s() -> None:
    columns = {"f": Column(kind="float", values=np.asarray([-1.4e-45, 1.0], np.float32))}
    host = Sample(columns=columns, fold_ids=np.arange(2), target=np.zeros(2, np.float32), training=2)
    compare(host, [FeatureSpec(columns=["f"], steps=[{"bucketize": [-3.0, 0.0, 0.5, 100.0]}])], np.arange(2))


def test_many_rows_are_the_host_s_and_logarithms_within_an_ulp() -> None:
    random = np.random.default_rng(1)
    rows = 1_000_000
    columns = {"f": Column(kind="float", values=random.lognormal(0, 9, rows).astype(np.float32))}
    host = Sample(columns=columns, fold_ids=np.arange(rows), target=np.zeros(rows, np.float32), training=rows)
    apart = compare(host, [FeatureSpec(columns=["f"], steps=["log1p"])], np.arange(rows))
    print(f"log1p: {int((apart > 0).sum())} of {rows} differ, at most {int(apart.max())} ulp")


def compare(host: Sample, specs: Any, ids: Any) -> Any:
    there = replace(
        host,
        columns={
            name: Column(kind=column.kind, values=cupy.asarray(column.values), dictionary=column.dictionary)
            for name, column in host.columns.items()
        },
    )

    def answer(aggregates: tuple[Aggregate, ...]) -> list[Any]:
        return [each.measure(there if getattr(each, "on_gpu", False) else host) for each in aggregates]

    kinds = {name: column.kind for name, column in host.columns.items()}
    plan = FeaturePlan.fit(specs, kinds, answer)
    expected = FeaturePlan.fit(specs, kinds, lambda aggregates: [each.measure(host) for each in aggregates])
    assert plan.to_json(exact_only=True) == expected.to_json(exact_only=True)
    num, cat = (array.get() for array in plan.transform(there.columns, ids))  # type: ignore[attr-defined]
    wanted_num, wanted_cat = expected.transform(host.columns, ids)
    assert np.array_equal(cat, wanted_cat)
    apart = np.zeros(1, np.int64)
    for place, name in enumerate(expected.numeric):
        ours, theirs = np.ascontiguousarray(num[:, place]), np.ascontiguousarray(wanted_num[:, place])
        if name in expected.approximate:
            assert alike(ours, theirs, expected.approximate[name]).all(), name
            apart = ulps_apart(ours, theirs)
        else:
            assert ours.tobytes() == theirs.tobytes(), name
    return apart
