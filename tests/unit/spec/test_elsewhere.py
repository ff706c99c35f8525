"""Specs of servers that Serin does not run: every key is used or refused by name."""

from collections.abc import Iterator
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from serin.errors import SpecError
from serin.spec.elsewhere import DECISIONS, load_elsewhere, problems, why_refused
from serin.spec.load import load_spec
from serin.spec.pipeline import PipelineSpec

TARGET = {"target": {"expression": "late > 5", "task": "binary"}}


def sections_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from sections_in(argument)


def keys(model: type[BaseModel], above: str = "") -> Iterator[str]:
    """Every key of a section and of the sections below it."""
    for name, field in model.model_fields.items():
        key = f"{above}{field.alias or name}"
        inner = list(sections_in(field.annotation))
        for section in inner:
            yield from keys(section, f"{key}.")
        if not inner:
            yield key


KEYS = sorted(set(keys(PipelineSpec)))


def decision(key: str) -> str | None:
    """The entry that decides about a key."""
    while key not in DECISIONS:
        key, dot, _ = key.rpartition(".")
        if not dot:
            return None
    return key


def nested(key: str, value: object) -> dict[str, Any]:
    for part in reversed(key.split(".")):
        value = {part: value}
    assert isinstance(value, dict)
    return value


def test_every_key_of_a_spec_is_decided_about() -> None:
    assert [key for key in KEYS if decision(key) is None] == []
    known = {key.split(".", each)[0] for key in KEYS for each in (1,)} | {*KEYS}
    above = {".".join(key.split(".")[:depth]) for key in KEYS for depth in range(1, key.count(".") + 2)}
    assert DECISIONS.keys() <= known | above, "an entry about a key that does not exist"


@pytest.mark.parametrize("key", [key for key in KEYS if why_refused(key)])
def test_a_key_without_a_meaning_is_refused_by_its_name_and_with_the_reason(key: str) -> None:
    with pytest.raises(SpecError) as refused:
        load_elsewhere("m", nested(key, "anything"))
    found = dict(refused.value.problems)
    entry = decision(key)
    assert entry is not None
    assert any(name == key or key.startswith(f"{name}.") for name in found), found
    assert DECISIONS[entry] in found.values()


def test_every_other_key_is_in_the_spec_that_is_stored() -> None:
    used = [key for key in KEYS if not why_refused(key)]
    sections = {key.split(".")[0] for key in used}
    assert sections == {"name", "data", "model", "export", "objectives", "serving", "rollout", "monitoring"}
    given = {
        "name": "m", "data": TARGET, "export": {"segments": ["a"]}, "objectives": {"latency_ms": 20},
        "serving": {"request_timeout": "3s", "rate_limit": "5/s"}, "rollout": {"steps": [50, 100]},
        "monitoring": {"capture": {"share": 1, "mask": ["b"]}, "quality": {"margin": 0.1}, "rollback_on_burn": True},
    }  # fmt: skip
    spec, document = load_elsewhere("m", given)
    assert document == {**given, "model": {"kind": "server"}}
    assert spec.data.target.expression == "late > 5"
    assert (spec.objectives.latency_ms, spec.serving.request_timeout, spec.rollout.steps) == (
        20,
        3.0,
        (50, 100),
    )
    assert spec.monitoring.capture.mask == ("b",)
    assert load_elsewhere("m", document) == (spec, document), "what is stored can be read again"


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"name": "other"}, "name: is 'other', and the rollout is of 'm'"),
        ({"rollout": {"steps": ["shadow", 100]}}, "rollout.steps: shadow compares .* has no bundle"),
        ({"monitoring": {"capture": {"shares": 1}}}, "monitoring.capture.shares: unknown key"),
        ({"nonsense": 1}, "nonsense: unknown key"),
        ({"model": {"kind": "mlp"}}, "model.kind: nothing is trained or exported here"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(given: dict[str, Any], problem: str) -> None:
    with pytest.raises(SpecError, match=problem):
        load_elsewhere("m", given)


def test_a_spec_of_a_server_elsewhere_is_not_one_of_a_pipeline() -> None:
    with pytest.raises(
        SpecError, match=r"model.kind: server is for versions that are served elsewhere.*rollout start"
    ):
        load_spec({"name": "m", "model": {"kind": "server"}})


@pytest.mark.parametrize(
    ("monitoring", "problem"),
    [
        ({"capture": {"share": 1, "mask": ["emial"]}}, "monitoring.capture.mask"),
        (
            {"capture": {"share": 1}, "drift": {"tolerance": 0.1, "columns": ["x"]}},
            "monitoring.drift.columns",
        ),
        ({"drift": {"tolerance": 0.1}}, "monitoring.drift"),
        ({"capture": {"share": 1}, "drift": {}}, "monitoring.drift.tolerance"),
        ({"capture": {"share": 1}, "quality": {"margin": 0.1}}, "monitoring.quality"),
    ],
)
def test_what_the_server_cannot_have_is_refused(monitoring: dict[str, Any], problem: str) -> None:
    spec, _ = load_elsewhere("m", {"monitoring": monitoring})
    assert [key for key, _ in problems(spec, ["email"], has_time=False)] == [problem]
