"""Everything that a stage's result may depend on, changed one by one, and the stages whose keys then change."""

import functools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel

import serin
from serin.etl.identity import dataset_key
from serin.formats.dataset import SourceFile
from serin.formats.trained import RECORD
from serin.pipeline.export import export_parts
from serin.spec.environment import EnvironmentSpec
from serin.spec.features import FeatureSpec
from serin.spec.load import load_spec
from serin.spec.parsed_code import Package, Reached
from serin.spec.pipeline import PipelineSpec
from serin.spec.relation import EventsSpec, LookupSpec
from serin.spec.steps.operators import operators
from serin.store.artifacts import Checkpoint, Dataset
from serin.store.stage_keys import STAGES
from serin.training.launch.run_dir import training_parts

ALL = frozenset(STAGES)
PACKAGE = Path(serin.__path__[0]).resolve()
FILES = (SourceFile(table="trips", path="/trips.parquet", size=1, modified="0", content="sha256:0"),)

_EFFECTS = """
export: name
all: data.tables data.joins.table data.joins.on data.joins.as_of.column data.joins.as_of.there
all: data.joins.as_of.within data.joins.as_of.strict data.joins.how data.joins.columns data.joins.source
all: data.derived data.where data.unique.by data.unique.keep data.windows.by data.windows.rows
all: data.windows.span data.windows.delay data.windows.make data.windows.source data.target.expressions
all: data.target.expression data.target.task data.time data.id data.split.train data.split.valid
all: data.split.test data.split.kind data.split.group data.split.gap data.checks.column data.checks.type
all: data.checks.min data.checks.max data.checks.max_nulls data.checks.unique data.checks.values
all: data.checks.newest_within data.checks.min_rows data.checks.max_rows data.checks.max_row_change
all: data.checks.max_null_change data.checks.max_shift data.checks.otherwise data.training_only
all: data.allow_leaks data.rename data.target.known_at_serving features.columns features.steps
train export: model.kind model.hidden model.embedding model.dropout model.ensemble_size model.cross_layers
train export: model.numeric_scaling model.numeric_embedding model.members
train export: model.auto.trials model.auto.budget model.auto.folds model.auto.ensemble
train export: model.blocks model.heads model.rounds model.module model.script model.onnx model.options
train export: model.answer model.task model.classes model.golden training.epochs training.batch_rows
train export: training.optimizer training.learning_rate training.schedule training.weight_decay
train export: training.clip_norm training.gradient_accumulation training.class_weights training.patience
train export: training.embedding_updates training.seed training.precision training.execution
train export: training.prune.share training.prune.epochs
all: data.events.id data.events.arrival data.events.max_late data.events.max_future data.events.unavailable
export: data.joins.lookup.max_age data.joins.lookup.max_row_change
export: etl.engine etl.workers training.processes training.strategy training.gradient_checkpointing
export: training.checkpoint_every_steps training.processes_per_gpu
export: export.variants export.tolerance export.variant_tolerance export.target export.batch_mix
export: export.groups.metric export.groups.max_gap export.groups.max_rate_gap export.groups.threshold
export: export.groups.confidence export.groups.min_rows
export: export.segments export.budget.metric export.budget.max_drop export.budget.segment_max_drop
export: champion.metric champion.max_loss champion.confidence champion.max_rows
export: objectives.availability objectives.latency_ms objectives.latency_share
export: serving.max_batch_rows serving.request_timeout serving.backend serving.device
export: serving.accelerator serving.gpus serving.gpu_memory serving.instances serving.threads
export: serving.queue_delay serving.max_string serving.replicas.min serving.replicas.max
export: serving.rate_limit serving.rate_burst
export: rollout.steps rollout.approve rollout.step_time rollout.min_requests rollout.false_rollback
export: rollout.false_promotion rollout.latency.quantiles rollout.latency.margin
export: rollout.latency.bad_margin rollout.error_tolerance
export: rollout.bake rollout.deadline rollout.mode rollout.baseline
export: rollout.latency.tolerance_ms rollout.second_opinion rollout.warmup rollout.shadow.rows
export: rollout.shadow.time rollout.shadow.share rollout.shadow.max_difference
export: monitoring.retrain monitoring.retrain_budget.cool_down monitoring.retrain_budget.per_week
export: monitoring.capture.share monitoring.capture.mask monitoring.capture.drop monitoring.capture.keep
export: monitoring.capture.max_size monitoring.drift.false_alarms monitoring.drift.tolerance
export: monitoring.drift.columns monitoring.drift.block monitoring.quality.margin monitoring.quality.false_alarms
export: monitoring.quality.rollback monitoring.rollback_on_burn
export: environment.requirements environment.lock environment.image
none: search.space.uniform search.space.log search.space.integer search.space.choice search.trials
none: search.sampler search.pruner search.budget search.folds search.parallel search.seed
none: priority
"""
EFFECTS: Mapping[str, frozenset[str]] = {
    key: ALL if stages == "all" else frozenset(stages.split()) & ALL
    for stages, _, keys in (line.partition(":") for line in _EFFECTS.strip().splitlines())
    for key in keys.split()
}
"""The stages whose result each key of the spec may change. A key that is missing here fails the test.

Where and over how many processes something is computed decides no result, but a version holds its whole spec, by which
it is rolled out, watched and trained again. Of a process that is in an environment, stages that run a user's code
count it too (test_packages.py). Only `serin search` reads its own section, and never from a version. `priority` orders
the queue for GPUs.
"""

NOT_DECIDING: Mapping[str, str] = {
    "dask": "places work", "dask_cuda": "places work", "distributed": "places work", "psutil": "reads memory sizes",
    "rmm": "gives memory", "fsspec": "brings bytes", "botocore": "brings bytes", "obstore": "brings bytes",
    "blake3": "digests", "cryptography": "signs", "pydantic": "reads specs", "pydantic_core": "reads specs",
    "packaging": "reads specs", "yaml": "reads specs",
    "ruamel": "writes a search's spec", "google": "protobuf, for ONNX",
    "mlflow": "is told metrics",
    "optuna": "searches settings, which are in the key", "cupyx": "is cupy",
    "deltalake": "lists files, which are in the key", "lmdb": "stores events of served windows",
    "redis": "stores events of served windows",
    "tritonclient": "configurations of imported repositories", "pylibcudf": "is cudf", "numba": "is cudf's",
}  # fmt: skip
"""Libraries that a stage imports and that decide none of its numbers."""
NOT_IN: Mapping[str, frozenset[str]] = {
    "etl": frozenset({"onnx", "safetensors", "torch"}),  # for export, in the same modules
    # cupy brings shards; formats of requests, search's tables; a model that is taken over is measured on the CPU
    "train": frozenset({"cupy", "pandas", "pyarrow"}),
    "export": frozenset({"cudf", "cupy"}),  # test rows are read by the process engine
}


def whole_spec() -> PipelineSpec:
    """A spec with one of everything that has keys of its own."""
    spec = load_spec(
        {
            "name": "trips",
            "data": {
                "tables": {"trips": "/trips.parquet", "rates": "/rates.parquet"},
                "joins": [{"with": "rates", "on": "zone", "as_of": {"column": "start", "there": "since"},
                           "columns": ["rate"], "source": "request"}],
                "derived": {"double": "fare * 2", "half": "fare / 2"},
                "unique": {"by": ["trip"]},
                "windows": [{"by": "taxi", "rows": 3, "make": {"earlier": "mean(fare)"}}],
                "target": {"expression": "tip > 2", "task": "binary"},
                "time": "start",
                "checks": [{"column": "fare", "min": 0}],
            },
            "features": [{"columns": ["fare"], "steps": ["normalize"]}],
            "training": {"prune": {"share": 0.5}},
            "serving": {"replicas": {"max": 3}},
            "monitoring": {"capture": {"share": 0.1}, "drift": {"tolerance": 0.05}, "quality": {"margin": 0.01}},
            "search": {"space": {"training.learning_rate": {"log": [0.001, 0.1]}}},
        }
    )  # fmt: skip
    join = spec.data.joins[0].model_copy(update={"lookup": LookupSpec(max_age=86_400.0)})
    data = spec.data.model_copy(update={"joins": (join,), "events": EventsSpec(id="trip")})
    environment = EnvironmentSpec(requirements=("lightgbm==4.6.0",))
    return spec.model_copy(update={"data": data, "environment": environment})


def stage_keys_of(spec: PipelineSpec, folder: Path) -> dict[str, str]:
    """A stage that has another key gives another result to the next one."""
    etl = dataset_key(spec.data, spec.features, FILES).digest
    dataset = Dataset(path=f"/datasets/{etl}", digest=etl, rows={})
    train = training_parts(spec.model, spec.training, dataset).digest
    (folder / RECORD).write_text(json.dumps({"model": {}, "weights_sha256": train}))
    export = export_parts(spec, Checkpoint(path=str(folder), step=1, metrics={}), dataset).digest
    return {"etl": etl, "train": train, "export": export}


def changed_stages(one: PipelineSpec, other: PipelineSpec, folder: Path) -> frozenset[str]:
    before, after = stage_keys_of(one, folder), stage_keys_of(other, folder)
    return frozenset(stage for stage in STAGES if before[stage] != after[stage])


def leaves(model: type[BaseModel], before: str = "") -> Iterator[str]:
    """Every key of the spec that holds a value, without positions in lists."""
    for name, field in model.model_fields.items():
        inner = None if name in ("steps", "tables") else _section(field.annotation)
        yield from [f"{before}{name}"] if inner is None else leaves(inner, f"{before}{name}.")


def with_change(section: Any, path: str) -> Any:
    """The section with another value at `path`, as no validator has seen it: keys are made of what a section says."""
    name, _, rest = path.partition(".")
    value = getattr(section, name)
    if not rest:
        return section.model_copy(update={name: _other(value, type(section).model_fields[name].annotation)})
    if isinstance(value, tuple):
        return section.model_copy(update={name: (with_change(value[0], rest), *value[1:])})
    if isinstance(value, Mapping):
        inner = {key: with_change(each, rest) for key, each in value.items()}
        return section.model_copy(update={name: inner})
    return section.model_copy(update={name: with_change(value, rest)})


def spec_changes() -> Iterator[tuple[str, PipelineSpec]]:
    """Every key of the spec with another value, and every argument of every step."""
    spec = whole_spec()
    for path in leaves(PipelineSpec):
        yield path, with_change(spec, path)
    for name, kind in operators().items():
        feature = FeatureSpec.model_construct(columns=("fare",), steps=(kind.model_construct(),))
        bare = spec.model_copy(update={"features": (feature,)})
        for argument, field in kind.model_fields.items():
            value = _other(field.default, field.annotation)
            step = kind.model_construct(**{argument: value})
            changed = feature.model_copy(update={"steps": (step,)})
            yield f"features.steps.{name}.{argument}", spec.model_copy(update={"features": (changed,)})
        yield f"features.steps.{name}", bare


@functools.cache
def computed_by(stage: str) -> Reached:
    """Serin's code that computes a stage's result."""
    return Package(PACKAGE).reach(STAGES[stage].computed_by)


def _section(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for each in get_args(annotation) if (found := _section(each))), None)


def _other(value: Any, annotation: Any) -> Any:
    """Another value that is written like one of this type."""
    choices = [choice for kind in (annotation, *get_args(annotation)) if get_origin(kind) is Literal
               for choice in get_args(kind)]  # fmt: skip
    if choices and (value is None or isinstance(value, str)):
        return next((choice for choice in choices if choice != value), 7)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, str):
        return f"{value}x"
    if isinstance(value, Mapping):
        return {**value, next(iter(value), "x"): "other"}
    if isinstance(value, tuple):
        return (*value, value[0]) if value else ("x",)
    text = str(annotation)  # nothing is given: the first kind that could be
    if "tuple[" in text or "dict[" in text:
        return {"x": "y"} if text.find("dict[") in range(text.find("tuple[") % 1000) else ("x",)
    return 1 if "int" in text else 1.5 if "float" in text else "x"
