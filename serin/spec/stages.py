"""The sections after the data: how to run ETL, the network, its training, export, serving, rollout, watch."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Literal, Self

from pydantic import Field, JsonValue, field_validator, model_validator

from serin.spec import doors
from serin.spec.section import Duration, Section

Strategy = Literal["ddp", "fsdp", "tensor", "pipeline"]


class EtlSpec(Section):
    """How the dataset is computed. Never changes what is computed."""

    engine: str = "auto"  # auto | process | dask | cuda | dask-cuda | the address of a Dask scheduler
    workers: int | Literal["auto"] = "auto"

    @field_validator("engine")
    @classmethod
    def _known(cls, engine: str) -> str:
        if engine not in ("auto", "process", "dask", "cuda", "dask-cuda") and "://" not in engine:
            raise ValueError(
                f"{engine!r} is no engine; use auto, process, dask, cuda, dask-cuda or a scheduler's address "
                "(tcp://host:port)"
            )
        return engine


class ModelSpec(Section):
    """A model of ours by its kind, or a door for one's own: module, script or onnx, which need no kind."""

    kind: Literal["mlp", "dcn", "ft_transformer", "xgboost", "module", "script", "onnx"] = "mlp"
    hidden: tuple[int, ...] = Field(default=(256, 128), min_length=1)
    embedding: int | Literal["auto"] = "auto"  # numbers per category; auto: by the size of the vocabulary
    dropout: float = Field(default=0.0, ge=0, lt=1)
    members: int = Field(default=1, ge=1, le=64)  # networks that learn side by side and answer by their mean
    cross_layers: int = Field(default=3, ge=1)  # dcn
    blocks: int = Field(default=3, ge=1)  # ft_transformer
    heads: int = Field(default=8, ge=1)  # ft_transformer
    rounds: int = Field(default=500, ge=1)  # xgboost: at most so many, fewer when the valid rows say so
    module: str | None = None  # pkg.mod:Net, or net.py:Net beside the spec
    script: str | None = None  # a program that trains, beside the spec
    onnx: str | None = None  # a file that was trained elsewhere, beside the spec
    options: dict[str, JsonValue] = Field(default_factory=dict)  # for module, script, XGBoost's own settings
    answer: Literal["logits", "probabilities"] = "logits"  # what script's or onnx's graph gives
    # Without a data section a script or an ONNX file has inputs of its own, and must say what it answers:
    task: Literal["binary", "multiclass", "regression"] | None = None
    classes: tuple[str, ...] | None = None  # the meaning of a multiclass model's labels, in order
    golden: str | None = None  # onnx: rows (.npz) to prove it with, with its answers where they are known

    @model_validator(mode="before")
    @classmethod
    def _a_door_is_a_kind(cls, given: Any) -> Any:
        return doors.kind_of(given)

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if found := list(doors.problems(self)):
            raise ValueError("; ".join(found))
        return self


class PruneSpec(Section):
    """A second, smaller network beside the first: cut from it, trained on, offered to export as variant `pruned`."""

    share: float = Field(default=0.5, gt=0, lt=1)  # of the units of each hidden layer that are taken out
    epochs: int = Field(default=1, ge=1)  # that the smaller network is trained on


class TrainingSpec(Section):
    epochs: int = Field(default=5, ge=1)
    batch_rows: int | Literal["auto"] = "auto"  # per optimizer step, all processes together
    optimizer: Literal["adamw", "sgd", "adagrad"] = "adamw"
    learning_rate: float = Field(default=1e-3, gt=0)
    schedule: Literal["cosine", "constant", "plateau"] = "cosine"  # each after a warm-up
    weight_decay: float = Field(default=1e-5, ge=0)
    clip_norm: float | None = Field(default=None, gt=0)  # of all gradients together
    accumulate: int = Field(default=1, ge=1)  # parts in which the rows of a step go through the network
    class_weights: tuple[float, ...] | Literal["balanced"] | None = None
    patience: int | None = Field(default=None, ge=1)  # epochs without a better metric before it stops
    embedding_updates: Literal["auto", "dense", "rows"] = (
        "auto"  # rows: only those of the table that a step used
    )
    seed: int = 0
    processes: int | Literal["auto"] = "auto"  # one GPU each
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16"] = (
        "auto"  # auto: what the hardware has, if faster
    )
    strategy: Literal["auto"] | Strategy = "auto"  # how processes share the network
    gradient_checkpointing: bool = False  # less memory for about a third more time
    step: Literal["auto", "eager", "captured", "compiled"] = "auto"  # auto: what a short measurement says
    checkpoint_every_steps: int | Literal["auto"] = "auto"
    prune: PruneSpec | None = None  # mlp and dcn

    @model_validator(mode="after")
    def _batch_divides_over_processes(self) -> Self:
        rows, ranks = self.batch_rows, self.processes
        if isinstance(rows, int) and isinstance(ranks, int) and rows % (ranks * self.accumulate):
            parts = ranks * self.accumulate
            raise ValueError(
                f"training.batch_rows={rows} does not divide over training.processes={ranks}"
                + (f" with training.accumulate={self.accumulate}" if self.accumulate > 1 else "")
                + f"; nearest that does: {max(rows // parts, 1) * parts}"
            )
        return self

    @field_validator("batch_rows", "processes", "checkpoint_every_steps")
    @classmethod
    def _at_least_one(cls, value: int | str) -> int | str:
        if isinstance(value, int) and value < 1:
            raise ValueError(f"{value} is too small; give at least 1, or auto")
        return value

    @field_validator("class_weights")
    @classmethod
    def _weights_are_positive(cls, value: tuple[float, ...] | str | None) -> tuple[float, ...] | str | None:
        if isinstance(value, tuple) and (len(value) < 2 or min(value) <= 0):
            raise ValueError(f"{list(value)}: give one weight above 0 for each class, or balanced")
        return value


Metric = Literal["auc", "logloss", "accuracy", "rmse"]


class BudgetSpec(Section):
    """What a variant may cost in quality against fp32, on the test split. For rmse: as a share of it."""

    metric: Metric | None = None  # None: the task's own (auc, accuracy, rmse)
    max_drop: float = Field(default=0.002, ge=0)
    segment_max_drop: float = Field(default=0.01, ge=0)  # ... in each segment


class ExportSpec(Section):
    """`segments`: request columns; how good a model is, is also asked for each of their values by itself."""

    variants: tuple[
        Literal["fp32", "fp16", "int8", "int8_dynamic", "small_tables", "pruned", "tensorrt"], ...
    ] = Field(default=("fp32",), min_length=1)
    tolerance: float = Field(default=1e-4, gt=0)  # largest allowed difference of a score from the trainer's
    variant_tolerance: float = Field(
        default=0.05, gt=0
    )  # ... of a variant's from fp32's; a regression's in standard deviations of its scores
    target: Literal["auto", "cpu", "gpu"] = "auto"  # auto: a GPU when the exporting machine has one
    batch_mix: dict[int, float] = Field(
        default={1: 0.5, 8: 0.3, 64: 0.2}, min_length=1
    )  # rows in a request: share of the requests
    segments: tuple[str, ...] = ()
    budget: BudgetSpec = BudgetSpec()

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
                f"{mix}: rows are at least 1, shares lie above 0 and add up to 1, as in {{1: 0.8, 64: 0.2}}"
            )
        return mix


class ChampionSpec(Section):
    """When a retrained model may take the live one's place: unless it is worse by more than `max_loss`, and that is
    sure at `confidence`. For rmse: as a share of it."""

    metric: Metric | None = None  # None: the task's own (auc, accuracy, rmse)
    max_loss: float = Field(default=0.0, ge=0)
    confidence: float = Field(default=0.95, gt=0.5, lt=1)
    max_rows: int = Field(default=100_000, ge=100)  # the newest of the test split


class ServingSpec(Section):
    p99_ms: float = Field(default=50.0, gt=0)
    max_batch_rows: int = Field(default=1024, ge=1)
    request_timeout: Duration = Field(default=5.0, gt=0)
    shape: Literal[
        "auto", "onnx_native", "onnx_python", "onnxruntime", "ensemble", "tensorrt_plan", "fil"
    ] = "auto"  # what in Triton runs the model; auto: the best that the server has (docs/how-to/serve.md)
    device: Literal["auto", "cpu", "gpu"] = (
        "auto"  # auto: a GPU for what was exported for one, if one is here
    )
    accelerator: Literal["cuda", "tensorrt"] = "cuda"  # inside ONNX Runtime on a GPU
    gpus: int = Field(default=1, ge=1)  # that one release is spread over
    gpu_memory_mb: int | None = Field(default=None, ge=1)  # on each; None: estimated from the bundle
    instances: int = Field(default=1, ge=1)  # that score at the same time, on the CPU or on each GPU
    threads: int | None = Field(default=None, ge=1)  # for one run on the CPU; None: as the export measured
    queue_delay_us: int = Field(default=0, ge=0)  # how long a request may wait for company
    max_string_bytes: int = Field(default=65_536, ge=1)  # of one text in a request

    @model_validator(mode="after")
    def _asks_for_a_gpu_where_it_needs_one(self) -> Self:
        wants = "shape=tensorrt_plan" if self.shape == "tensorrt_plan" else f"gpus={self.gpus}"
        if self.device == "cpu" and (self.shape == "tensorrt_plan" or self.gpus > 1):
            raise ValueError(f"device=cpu does not go with {wants}; leave one of them out")
        return self


class LatencySpec(Section):
    """When a candidate is slower than it may be: beyond the margin at one of the quantiles."""

    quantiles: tuple[float, ...] = Field(default=(0.5, 0.95, 0.99), min_length=1)
    margin: float = Field(default=0.10, ge=0)  # a candidate so much slower is still welcome
    bad_margin: float | None = (
        None  # promotion needs proof that it is not so much slower; None: twice the margin
    )
    # A candidate slower by no more than this is not slower, whatever the margin; None: 2% of serving.p99_ms, 0: off.
    # Promotion needs proof of twice this, or of bad_margin where that is more.
    tolerance_ms: float | None = Field(default=None, ge=0)

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
    # The candidate's first seconds with traffic, in which latencies are not compared: its caches are cold.
    warmup: Duration = Field(default=10.0, ge=0)
    bake: Duration = Field(default=600.0, ge=0)
    deadline: Duration = Field(default=3600.0, gt=0)  # a step that has not passed by then holds
    mode: Literal["enforce", "hold", "observe"] = "enforce"
    # Before a rollback for latency alone, while every promise is kept: start the candidate again and judge it again.
    # For machines on which a process may be slow for minutes by chance. It doubles the time to a rollback.
    second_opinion: bool = False
    # Below 50: hold the candidate against a second process of the live version, with the candidate's share and so its
    # load; else against as many of the live version's requests, drawn by lot.
    baseline: bool = False

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

    @model_validator(mode="after")
    def _has_use_for_a_baseline(self) -> Self:
        if self.baseline and self.steps[0] >= 50:
            raise ValueError(
                f"baseline: no step of {list(self.steps)} is below 50, and from there on the live version is the "
                "candidate's equal; begin with a smaller step, or leave baseline out"
            )
        return self


class MonitoringSpec(Section):
    every: Duration = Field(default=300.0, gt=0)
    # When the live version is trained again from its own spec: every night, when its tables changed (`watch` looks),
    # when somebody sends the event serin.drift. What comes out is rolled out unless it is worse.
    retrain: tuple[Literal["nightly", "data", "drift"], ...] = ()
