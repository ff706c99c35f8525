"""Which kinds of models use which keys of `model` and `training`. A key that the chosen kind would ignore is refused.

Only keys that a person set count: a section with every key set was written by Serin, and its defaults are not choices.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from serin.spec.model import ModelSpec, with_kind
from serin.spec.section import Section
from serin.spec.training import TrainingSpec

_LAYERED = ("mlp", "dcn")
_BUILT_IN = (*_LAYERED, "ft_transformer", "tabm")
_NETWORKS = (*_BUILT_IN, "module")
_GIVEN = ("script", "onnx")
_ALL = (*_NETWORKS, "xgboost", "auto", *_GIVEN)

USED_BY: Mapping[str, tuple[str, ...]] = {
    "model.kind": (*_ALL, "server"),
    "model.hidden": (*_LAYERED, "tabm"),
    "model.embedding": _BUILT_IN,
    "model.dropout": _BUILT_IN,
    "model.numeric_scaling": _BUILT_IN,
    "model.numeric_embedding": (*_LAYERED, "tabm"),
    "model.members": ("tabm",),
    "model.ensemble_size": (*_LAYERED, "ft_transformer"),
    "model.cross_layers": ("dcn",),
    "model.blocks": ("ft_transformer",),
    "model.heads": ("ft_transformer",),
    "model.rounds": ("xgboost",),
    "model.auto": ("auto",),
    "model.module": ("module",),
    "model.script": ("script",),
    "model.onnx": ("onnx",),
    "model.options": ("module", "xgboost", "script"),
    "model.answer": _GIVEN,
    "model.task": (*_GIVEN, "server"),
    "model.classes": (*_GIVEN, "server"),
    "model.golden": ("onnx",),
    "training.epochs": (*_NETWORKS, "auto", "script"),
    "training.batch_rows": _NETWORKS,
    "training.optimizer": _NETWORKS,
    "training.learning_rate": _NETWORKS,
    "training.schedule": _NETWORKS,
    "training.weight_decay": _NETWORKS,
    "training.clip_norm": _NETWORKS,
    "training.gradient_accumulation": _NETWORKS,
    "training.class_weights": (*_NETWORKS, "xgboost", "auto"),
    "training.patience": (*_NETWORKS, "xgboost"),
    "training.embedding_updates": _NETWORKS,
    "training.seed": (*_NETWORKS, "xgboost", "auto", "script"),
    "training.processes": (*_NETWORKS, "xgboost", "auto", "script"),
    "training.processes_per_gpu": _NETWORKS,
    "training.precision": _NETWORKS,
    "training.strategy": _NETWORKS,
    "training.gradient_checkpointing": _NETWORKS,
    "training.execution": _NETWORKS,
    "training.checkpoint_every_steps": (*_NETWORKS, "xgboost"),
    "training.prune": _LAYERED,
}
"""Every key of the two sections, with the kinds that read it."""

_INSTEAD: Mapping[tuple[str, str], str] = {
    ("xgboost", "training.epochs"): "set model.rounds, the number of boosting rounds",
    ("xgboost", "training.learning_rate"): "set model.options.eta, the learning rate of trees",
    ("xgboost", "training.weight_decay"): "set model.options.lambda or alpha, the penalties of trees",
    ("xgboost", "training.batch_rows"): "every round reads all rows; take it out",
    ("xgboost", "model.hidden"): "set model.options.max_depth, the size of trees",
    ("xgboost", "model.dropout"): "set model.options.subsample or colsample_bytree",
    ("xgboost", "model.ensemble_size"): "set model.options.num_parallel_tree",
    ("tabm", "model.ensemble_size"): "set model.members, the number of members that share their matrices",
    **{(kind, "model.rounds"): "set training.epochs" for kind in (*_NETWORKS, "script")},
    **{
        ("module", key): "pass it to your module by model.options"
        for key in ("model.hidden", "model.dropout")
    },
}


def kinds_of(model: ModelSpec, tried: Iterable[Any] = ()) -> tuple[str, ...]:
    """The spec's kind, and those that a search tries."""
    return tuple(dict.fromkeys([model.kind, *(kind for kind in tried if kind in _ALL)]))


def unused_settings(
    model: ModelSpec, training: TrainingSpec, kinds: tuple[str, ...]
) -> Iterator[tuple[str, str]]:
    """The settings that were written and that none of `kinds` uses, as (key, problem and what to do instead)."""
    keys = [
        *(f"model.{name}" for name in written(model)),
        *(f"training.{name}" for name in written(training)),
    ]
    for key in keys:
        if problem := unused(key, kinds):
            yield key, problem


def unused(key: str, kinds: tuple[str, ...]) -> str | None:
    """Why a setting means nothing to any of these kinds; None when one of them uses it."""
    users = USED_BY[key]
    if any(kind in users for kind in kinds):
        return None
    others = f"take it out, or choose a kind that uses it: {', '.join(users)}"
    if kinds == ("onnx",) and key.startswith("training."):
        others = "a model from an ONNX file is not trained; take it out"
    elif kinds == ("script",):
        others = "pass it to your script by model.options"
    return f"model.kind {' or '.join(kinds)} does not use it: {_INSTEAD.get((kinds[0], key), others)}"


def written(section: Section) -> list[str]:
    """The keys that somebody chose. When all keys are set, the section was written by Serin: then only those that are
    not the default. A null is not a choice."""
    fields = type(section).model_fields
    always = {name for name, field in fields.items() if field.exclude_if is None}
    complete = always <= section.model_fields_set
    return [
        name
        for name, field in fields.items()
        if name in section.model_fields_set
        and getattr(section, name) is not None
        and not (complete and getattr(section, name) == field.get_default(call_default_factory=True))
    ]


def without_unused(document: Mapping[str, Any]) -> dict[str, Any]:
    """A spec as a plain mapping, without the settings of `model` and `training` that its kind does not use."""
    kinds = _kinds_in(document)
    found = dict(document)
    for section in ("model", "training"):
        if isinstance(document.get(section), Mapping):
            found[section] = {
                name: value
                for name, value in document[section].items()
                if f"{section}.{name}" not in USED_BY or unused(f"{section}.{name}", kinds) is None
            }
    return found


def unused_in(document: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The unused settings of a spec as a plain mapping, as far as the two sections can be read."""
    try:
        model = ModelSpec.model_validate(document.get("model") or {})
        training = TrainingSpec.model_validate(document.get("training") or {})
    except ValidationError:
        return
    yield from unused_settings(model, training, _kinds_in(document))


def _kinds_in(document: Mapping[str, Any]) -> tuple[str, ...]:
    kind = with_kind(document.get("model") or {}).get("kind", "mlp")
    space = document.get("search") or {}
    tried = ((space.get("space") or {}).get("model.kind") or {}).get("choice") or ()
    return tuple(dict.fromkeys([kind, *(each for each in tried if each in _ALL)]))
