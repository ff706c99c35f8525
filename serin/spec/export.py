"""The sections `export` and `champion`: how a trained model becomes a version, and when it may replace the live one."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from serin.spec.section import Section

Metric = Literal["auc", "logloss", "accuracy", "rmse"]
"""A measure of quality on the test split."""


class BudgetSpec(Section):
    """How much quality a variant may lose against fp32 on the test split."""

    metric: Metric | None = None
    """The metric. By default the task's own: auc, accuracy or rmse."""
    max_drop: float = Field(default=0.002, ge=0)
    """The largest allowed loss, in units of the metric; for rmse, as a share of it."""
    segment_max_drop: float = Field(default=0.01, ge=0)
    """The largest allowed loss within each of `export.segments`."""


class GroupsSpec(Section):
    """How different a version may be for one group of rows: those that share a value of a column in `export.segments`.
    A group is compared with all other test rows."""

    metric: Metric | None = None
    """The metric. By default the task's own: auc, accuracy or rmse."""
    max_gap: float | None = Field(default=None, ge=0)
    """The most by which the metric of a group may be worse than that of the other rows; for rmse, as a share of theirs.
    A version with a group that is surely worse is refused. Without it, groups are only reported."""
    max_rate_gap: float | None = Field(default=None, ge=0, le=1)
    """The most by which the selection rate of a group may differ from that of the other rows, in a binary task."""
    threshold: float = Field(default=0.5, gt=0, lt=1)
    """The score from which a row counts as selected."""
    confidence: float = Field(default=0.95, gt=0.5, lt=1)
    """How sure a gap must be before the version is refused; the error probability is shared among the groups. Bands on
    the card have it too."""
    min_rows: int = Field(default=200, ge=20)
    """The number of test rows below which a group is named, but not judged."""


class ExportSpec(Section):
    """How a trained model becomes a published version: its variants, and what they must prove."""

    variants: tuple[
        Literal["fp32", "fp16", "int8", "int8_dynamic", "int8_embeddings", "pruned", "tensorrt"],
        ...,
    ] = Field(default=("fp32",), min_length=1)
    """The variants to build and compare: `fp32` (always), `fp16`, `int8` (8-bit layers, calibrated), `int8_dynamic`
    (8-bit layers, ranges per batch), `int8_embeddings` (8-bit embedding tables), `pruned` (needs `training.prune`)
    and `tensorrt`. The fastest one that passes is served. One that cannot be built on this machine is reported."""
    tolerance: float = Field(default=1e-4, gt=0)
    """The largest allowed difference between a score of the graph and the trainer's; in a regression, in standard
    deviations of the scores, beyond what rounding explains."""
    variant_tolerance: float = Field(default=0.05, gt=0)
    """The largest allowed difference between a variant's score and fp32's; in a regression, in standard deviations of
    the scores."""
    target: Literal["auto", "cpu", "gpu"] = "auto"
    """What the version is exported for. `auto` means a GPU when the exporting machine has one."""
    batch_mix: dict[int, float] = Field(default={1: 0.5, 8: 0.3, 64: 0.2}, min_length=1)
    """The requests to measure speed with: rows in a request -> share of the requests. The shares add up to 1."""
    segments: tuple[str, ...] = ()
    """Request columns. Quality is also judged separately for each of their values."""
    groups: GroupsSpec = GroupsSpec()
    """How different a version may be for one value of a column in `segments`."""
    budget: BudgetSpec = BudgetSpec()
    """How much quality a variant may lose."""

    @field_validator("variants")
    @classmethod
    def _hold_what_the_others_are_judged_by(cls, variants: tuple[str, ...]) -> tuple[str, ...]:
        if "fp32" not in variants:
            raise ValueError(f"{list(variants)}: add fp32; the others are judged against it")
        return tuple(dict.fromkeys(variants))

    @field_validator("batch_mix")
    @classmethod
    def _shares_of_one(cls, mix: dict[int, float]) -> dict[int, float]:
        if min(mix) < 1 or min(mix.values()) <= 0 or abs(sum(mix.values()) - 1) > 1e-6:
            raise ValueError(
                f"{mix}: rows must be at least 1, shares must be above 0 and add up to 1, as in {{1: 0.8, 64: 0.2}}"
            )
        return mix


class ChampionSpec(Section):
    """When a new version may be published beside a live one: unless it is worse by more than `max_loss` on the newest
    test rows, as shown by a paired bootstrap at `confidence`."""

    metric: Metric | Literal["average_precision"] | None = None
    """The metric. By default the task's own: auc, accuracy or rmse. `average_precision` suits rare positives."""
    max_loss: float = Field(default=0.0, ge=0)
    """The largest allowed loss, in units of the metric; for rmse, as a share of it."""
    confidence: float = Field(default=0.95, gt=0.5, lt=1)
    """How sure the bootstrap must be of a larger loss before the new version is refused."""
    max_rows: int = Field(default=100_000, ge=100)
    """The number of test rows that are compared, the newest first."""
