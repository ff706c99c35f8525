"""The section `model`: which model is trained."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, JsonValue, model_validator

from serin.spec import model_sources
from serin.spec.section import Section


class ModelSpec(Section):
    """A built-in model, chosen by `kind`; or your own, given by `module`, `script` or `onnx`, which set `kind`."""

    kind: Literal["mlp", "dcn", "ft_transformer", "xgboost", "module", "script", "onnx"] = "mlp"
    """The model: `mlp` (a multi-layer perceptron), `dcn` (Deep & Cross Network v2), `ft_transformer`, `xgboost`
    (gradient-boosted trees), or your own: `module`, `script` or `onnx`. Leave it out for your own model."""
    hidden: tuple[int, ...] = Field(default=(256, 128), min_length=1)
    """The widths of the hidden layers (mlp, dcn)."""
    embedding: int | Literal["auto"] = "auto"
    """The width of each category's embedding vector. `auto` chooses 4 to 32 by the largest vocabulary, and 64 for
    ft_transformer."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """The probability with which a unit is dropped in training (mlp, dcn, ft_transformer)."""
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
    """What a script or an ONNX file without a `data` section predicts. With `data`, `data.target.task` says it."""
    classes: tuple[str, ...] | None = None
    """The names of a multiclass model's labels, in order (only without a `data` section)."""
    golden: str | None = None
    """For an ONNX file without a `data` section: an .npz file with request rows to validate the model with, and the
    expected answers where they are known."""

    @model_validator(mode="before")
    @classmethod
    def _a_source_is_a_kind(cls, given: Any) -> Any:
        return model_sources.kind_of(given)

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if found := list(model_sources.problems(self)):
            raise ValueError("; ".join(found))
        return self
