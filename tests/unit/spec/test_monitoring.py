from typing import Any

import pytest

from serin.errors import SpecError
from serin.spec.load import load_spec

SPEC: dict[str, Any] = {
    "name": "parcels",
    "data": {
        "tables": {"parcels": "parcels.parquet"},
        "target": {"expression": "hours > 3", "task": "binary"},
    },
    "features": [{"columns": ["weight", "height"], "steps": ["normalize"]}],
}


@pytest.mark.parametrize("key", ["mask", "drop"])
def test_a_hidden_column_is_a_column_that_requests_hold(key: str) -> None:
    good = load_spec({**SPEC, "monitoring": {"capture": {key: ["weight"]}}})
    assert getattr(good.monitoring.capture, key) == ("weight",)
    with pytest.raises(
        SpecError,
        match=rf"monitoring.capture.{key}: 'name' is not a column of a request; known: height, weight",
    ):
        load_spec({**SPEC, "monitoring": {"capture": {key: ["name"]}}})


def test_a_quality_objective_needs_recorded_requests() -> None:
    good = {"capture": {"share": 0.5}, "quality": {"margin": 0.01}}
    assert load_spec({**SPEC, "monitoring": good}).monitoring.quality is not None
    with pytest.raises(SpecError, match=r"monitoring\.quality: needs recorded requests: set"):
        load_spec({**SPEC, "monitoring": {"quality": {"margin": 0.01}}})
