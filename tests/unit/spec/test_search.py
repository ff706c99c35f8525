"""The section `search`: what may be tried must exist, be allowed, and be said in one way."""

from pathlib import Path
from typing import Any

import pytest

from serin.errors import SpecError
from serin.spec.load import load_spec
from serin.spec.model import ModelSpec
from serin.spec.search import with_values
from serin.spec.training import TrainingSpec
from tests.fakes.small_pipeline import small_spec

GOOD = {"training.learning_rate": {"log": [0.0001, 0.01]}}


def load(folder: Path, search: dict[str, Any], **sections: Any) -> Any:
    return load_spec(small_spec(folder, search=search, **sections))


def test_a_search_has_defaults_and_takes_durations(tmp_path: Path) -> None:
    found = load(tmp_path, {"space": GOOD, "budget": "30m"}).search
    assert (found.trials, found.sampler, found.pruner, found.budget, found.parallel) == (
        30,
        "tpe",
        "halving",
        1800,
        "auto",
    )


@pytest.mark.parametrize(
    ("search", "key", "text"),
    [
        ({"space": {"training.learnig_rate": {"log": [1e-4, 1e-2]}}}, "search.space.training.learnig_rate",
         "did you mean 'training.learning_rate'"),
        ({"space": {"data.split": {"choice": [1, 2]}}}, "search.space.data.split", "there is no such setting"),
        ({"space": {"model.dropout": {"uniform": [0, 2]}}}, "search.space.model.dropout", "2.0 is refused"),
        ({"space": {"model.hidden": {"choice": [[8]]}}}, "search.space.model.hidden", "at least two values"),
        ({"space": {"model.dropout": {"uniform": [0, 1], "log": [1, 2]}}}, "search.space.model.dropout", "give one of"),
        ({"space": {"model.dropout": {}}}, "search.space.model.dropout", "given: none"),
        ({"space": {"training.weight_decay": {"log": [0, 1]}}}, "search.space.training.weight_decay", "be above 0"),
        ({"space": {"model.dropout": {"uniform": [0.5, 0.1]}}}, "search.space.model.dropout", "must be smaller"),
        ({"space": GOOD, "sampler": "grid"}, "search", "write choice"),
        ({"space": GOOD, "trails": 3}, "search.trails", "did you mean 'trials'"),
        ({"space": GOOD, "parallel": 0}, "search.parallel", "at least 1, or auto"),
        ({"space": {}}, "search.space", "at least 1"),
        ({"space": GOOD, "folds": 3}, "search.folds", "need a split by time"),
    ],
)  # fmt: skip
def test_each_mistake_is_named_by_its_key(
    tmp_path: Path, search: dict[str, Any], key: str, text: str
) -> None:
    with pytest.raises(SpecError) as refused:
        load(tmp_path, search)
    problems = dict(refused.value.fields["problems"])
    assert text in problems[key]


def test_folds_that_leave_nothing_to_train_on_are_refused(tmp_path: Path) -> None:
    raw = small_spec(tmp_path, search={"space": GOOD, "folds": 9})
    raw["data"]["time"] = "hours"
    with pytest.raises(SpecError, match=r"search\.folds: .*at most 7 folds fit"):
        load_spec(raw)


def test_values_are_put_where_they_belong_also_inside_options() -> None:
    model, training = with_values(
        ModelSpec(kind="xgboost", options={"eta": 0.3}), TrainingSpec(epochs=2),
        {"model.options.max_depth": 5, "training.seed": 7},
    )  # fmt: skip
    assert model.options == {"eta": 0.3, "max_depth": 5}
    assert (training.epochs, training.seed) == (2, 7)
