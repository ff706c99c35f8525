"""The rules of the section `model`: which keys each kind of model needs, and which it would silently ignore."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from serin.errors import nearest

if TYPE_CHECKING:
    from serin.spec.model import ModelSpec

SOURCES: Mapping[str, str] = {
    "module": "pkg.mod:Net or net.py:Net",
    "script": "train.py",
    "onnx": "model.onnx",
}
"""The keys that name your own model, each with an example. The key is the model's kind too."""

_OF_NETWORKS = ("hidden", "embedding", "dropout", "ensemble_size", "cross_layers", "blocks", "heads")
_ONLY_FOR: Mapping[str, tuple[str, ...]] = {
    "options": ("module", "script", "xgboost"),
    "rounds": ("xgboost",),
    "answer": ("script", "onnx"),
    "task": ("script", "onnx"),
    "classes": ("script", "onnx"),
    "golden": ("onnx",),
}
# XGBoost's own names. It would only warn about a misspelt one in a log.
TREE_OPTIONS = frozenset(
    {
        "alpha", "colsample_bylevel", "colsample_bynode", "colsample_bytree", "eta", "gamma", "grow_policy", "lambda",
        "max_bin", "max_cat_threshold", "max_cat_to_onehot", "max_delta_step", "max_depth", "max_leaves",
        "min_child_weight", "num_parallel_tree", "sampling_method", "scale_pos_weight", "subsample",
    }
)  # fmt: skip


def kind_of(given: Any) -> Any:
    """The section with `kind` filled in from the source it names."""
    if isinstance(given, dict) and "kind" not in given:
        named = [source for source in SOURCES if given.get(source) is not None]
        return {**given, "kind": named[0]} if named else given
    return given


def problems(model: ModelSpec) -> Iterator[str]:
    for source, example in SOURCES.items():
        if (model.kind == source) != (getattr(model, source) is not None):
            yield f"model.{source} names your own model, such as {example}; it needs no kind"
    if model.module is not None and not all(model.module.rpartition(":")[::2]):
        yield f"model.module={model.module!r} names no class; write {SOURCES['module']}"
    yield from _idle(model)
    if model.kind == "xgboost":
        for name in sorted(model.options.keys() - TREE_OPTIONS):
            yield f"model.options.{name}: no setting of XGBoost's trees{nearest(name, TREE_OPTIONS)}"
    if model.classes is not None and model.task != "multiclass":
        yield "model.classes are the names of a multiclass model's answers; say task: multiclass too"
    if model.kind == "ft_transformer" and model.embedding != "auto" and model.embedding % model.heads:
        yield (
            f"model.embedding={model.embedding} does not divide over model.heads={model.heads}; "
            f"nearest that does: {max(model.embedding // model.heads, 1) * model.heads}"
        )


def _idle(model: ModelSpec) -> Iterator[str]:
    """Settings that this kind of model never looks at."""
    ours = model.kind in ("mlp", "dcn", "ft_transformer")
    only = {**_ONLY_FOR, **({} if ours else dict.fromkeys(_OF_NETWORKS, ()))}
    for name, kinds in only.items():
        field = type(model).model_fields[name]
        if model.kind not in kinds and getattr(model, name) != field.get_default(call_default_factory=True):
            yield f"model.{name} means nothing to {model.kind}; take it out" + (
                f", or use it with {', '.join(kinds)}" if kinds else ""
            )
