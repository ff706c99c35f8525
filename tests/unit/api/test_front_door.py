"""What `import serin` offers: these names, no others."""

from __future__ import annotations

import inspect

import pytest

import serin

OFFERED = [
    "Checkpoint", "Client", "DataError", "Dataset", "Explanation", "ExportError", "Model", "Pipeline", "RolloutError",
    "SerinError", "ServingError", "SpecError", "StackError", "Store", "StoreError", "TrainingError", "__version__",
]  # fmt: skip
OF_A_PIPELINE = [
    "build_dataset", "check", "draft", "export", "from_yaml", "name", "replace", "roll_out", "run", "spec", "to_yaml",
    "train",
]  # fmt: skip
OF_A_RESULT = ["path", "ran", "receipt", "why"]


def public(kind: type) -> list[str]:
    annotated = {name for each in kind.__mro__ for name in inspect.get_annotations(each)}
    return sorted(name for name in annotated | set(dir(kind)) if not name.startswith("_"))


def test_serin_offers_these_names_and_no_others() -> None:
    assert serin.__all__ == OFFERED
    assert dir(serin) == OFFERED
    assert all(getattr(serin, name) for name in OFFERED)


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'Piepline'; it offers .*Pipeline"):
        serin.Piepline  # noqa: B018


def test_the_classes_offer_these_names_and_no_others() -> None:
    assert public(serin.Pipeline) == OF_A_PIPELINE
    assert public(serin.Dataset) == sorted([*OF_A_RESULT, "digest", "report", "rows", "to_pandas"])
    assert public(serin.Checkpoint) == sorted([*OF_A_RESULT, "metrics", "step"])
    assert public(serin.Explanation) == ["frame", "method", "note", "rows", "scale", "sources"]
    model = ["add_labels", "card", "digest", "explain", "load", "metrics", "name", "predict", "version"]
    assert public(serin.Model) == sorted([*OF_A_RESULT, *model])


def test_every_offered_class_and_method_says_what_it_does() -> None:
    kinds = [getattr(serin, name) for name in OFFERED if inspect.isclass(getattr(serin, name))]
    ours = [kind for kind in kinds if kind.__module__.startswith("serin.api")]
    methods = [
        method
        for kind in ours
        for name, method in inspect.getmembers(kind, callable)
        if not name.startswith("_")
    ]
    assert methods
    assert [item for item in [*ours, *methods] if not inspect.getdoc(item)] == []
