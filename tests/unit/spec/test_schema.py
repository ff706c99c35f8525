"""The spec's JSON schema against what load.py accepts."""

from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from serin.spec.json_schema import editor_schema, inlined_schema, spec_schema
from serin.spec.load import load_spec
from tests.fakes.small_pipeline import small_spec

EXAMPLES = sorted((Path(__file__).resolve().parents[3] / "examples").glob("*/spec.yaml"))


@pytest.fixture(scope="module", params=[spec_schema, inlined_schema])
def schema(request: pytest.FixtureRequest) -> Draft202012Validator:
    found = request.param()
    Draft202012Validator.check_schema(found)
    return Draft202012Validator(found)


def problems(schema: Draft202012Validator, spec: Any) -> list[str]:
    return [f"{error.json_path}: {error.message}" for error in schema.iter_errors(spec)]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.parent.name)
def test_an_example_passes_as_one_stage_hands_it_to_the_next(
    schema: Draft202012Validator, example: Path
) -> None:
    assert problems(schema, load_spec(example).model_dump(mode="json", by_alias=True)) == []


def test_short_forms_pass(schema: Draft202012Validator, tmp_path: Path) -> None:
    assert problems(schema, small_spec(tmp_path)) == []


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"modle": {}}, "'modle' was unexpected"),
        ({"training": {"epohcs": 3}}, "$.training: Additional properties are not allowed ('epohcs'"),
        ({"training": {"epochs": "many"}}, "$.training.epochs: 'many' is not"),
        ({"monitoring": {"retrain": ["hourly"]}}, "$.monitoring.retrain[0]: 'hourly' is not one of"),
        ({"model": {"kind": "mpl"}}, "$.model.kind: 'mpl' is not one of"),
        ({"rollout": {"bake": "30x"}}, "$.rollout.bake: '30x' is not valid"),
        (
            {"features": [{"columns": ["a"], "steps": ["normalise"]}]},
            "$.features[0].steps[0]: 'normalise' is",
        ),
    ],
)
def test_what_cannot_be_a_spec_is_refused(
    schema: Draft202012Validator, tmp_path: Path, change: dict[str, Any], problem: str
) -> None:
    (found,) = problems(schema, small_spec(tmp_path) | change)
    assert problem in found


@pytest.mark.parametrize(
    ("model", "offered"),
    [
        ({"kind": "xgboost", "rounds": 3}, True),
        ({"kind": "xgboost", "hidden": [3]}, False),
        ({"hidden": [3]}, True),
        ({"kind": "dcn", "blocks": 2}, False),
        ({"onnx": "model.onnx", "task": "binary"}, True),
        ({"onnx": "model.onnx", "epochs": 2}, False),
    ],
)
def test_an_editor_offers_the_keys_of_the_model_s_kind_alone(model: dict[str, Any], offered: bool) -> None:
    assert Draft202012Validator(editor_schema()).is_valid({"name": "m", "model": model}) == offered


def test_an_editor_offers_all_keys_where_a_search_tries_kinds() -> None:
    search = {"space": {"model.kind": {"choice": ["mlp", "xgboost"]}}}
    spec = {"name": "m", "model": {"hidden": [3], "rounds": 3}, "search": search}
    assert Draft202012Validator(editor_schema()).is_valid(spec)
