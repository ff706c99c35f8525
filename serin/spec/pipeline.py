"""PipelineSpec: everything about one pipeline, as one frozen value. YAML is its serialisation (load.py)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Annotated, Any, Self

import yaml
from pydantic import (
    BeforeValidator,
    Field,
    WrapSerializer,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from serin.errors import NameInvalid, nearest
from serin.spec.data import DataSpec, is_reserved, why_unknown
from serin.spec.environment import EnvironmentSpec
from serin.spec.etl import EtlSpec
from serin.spec.export import ChampionSpec, ExportSpec
from serin.spec.features import FeatureSpec
from serin.spec.kind_settings import kinds_of, unused_settings
from serin.spec.model import ModelSpec
from serin.spec.monitoring import MonitoringSpec
from serin.spec.names import Priority, valid_model_name
from serin.spec.objectives import ObjectivesSpec
from serin.spec.rollout import RolloutSpec
from serin.spec.search import SearchSpec, fold_splits
from serin.spec.section import Section, is_empty
from serin.spec.serving import ServingSpec
from serin.spec.target import TargetSpec
from serin.spec.training import TrainingSpec

NO_DATA = DataSpec.model_construct(
    tables={}, target=TargetSpec.model_construct(expression="", task="regression")
)
"""The section of a pipeline without tables, whose model defines its own inputs. In YAML the section is left out."""


MaybeData = Annotated[
    DataSpec,
    BeforeValidator(
        lambda given: NO_DATA if given is None else given, json_schema_input_type=DataSpec | None
    ),
    WrapSerializer(lambda data, written: written(data) if data.tables else None),
]


class PipelineSpec(Section):
    """Everything about one pipeline, from its tables to the rollout of its model."""

    name: str
    """The name of the pipeline and of the served model: lower-case letters, digits and `-`."""
    data: MaybeData = Field(default=NO_DATA, json_schema_extra={"default": None})
    """The tables and the target. Only a script or an ONNX file that defines its own inputs does without."""
    features: tuple[FeatureSpec, ...] = ()
    """The features that the model learns from."""
    etl: EtlSpec = EtlSpec()
    """How the dataset is computed."""
    model: ModelSpec = ModelSpec()
    """Which model is trained."""
    training: TrainingSpec = TrainingSpec()
    """How the model is trained."""
    search: SearchSpec | None = None
    """Which settings `serin search` tries."""
    export: ExportSpec = ExportSpec()
    """How the trained model becomes a published version."""
    champion: ChampionSpec = ChampionSpec()
    """When a new version may replace the live one."""
    objectives: ObjectivesSpec = ObjectivesSpec()
    """What is promised to clients."""
    serving: ServingSpec = ServingSpec()
    """How a version is served."""
    rollout: RolloutSpec = RolloutSpec()
    """How a new version takes over the traffic."""
    monitoring: MonitoringSpec = MonitoringSpec()
    """What happens once a version is live."""
    priority: Priority = Field(default="normal", exclude_if=lambda priority: priority == "normal")
    """The place of its stages among those that wait for GPUs. `idle` trainings save and give way to `urgent` work."""
    environment: EnvironmentSpec | None = Field(default=None, exclude_if=is_empty)
    """Packages that your own code imports and the workers lack."""

    @field_validator("name")
    @classmethod
    def _usable_as_a_model_name(cls, name: str) -> str:
        try:
            return valid_model_name(name)
        except NameInvalid as error:
            raise ValueError(str(error)) from error

    @model_validator(mode="before")
    @classmethod
    def _has_no_tables_elsewhere(cls, given: Any) -> Any:
        """The spec of a server elsewhere may have a target alone."""
        data = given.get("data") if isinstance(given, dict) else None
        if not isinstance(data, dict) or (given.get("model") or {}).get("kind") != "server":
            return given
        return {
            **given,
            "data": DataSpec.model_construct(tables={}, target=TargetSpec.model_validate(data.get("target"))),
        }

    @model_validator(mode="after")
    def _sections_fit_together(self) -> Self:
        found = [*self._source_problems()]
        if not self.served_elsewhere:  # else once its server has described its model (spec.elsewhere)
            found += self._section_problems()
        if found:
            raise PydanticCustomError(
                "inconsistent",
                "{text}",
                {"problems": found, "text": "; ".join(f"{key}: {text}" for key, text in found)},
            )
        return self

    def _section_problems(self) -> Iterator[tuple[str, str]]:
        requests = self._request_columns() if self.has_data else ()
        if self.rollout.has_shadow:
            problem = self.monitoring.capture.not_replayable(requests if self.has_data else None)
            if problem:
                yield "rollout.steps", f"shadow replays recorded requests, but {problem}"
        if self.has_data:
            yield from (*self.data.problems(), *self.feature_problems())
            yield from (*self._segment_problems(), *self._search_problems())
            yield from self.monitoring.capture.problems(requests)
        elif self.search is not None:
            yield "search", "needs data; a model that defines its own inputs is trained as its script says"
        yield from self.monitoring.quality_problems(has_data=self.has_data)
        yield from self.monitoring.drift_problems(requests, has_time=self.data.time is not None)

    def _source_problems(self) -> Iterator[tuple[str, str]]:
        """A model is given the features of the data, or defines its own inputs: exactly one of the two."""
        model = self.model
        yield from unused_settings(model, self.training, self.kinds)
        if self.training.prune is not None and model.ensemble_size > 1:
            problem = f"cuts one network, not model.ensemble_size={model.ensemble_size}; take one of them out"
            yield "training.prune", problem
        if self.served_elsewhere:
            return
        if self.has_data:
            yield from self._several_targets_problems()
            if not self.features:
                yield "features", "is missing; name the columns that the model learns from"
            if model.task is not None:
                yield "model.task", "data.target says it already; take it out"
            return
        if model.kind not in ("script", "onnx"):
            sources = "model: {script: ...} or {onnx: ...}"
            yield "data", f"is missing; add it, or bring a model that defines its own inputs: {sources}"
        elif model.task is None:
            problem = "is missing; without data nothing else says it: binary, multiclass or regression"
            yield "model.task", problem
        if self.features:
            yield "features", "are made of data, which is missing; take them out or add data"
        if model.kind == "onnx" and model.golden is None:
            yield "model.golden", "is missing; without data an ONNX file needs rows (.npz) to be proven with"

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kind of the model, and those that a search tries."""
        tried = self.search.space.get("model.kind") if self.search is not None else None
        return kinds_of(self.model, (tried.choice or ()) if tried is not None else ())

    def _several_targets_problems(self) -> Iterator[tuple[str, str]]:
        if not self.data.target.names:
            return
        if self.training.class_weights is not None:
            yield "training.class_weights", "are of one target's classes; data.target.expressions has several"
        for index, feature in enumerate(self.features):
            if any(step.name == "target_encode" for step in feature.steps):
                problem = "target_encode needs one target; data.target.expressions has several"
                yield f"features[{index}].steps", problem

    @property
    def has_data(self) -> bool:
        """Whether there is a dataset. Without one, the model defines its own inputs."""
        return bool(self.data.tables)

    @property
    def has_target(self) -> bool:
        """Whether it is known what a label means."""
        return bool(self.data.target.expression)

    @property
    def served_elsewhere(self) -> bool:
        """Whether it is of a server that Serin does not run. Nothing is trained or exported then."""
        return self.model.kind == "server"

    def feature_problems(self) -> Iterator[tuple[str, str]]:
        """Columns that no feature may use, and features that are made twice, as (key, problem and how to fix it)."""
        made: dict[tuple[str, str], int] = {}
        for index, feature in enumerate(self.features):
            key = f"features[{index}].columns"
            for column in feature.inputs:
                if self.data.source_of(column) == "training_only":
                    yield key, why_unknown(self.data, column)
                for name in self.data.request_columns(column):
                    if is_reserved(name):
                        yield key, f"no request column may be called {name!r}: {self._rename_hint(name)}"
            for makes, name in (output for column in feature.columns for output in feature.outputs(column)):
                earlier = made.setdefault((makes, name), index)
                if earlier != index:
                    yield key, f"{name!r} is {makes} in features[{earlier}] already; drop one"

    def _rename_hint(self, name: str) -> str:
        """How a column gets another name, by what makes it."""
        for index, join in enumerate(self.data.joins):
            for there, here in join.columns.items():
                if here == name:
                    return f"rename it in data.joins[{index}].columns: {{{there}: {join.table}_{there}}}"
        if any(name in window.make for window in self.data.windows):
            return "give it another name in data.windows"
        if new := self.data.rename.get(self.data.main, {}).get(name):
            return f"data.rename calls it {new!r}; use that name"
        return f"add data.rename: {{{self.data.main}: {{{name}: input_{name}}}}} and use the new name here"

    def _request_columns(self) -> set[str]:
        inputs = (column for feature in self.features for column in feature.inputs)
        return {name for column in inputs for name in self.data.request_columns(column)}

    def _segment_problems(self) -> Iterator[tuple[str, str]]:
        asked = self._request_columns()
        for segment in self.export.segments:
            if segment not in asked:
                yield "export.segments", f"{segment!r} is not a column of a request{nearest(segment, asked)}"
        groups = self.export.groups
        if groups.max_gap is not None or groups.max_rate_gap is not None:
            if not self.export.segments:
                yield "export.groups", "has limits, but export.segments names no columns to group by"
            if groups.max_rate_gap is not None and self.data.target.task != "binary":
                yield "export.groups.max_rate_gap", "is for binary targets, where a score selects a row"

    def _search_problems(self) -> Iterator[tuple[str, str]]:
        if self.search is None:
            return
        yield from self.search.problems(self.model, self.training, self.kinds)
        if self.search.folds > 1:
            if self.data.split_kind != "temporal":
                yield "search.folds", "are blocks of time: they need a split by time (data.time)"
                return
            try:
                fold_splits(self.data.split, self.search.folds)
            except ValueError as error:
                yield "search.folds", str(error)

    def fold_data(self) -> tuple[DataSpec, ...]:
        """The data sections a search trains on: the spec's own, and the same split moved into the past."""
        folds = 1 if self.search is None else self.search.folds
        splits = fold_splits(self.data.split, folds)
        return tuple(self.data.model_copy(update={"split": split}) for split in splits)

    def digest(self) -> str:
        """sha256 of the spec's values, independent of the layout of its file."""
        text = json.dumps(self.model_dump(mode="json", by_alias=True), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def to_yaml(self) -> str:
        return yaml.safe_dump(
            self.model_dump(mode="json", by_alias=True), sort_keys=False, allow_unicode=True
        )
