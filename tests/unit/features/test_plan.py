import json

import numpy as np
import pytest

from serin.errors import SpecError
from serin.features.kinds import check_kinds
from serin.features.plan import FeaturePlan
from serin.formats.schema import Kind
from serin.spec.features import FeatureSpec
from tests.unit.features.measured import columns_of, fit, run_graph, same_bits

KINDS: dict[str, Kind] = {"f": "float", "s": "string", "t": "timestamp"}
WIRE = {
    "f": np.asarray([1, np.nan, 3], np.float32),
    "s": np.asarray(["a", "", "b"], object),
    "t": np.asarray([0, 1, 2], np.int64),
}
NUMBER = FeatureSpec(columns=["f"], steps=["normalize"])
TEXT = FeatureSpec(columns=["s"], steps=["categorify"])
TIME = FeatureSpec(columns=["t"], steps=[{"date_parts": ["hour"]}])


def test_a_plan_survives_json() -> None:
    plan = fit([NUMBER, TEXT, TIME], KINDS, columns_of(WIRE, KINDS))
    again = FeaturePlan.from_json(json.loads(json.dumps(plan.to_json(), allow_nan=False)))
    assert again.to_json() == plan.to_json()
    for ours, theirs in zip(
        plan.transform(columns_of(WIRE, KINDS)), again.transform(columns_of(WIRE, KINDS)), strict=True
    ):
        assert same_bits(ours, theirs)


def test_a_null_that_no_step_filled_becomes_0() -> None:
    num, _ = fit([NUMBER], KINDS, columns_of(WIRE, KINDS)).transform(columns_of(WIRE, KINDS))
    assert num[1, 0] == 0


@pytest.mark.parametrize("features", [[NUMBER], [TEXT]], ids=["no categories", "no numbers"])
def test_a_plan_may_make_one_kind_of_feature_only(features: list[FeatureSpec]) -> None:
    plan = fit(features, KINDS, columns_of(WIRE, KINDS))
    num, cat = run_graph(plan, WIRE)
    assert num.shape == (3, len(plan.numeric))
    assert cat.shape == (3, len(plan.categorical))


def test_steps_that_cannot_work_on_a_column_are_all_named() -> None:
    features = [
        FeatureSpec(columns=["s", "t"], steps=["fill_median"]),
        FeatureSpec(columns=["f"], steps=["categorify"]),
        FeatureSpec(columns=["s"], steps=["date_parts"]),
    ]
    with pytest.raises(SpecError) as caught:
        check_kinds(features, KINDS)
    assert [key for key, _ in caught.value.fields["problems"]] == ["features[0]"] * 2 + [
        "features[1]",
        "features[2]",
    ]


def test_every_feature_is_described_in_a_line() -> None:
    lines = fit([NUMBER, TEXT], KINDS, columns_of(WIRE, KINDS)).describe()
    assert lines[0].startswith("f (numeric): minus 2, divided by 1")
    assert lines[0].endswith("null becomes 0")
    assert lines[1].startswith("s (categorical): 2 values")


def test_a_document_of_another_format_is_refused() -> None:
    with pytest.raises(ValueError, match=r"serin\.features"):
        FeaturePlan.from_json({"format": "other", "version": 1})
