"""Random tables and random chains of steps, for properties that must hold for all of them."""

from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

from serin.columns.column import Array
from serin.formats.schema import INT64_NULL, Kind
from serin.spec.features import FeatureSpec

KINDS: dict[str, Kind] = {
    "f": "float", "g": "float", "i": "int", "b": "bool", "s": "string", "u": "string", "t": "timestamp",
}  # fmt: skip
OWN = "tests.fakes.own_operators"
PARTS = ["minute", "hour", "weekday", "day", "month", "quarter"]

floats = st.one_of(st.floats(width=32), st.sampled_from([0.0, -0.0, 1.0, 15.0, 1e-30, float("nan")]))
ints = st.one_of(st.integers(-(2**63), 2**63 - 1), st.integers(-20, 20), st.just(INT64_NULL))
texts = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=9),
    st.sampled_from(["", "a", "b", "UA", "ü", "日本", "low", "high"]),
)
rows = st.tuples(floats, floats, ints, st.integers(-1, 1), texts, texts, ints)
tables = st.lists(rows, min_size=0, max_size=60)

number_steps: st.SearchStrategy[Any] = st.sampled_from(
    [
        "fill_median",
        "fill_mode",
        {"fill_missing": -7.5},
        {"fill_missing": {"value": 3, "indicator": True}},
        {"fill_median": {"indicator": True}},
        {"clip": {"q": [0.1, 0.9]}},
        {"clip": {"min": 0.0}},
        {"clip": {"max": 0.1}},
        "log1p",
        "normalize",
        "min_max",
        "robust_scale",
        {"robust_scale": {"q": [0.1, 0.8]}},
    ]
)
exact_steps = number_steps.filter(lambda step: step != "log1p")
bucketize: st.SearchStrategy[Any] = st.sampled_from(
    [{"bucketize": {"quantiles": 4}}, {"bucketize": [-3.0, 0.0, 0.5, 100.0]}]
)
group_stats = st.builds(
    lambda by, stats: {"group_stats": {"by": by, "stats": stats}},
    st.sampled_from(["s", "i", "b"]),
    st.lists(st.sampled_from(["mean", "std", "min", "max", "sum", "count"]), min_size=1, unique=True),
)
own: st.SearchStrategy[Any] = st.sampled_from([f"{OWN}:Squash", {f"{OWN}:AboveMost": {"few": 2}}])
encodings: st.SearchStrategy[Any] = st.one_of(
    st.just("count_encode"),
    st.builds(
        lambda folds, smoothing: {"target_encode": {"folds": folds, "smoothing": smoothing}},
        st.integers(2, 5),
        st.sampled_from([0.0, 1.0, 20.0]),
    ),
    st.just("ordinal"),
)
coders: st.SearchStrategy[Any] = st.one_of(
    st.builds(
        lambda least, most, buckets: {
            "categorify": {"min_count": least, "max_size": most, "buckets": buckets}
        },
        st.integers(1, 3),
        st.sampled_from([None, 1, 5]),
        st.integers(1, 4),
    ),
    st.builds(lambda buckets: {"hash_bucket": buckets}, st.integers(1, 9)),
)


def chain(*parts: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
    """Steps one after another; a part that draws a list gives several, or none, but no second fill."""

    def joined(drawn: tuple[Any, ...]) -> list[Any]:
        steps: list[Any] = []
        for part in drawn:
            filled = False
            for step in part if isinstance(part, list) else [part]:
                fills = "fill" in str(step)
                if not (fills and filled):
                    steps.append(step)
                filled = filled or fills
        return steps

    return st.tuples(*parts).map(joined)


def some(steps: st.SearchStrategy[Any], most: int = 2, least: int = 0) -> st.SearchStrategy[list[Any]]:
    return st.lists(steps, min_size=least, max_size=most)


maybe_one_hot = some(st.just("one_hot"), 1)
chains_on_numbers = st.one_of(
    chain(some(number_steps, 4, 1)),
    chain(some(exact_steps), bucketize, maybe_one_hot),
    chain(some(number_steps), group_stats, some(number_steps)),
    chain(
        some(exact_steps), st.sampled_from([{"cyclical": {"period": 24.0}}, {"cyclical": {"period": 0.3}}])
    ),
    chain(some(number_steps), own, some(number_steps)),
)
chains_on_values = st.one_of(
    chain(coders, maybe_one_hot),
    chain(st.just({"one_hot": {"max_size": 3}})),
    chain(encodings, some(number_steps)),
    chain(encodings, some(exact_steps), bucketize),
)
chains_on_texts = st.one_of(
    chains_on_values,
    chain(st.just({"ordinal": ["low", "ü", "b", "high", "a"]}), some(number_steps)),
    chain(st.just({f"{OWN}:Known": {"words": ["a", "日本"]}})),
)
chains_on_times = st.one_of(
    chain(st.just({"date_parts": PARTS}), maybe_one_hot), chain(st.just({"cyclical": PARTS}))
)


def _feature(columns: list[str], chains: st.SearchStrategy[list[Any]]) -> st.SearchStrategy[FeatureSpec]:
    return chains.filter(_one_indicator).map(lambda steps: FeatureSpec(columns=columns, steps=steps))


def _one_indicator(steps: list[Any]) -> bool:
    """What the spec refuses: two indicators, or one before group_stats."""
    marked = [place for place, step in enumerate(steps) if "indicator" in str(step)]
    grouped = [place for place, step in enumerate(steps) if "group_stats" in str(step)]
    return len(marked) < 2 and not (marked and grouped and marked[0] < grouped[0])


joint = st.integers(1, 3).map(
    lambda least: FeatureSpec(columns=["s", "u"], steps=[{"categorify": {"joint": True, "min_count": least}}])
)
features = st.tuples(
    _feature(["f", "i"], chains_on_numbers),
    _feature(["g"], chains_on_numbers),
    _feature(["b"], st.one_of(chains_on_numbers, chains_on_values)),
    _feature(["s"], chains_on_texts),
    st.one_of(
        joint.map(lambda feature: feature.model_copy(update={"columns": ("u",)})),
        _feature(["u"], chains_on_texts),
    ),
    _feature(["t"], chains_on_times),
).map(list)


def with_values(table: list[Any]) -> list[Any]:
    """No column without a value: that is refused, and tested elsewhere."""
    return [*table, (1.5, -2.25, 3, 1, "a", "b", 0)]


def wire(table: list[Any]) -> dict[str, Array]:
    types: dict[str, Any] = {
        "f": np.float32, "g": np.float32, "i": np.int64, "b": np.int8, "s": object, "u": object, "t": np.int64,
    }  # fmt: skip
    columns = list(zip(*table, strict=True)) if table else [()] * len(types)
    return {
        name: np.asarray(values, dtype) for (name, dtype), values in zip(types.items(), columns, strict=True)
    }


def examples(quick: int) -> int:
    """So many in the suite; with --hypothesis-profile=soak as many as that profile says."""
    return quick if settings().max_examples <= 100 else settings().max_examples
