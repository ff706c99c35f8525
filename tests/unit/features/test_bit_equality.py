"""What the ETL makes of a column and what ONNX Runtime makes of the same request are the same bits."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from serin.formats.schema import INT64_NULL, Kind
from serin.spec.features import FeatureSpec
from tests.unit.features.measured import columns_of, fit, run_graph, same_bits

KINDS: dict[str, Kind] = {"f": "float", "i": "int", "b": "bool", "s": "string", "t": "timestamp"}
PARTS = ["minute", "hour", "weekday", "day", "month", "quarter"]

floats = st.one_of(st.floats(width=32), st.sampled_from([0.0, -0.0, 1.0, 15.0, float("nan")]))
ints = st.one_of(st.integers(-(2**63), 2**63 - 1), st.integers(-20, 20), st.just(INT64_NULL))
texts = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=9),
    st.sampled_from(["", "a", "b", "UA", "ü"]),
)
rows = st.lists(st.tuples(floats, ints, st.integers(-1, 1), texts, ints), min_size=4, max_size=60)
numeric_steps = st.lists(
    st.sampled_from(
        [
            "fill_median",
            "normalize",
            {"clip": {"q": [0.1, 0.9]}},
            {"clip": {"min": 0.0}},
            {"clip": {"max": 0.1}},
        ]
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=25, deadline=None)
@given(rows, rows, numeric_steps, st.integers(1, 5), st.integers(1, 3))
def test_arrays_and_graph_give_the_same_bits(training, requests, steps, buckets, least) -> None:  # type: ignore[no-untyped-def]
    numeric = [FeatureSpec(columns=["f", "i", "b"], steps=steps)]
    training.append((1.5, 3, 1, "a", 0))  # no column without a value
    features = [
        *numeric,
        FeatureSpec(
            columns=["i", "s", "b"], steps=[{"categorify": {"min_count": least, "buckets": buckets}}]
        ),
        FeatureSpec(columns=["t"], steps=[{"date_parts": PARTS}]),
    ]
    with np.errstate(all="ignore"):
        plan = fit(features, KINDS, columns_of(wire(training), KINDS))
        asked = wire(training + requests)
        num, cat = plan.transform(columns_of(asked, KINDS))
        graph_num, graph_cat = run_graph(plan, asked)
    assert same_bits(num, graph_num)
    assert np.array_equal(cat, graph_cat)
    assert not np.isnan(num).any()


def wire(table):  # type: ignore[no-untyped-def]
    f, i, b, s, t = zip(*table, strict=True)
    return {
        "f": np.asarray(f, np.float32),
        "i": np.asarray(i, np.int64),
        "b": np.asarray(b, np.int8),
        "s": np.asarray(s, object),
        "t": np.asarray(t, np.int64),
    }
