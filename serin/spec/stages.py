"""The sections after the data: how to run ETL, the network, its training, export, serving, rollout, watch."""

from __future__ import annotations

from itertools import pairwise
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from serin.spec.section import Duration, Section


class EtlSpec(Section):
    """How the dataset is computed. Never changes what is computed."""

    engine: str = "auto"  # auto | process | dask | the address of a Dask scheduler
    workers: int | Literal["auto"] = "auto"

    @field_validator("engine")
    @classmethod
    def _known(cls, engine: str) -> str:
        if engine not in ("auto", "process", "dask") and "://" not in engine:
            raise ValueError(
                f"{engine!r} is no engine; use auto, process, dask or a scheduler's address (tcp://host:port)"
            )
        return engine


class ModelSpec(Section):
    kind: Literal["mlp"] = "mlp"
    hidden: tuple[int, ...] = Field(default=(256, 128), min_length=1)
    embedding: int | Literal["auto"] = "auto"  # numbers per category; auto: by the size of the vocabulary
    dropout: float = Field(default=0.0, ge=0, lt=1)


class TrainingSpec(Section):
    epochs: int = Field(default=5, ge=1)
    batch_rows: int | Literal["auto"] = "auto"  # per optimizer step, all processes together
    learning_rate: float = Field(default=1e-3, gt=0)
    weight_decay: float = Field(default=1e-5, ge=0)
    seed: int = 0
    processes: int | Literal["auto"] = "auto"  # one GPU each
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    strategy: Literal["auto", "ddp"] = "auto"
    checkpoint_every_steps: int | Literal["auto"] = "auto"

    @model_validator(mode="after")
    def _batch_divides_over_processes(self) -> Self:
        rows, ranks = self.batch_rows, self.processes
        if isinstance(rows, int) and isinstance(ranks, int) and rows % ranks:
            raise ValueError(
                f"training.batch_rows={rows} does not divide over training.processes={ranks}; "
                f"nearest that does: {max(rows // ranks, 1) * ranks}"
            )
        return self

    @field_validator("batch_rows", "processes", "checkpoint_every_steps")
    @classmethod
    def _at_least_one(cls, value: int | str) -> int | str:
        if isinstance(value, int) and value < 1:
            raise ValueError(f"{value} is too small; give at least 1, or auto")
        return value


class ExportSpec(Section):
    variants: tuple[Literal["fp32"], ...] = Field(default=("fp32",), min_length=1)
    tolerance: float = Field(default=1e-4, gt=0)  # largest allowed difference of a score from torch's


class ServingSpec(Section):
    p99_ms: float = Field(default=50.0, gt=0)
    max_batch_rows: int = Field(default=1024, ge=1)
    request_timeout: Duration = Field(default=5.0, gt=0)


class LatencySpec(Section):
    """When a candidate is slower than it may be: beyond the margin at one of the quantiles."""

    quantiles: tuple[float, ...] = Field(default=(0.5, 0.95, 0.99), min_length=1)
    margin: float = Field(default=0.10, ge=0)  # a candidate so much slower is still welcome
    bad_margin: float | None = (
        None  # promotion needs proof that it is not so much slower; None: twice the margin
    )

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if any(not 0 < quantile < 1 for quantile in self.quantiles):
            raise ValueError(
                f"{list(self.quantiles)}: quantiles lie between 0 and 1, such as [0.5, 0.95, 0.99]"
            )
        if self.bad_margin is not None and self.bad_margin <= self.margin:
            raise ValueError(f"bad_margin={self.bad_margin} must be larger than margin={self.margin}")
        return self


class RolloutSpec(Section):
    steps: tuple[float, ...] = (1, 5, 25, 50, 100)  # percent of traffic
    approve: tuple[float, ...] = ()  # the steps that a person must allow, such as [100]
    step_time: Duration = Field(default=30.0, ge=0)
    min_requests: int = Field(
        default=100, ge=0
    )  # judged of the candidate before a step may pass; 0: time alone
    false_rollback: float = Field(
        default=0.01, gt=0, le=0.5
    )  # chance that a candidate no worse is rolled back
    false_promotion: float = Field(
        default=0.05, gt=0, le=0.5
    )  # ... that one slower by bad_margin gets everything
    latency: LatencySpec = LatencySpec()
    error_tolerance: float = Field(
        default=1.0, ge=1
    )  # the candidate may fail so many times as often as stable
    max_error_share: float = Field(default=0.01, ge=0, le=1)  # promised to clients, whatever stable does
    max_slow_share: float = Field(default=0.05, ge=0, le=1)  # ... of requests slower than serving.p99_ms
    bake: Duration = Field(default=600.0, ge=0)
    deadline: Duration = Field(default=3600.0, gt=0)  # a step that has not passed by then holds
    mode: Literal["enforce", "hold", "observe"] = "enforce"

    @field_validator("steps")
    @classmethod
    def _rise_to_all(cls, steps: tuple[float, ...]) -> tuple[float, ...]:
        if not steps or steps[-1] != 100 or steps[0] <= 0 or any(a >= b for a, b in pairwise(steps)):
            raise ValueError(
                f"{list(steps)}: the steps must rise from above 0 to 100, such as [1, 5, 25, 50, 100]"
            )
        return steps

    @model_validator(mode="after")
    def _approves_its_own_steps(self) -> Self:
        if unknown := sorted(set(self.approve) - set(self.steps)):
            raise ValueError(f"approve names {unknown}, which are none of the steps {list(self.steps)}")
        return self


class MonitoringSpec(Section):
    every: Duration = Field(default=300.0, gt=0)
