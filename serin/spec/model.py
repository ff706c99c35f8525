"""The section `model`: which model is trained."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, JsonValue, model_validator

from serin.errors import nearest
from serin.spec.section import Duration, Section

KINDS = Literal[
    "mlp", "dcn", "ft_transformer", "tabm", "xgboost", "auto", "module", "script", "onnx", "server"
]
SOURCES: Mapping[str, str] = {
    "module": "pkg.mod:Net or net.py:Net",
    "script": "train.py",
    "onnx": "model.onnx",
}
"""The keys that name your own model, each with an example. The key is the model's kind too."""

# XGBoost's own names. It would only warn about a misspelt one in a log.
TREE_OPTIONS = frozenset(
    {
        "alpha", "colsample_bylevel", "colsample_bynode", "colsample_bytree", "eta", "gamma", "grow_policy", "lambda",
        "max_bin", "max_cat_threshold", "max_cat_to_onehot", "max_delta_step", "max_depth", "max_leaves",
        "min_child_weight", "num_parallel_tree", "sampling_method", "scale_pos_weight", "subsample",
    }
)  # fmt: skip


class AutoSpec(Section):
    """How `model.kind: auto` looks for a model."""

    trials: int = Field(default=6, ge=1)
    """The largest number of candidates that are trained: trees and networks of several kinds."""
    budget: Duration = Field(default=1800.0, gt=0)
    """No candidate begins that would end later than this if it took as long as the longest before it. Where the chosen
    ones are trained again on the train and valid rows, that time is set aside too."""
    folds: int = Field(default=5, ge=1, le=20)
    """The number of folds of the train and valid rows on which each candidate is trained, where rows are split at
    random and are few. Its models answer together. 1: the valid rows decide, as with a split by time or group."""
    ensemble: bool = True
    """Whether the answer may be a weighted mean of up to four candidates. Off: the best one alone, trained on the
    train and valid rows."""


class ModelSpec(Section):
    """A built-in model, chosen by `kind`; or your own, given by `module`, `script` or `onnx`, which set `kind`."""

    kind: KINDS = "mlp"
    """The model: `mlp` (a multi-layer perceptron), `dcn` (Deep & Cross Network v2), `ft_transformer`, `tabm`
    (an ensemble of perceptrons that share their matrices), `xgboost` (gradient-boosted trees), `auto` (tries
    several and keeps the best), or your own: `module`, `script` or `onnx`. Leave it out for your own model. Versions
    that are served elsewhere have `server`."""
    hidden: tuple[int, ...] = Field(default=(256, 128), min_length=1)
    """The widths of the hidden layers (mlp, dcn, tabm)."""
    embedding: int | Literal["auto"] = "auto"
    """The width of each category's embedding vector. `auto` chooses 4 to 32 by the largest vocabulary, and 64 for
    ft_transformer."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """The probability with which a unit is dropped in training (mlp, dcn, ft_transformer, tabm)."""
    numeric_scaling: Literal["none", "robust"] = Field(
        default="none", exclude_if=lambda value: value == "none"
    )
    """What the network does with numbers first. `robust` subtracts the median, divides by the distance of the
    quartiles, and clips smoothly, so that outliers do no harm. The statistics are those of the train rows."""
    numeric_embedding: Literal["none", "periodic", "piecewise_linear"] = Field(
        default="none", exclude_if=lambda value: value == "none"
    )
    """How the network sees each numeric column (mlp, dcn, tabm): as one number, as a vector of learned waves
    (`periodic`), or as a vector that is linear between quantiles of the train rows (`piecewise_linear`)."""
    members: int = Field(default=16, ge=2, le=64, exclude_if=lambda value: value == 16)
    """The number of members that share their matrices (tabm). The model answers with the mean of their
    probabilities."""
    ensemble_size: int = Field(default=1, ge=1, le=64)
    """The number of networks that are trained side by side, each from its own initial weights. The model answers with
    the mean of their logits."""
    cross_layers: int = Field(default=3, ge=1)
    """The number of cross layers (dcn)."""
    blocks: int = Field(default=3, ge=1)
    """The number of transformer blocks (ft_transformer)."""
    heads: int = Field(default=8, ge=1)
    """The number of attention heads in each block (ft_transformer). The embedding must be divisible by it."""
    rounds: int = Field(default=500, ge=1)
    """The largest number of boosting rounds (xgboost). Training stops earlier when the valid split stops improving."""
    auto: AutoSpec = Field(default=AutoSpec(), exclude_if=lambda value: value == AutoSpec())
    """How many models are tried, and for how long (auto)."""
    module: str | None = None
    """Your own torch module: `package.module:Class`, or `file.py:Class` relative to the spec."""
    script: str | None = None
    """Your own training script, relative to the spec. It writes an ONNX file."""
    onnx: str | None = None
    """An ONNX file that was trained elsewhere, relative to the spec."""
    options: dict[str, JsonValue] = Field(default_factory=dict)
    """Arguments for your own module or script, or XGBoost's own settings such as `max_depth`."""
    answer: Literal["logits", "probabilities"] = "logits"
    """What the graph of a script or an ONNX file returns."""
    task: Literal["binary", "multiclass", "regression"] | None = None
    """What a script, an ONNX file or a server elsewhere predicts that has no `data` section. With one,
    `data.target.task` says it."""
    classes: tuple[str, ...] | None = None
    """The names of a multiclass model's labels, in order (only without tables)."""
    golden: str | None = None
    """For an ONNX file without a `data` section: an .npz file with request rows to validate the model with, and the
    expected answers where they are known."""

    @property
    def needs_scaled_numbers(self) -> bool:
        """Whether it is a network that does not scale numbers itself: it learns little from large or tiny ones."""
        scales = self.numeric_scaling == "robust" or self.numeric_embedding == "piecewise_linear"
        return self.kind in ("mlp", "dcn", "ft_transformer", "tabm") and not scales

    def without_folders(self) -> Self:
        """The section with the names of its files alone: where they are decides no result, and a separate digest covers
        what they hold."""
        paths = {key: getattr(self, key) for key in (*SOURCES, "golden")}
        return self.model_copy(
            update={key: Path(path).name for key, path in paths.items() if path is not None}
        )

    def located(self, place: Callable[[str, str], str]) -> Self:
        """The section with other paths of your files. `place` makes each of its key and the path that is written."""
        changes = {
            key: place(key, path)
            for key in ("script", "onnx", "golden")
            if (path := getattr(self, key)) is not None
        }
        file, _, name = (self.module or "").rpartition(":")
        if file.endswith(".py"):  # else it is the name of a module
            changes["module"] = f"{place('module', file)}:{name}"
        return self.model_copy(update=changes)

    @model_validator(mode="before")
    @classmethod
    def _a_source_is_a_kind(cls, given: Any) -> Any:
        return with_kind(given)

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if found := list(_problems(self)):
            raise ValueError("; ".join(found))
        return self


def with_kind(given: Any) -> Any:
    """The section with `kind` filled in from the source it names."""
    if isinstance(given, dict) and "kind" not in given:
        named = [source for source in SOURCES if given.get(source) is not None]
        return {**given, "kind": named[0]} if named else given
    return given


def _problems(model: ModelSpec) -> Iterator[str]:
    """Keys that this kind of model lacks, and values that do not fit together."""
    for source, example in SOURCES.items():
        if (model.kind == source) != (getattr(model, source) is not None):
            yield f"model.{source} names your own model, such as {example}; it needs no kind"
    if model.module is not None and not all(model.module.rpartition(":")[::2]):
        yield f"model.module={model.module!r} names no class; write {SOURCES['module']}"
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
