import numpy as np
import pyarrow as pa
import pytest

from serin.columns.column import Column
from serin.columns.hashing import hash_ints, hash_strings
from serin.features.ops.categorify import FittedCategorify
from serin.formats.schema import INT64_NULL
from serin.spec.features import FeatureSpec
from tests.unit.features.measured import fit, strings

SAMPLE = strings("b", "a", "b", "c", "c", None, "é", "Z")


def vocabulary(**arguments: int) -> list[str]:
    feature = FeatureSpec(columns=["s"], steps=[{"categorify": arguments}])
    (made,) = fit([feature], {"s": "string"}, {"s": SAMPLE}).categories
    assert isinstance(made.step, FittedCategorify)
    return list(made.step.vocabulary.to_pylist())


def test_the_vocabulary_goes_by_descending_count_then_by_bytes() -> None:
    assert vocabulary() == ["b", "c", "Z", "a", "é"]


def test_rare_values_and_values_beyond_the_size_stay_outside() -> None:
    assert vocabulary(min_count=2) == ["b", "c"]
    assert vocabulary(max_size=3) == ["b", "c", "Z"]


def test_codes_are_null_then_buckets_then_vocabulary() -> None:
    step = FittedCategorify(pa.array(["x", "y"]), 3)
    (codes,) = step.transform(strings("y", None, "x", "unknown"))
    assert codes.tolist() == [5, 0, 4, 1 + int(hash_strings(pa.array(["unknown"]))[0]) % 3]
    assert step.size == 6


@pytest.mark.parametrize("spread", [1, 10**12])
def test_whole_numbers_are_coded_alike_by_table_and_by_hash(spread: int) -> None:
    step = FittedCategorify(pa.array([7 * spread, 3 * spread]), 2)
    values = np.asarray([3, 7, 5, 3, 4], np.int64) * spread
    values[3] = INT64_NULL
    (codes,) = step.transform(Column(kind="int", values=values))
    outside = 1 + hash_ints(values) % 2
    assert codes.tolist() == [4, 3, outside[2], 0, outside[4]]
