"""What must hold for every table and every chain of steps that the spec allows."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from serin.columns.ulps import alike
from serin.features.plan import FeaturePlan
from tests.unit.features.measured import Columns, answer_over, columns_of, run_graph, same_bits
from tests.unit.features.random_tables import KINDS, examples, features, tables, wire, with_values


def fitted(specs: Any, pieces: list[Columns], cuts: list[Any], targets: Any, classes: int) -> FeaturePlan:
    answer = answer_over(pieces, cuts, [targets[cut] for cut in cuts])
    return FeaturePlan.fit(specs, KINDS, answer, classes=classes)


def target_of(count: int, classes: int) -> Any:
    random = np.random.default_rng(count)
    if classes:
        return random.integers(0, classes, count).astype(np.float32)
    return (random.standard_cauchy(count) * 1000).astype(np.float32)


@settings(max_examples=examples(60), deadline=None)
@given(tables, tables, features, st.sampled_from([0, 3]))
def test_a_request_becomes_the_same_features_in_arrays_and_in_the_graph(
    training: Any, requests: Any, specs: Any, classes: int
) -> None:
    table = with_values(training)
    with np.errstate(all="ignore"):
        columns = columns_of(wire(table), KINDS)
        ids = np.arange(len(table))
        plan = fitted(specs, [columns], [ids], target_of(len(table), classes), classes)
        asked = wire(table + requests)
        num, cat = plan.transform(columns_of(asked, KINDS))
        graph_num, graph_cat = run_graph(plan, asked)
        again = FeaturePlan.from_json(json.loads(json.dumps(plan.to_json(), allow_nan=False)))
        num_again, cat_again = again.transform(columns_of(asked, KINDS))
    assert graph_num.shape == num.shape
    for place, name in enumerate(plan.numeric):
        ours, theirs = np.ascontiguousarray(num[:, place]), np.ascontiguousarray(graph_num[:, place])
        if name in plan.approximate:
            assert alike(ours, theirs, plan.approximate[name]).all(), (name, plan.describe())
        else:
            assert same_bits(ours, theirs), (name, plan.describe())
    assert np.array_equal(cat, graph_cat)
    assert (cat < [output.size for output in plan.categorical]).all()
    assert (cat >= 0).all()
    assert not np.isnan(num).any()
    assert same_bits(num, num_again)
    assert same_bits(cat, cat_again)
    assert again.to_json() == plan.to_json()


@settings(max_examples=examples(40), deadline=None)
@given(tables, features, st.sampled_from([0, 3]), st.lists(st.integers(0, 61), max_size=6))
def test_how_rows_are_cut_never_shows(training: Any, specs: Any, classes: int, places: list[int]) -> None:
    table = with_values(training)
    targets = target_of(len(table), classes)
    ends = sorted({0, len(table), *(min(place, len(table)) for place in places)})
    cuts = [np.arange(start, end) for start, end in pairwise(ends)]
    cuts.append(np.arange(0))  # a piece without a row
    with np.errstate(all="ignore"):
        columns = columns_of(wire(table), KINDS)
        whole = fitted(specs, [columns], [np.arange(len(table))], targets, classes)
        pieces = [columns_of(wire([table[row] for row in cut]), KINDS) for cut in cuts]
        parts = fitted(specs, pieces[::-1], cuts[::-1], targets, classes)
        num, cat = whole.transform(columns, np.arange(len(table)))
        made = [parts.transform(piece, cut) for piece, cut in zip(pieces, cuts, strict=True)]
    assert parts.to_json() == whole.to_json()
    assert same_bits(np.concatenate([own for own, _ in made]), num)
    assert same_bits(np.concatenate([own for _, own in made]), cat)
