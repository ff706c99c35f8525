import pytest
from pydantic import ValidationError

from serin.errors import SpecError
from serin.spec.champion import ChampionSpec
from serin.spec.export import ExportSpec
from serin.spec.load import load_spec


def test_the_defaults_ask_for_one_variant_and_a_candidate_that_is_not_worse() -> None:
    export, champion = ExportSpec(), ChampionSpec()
    assert (export.variants, export.target, export.budget.max_drop) == (("fp32",), "auto", 0.002)
    assert (champion.metric, champion.max_loss, champion.confidence) == (None, 0.0, 0.95)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"variants": ["fp16"]}, "add fp32; the others are judged against it"),
        ({"variants": ["fp32", "fp8"]}, "'int8_embeddings'"),
        ({"batch_mix": {1: 0.5, 8: 0.2}}, "shares must be above 0 and add up to 1"),
        ({"batch_mix": {0: 1.0}}, "rows must be at least 1"),
        ({"budget": {"max_drop": -1}}, "greater than or equal to 0"),
        ({"budget": {"metric": "f1"}}, "'auc'"),
        ({"target": "tpu"}, "'gpu'"),
    ],
)
def test_what_no_export_can_do_is_refused_with_what_it_can(given: dict[str, object], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        ExportSpec.model_validate(given)


def test_a_confidence_below_a_coin_toss_is_none() -> None:
    with pytest.raises(ValidationError, match=r"greater than 0\.5"):
        ChampionSpec(confidence=0.4)


def test_a_segment_is_a_column_that_requests_hold() -> None:
    spec = {
        "name": "parcels",
        "data": {
            "tables": {"parcels": "parcels.parquet"},
            "target": {"expression": "hours > 3", "task": "binary"},
        },
        "features": [{"columns": ["weight"], "steps": ["normalize"]}],
        "export": {"segments": ["wheight"]},
    }
    with pytest.raises(
        SpecError, match=r"export.segments: 'wheight' is not a column of a request; .*'weight'"
    ):
        load_spec(spec)
