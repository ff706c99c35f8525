"""Pipeline: the stages of one spec, for notebooks and scripts. Each call does what the command of that stage does."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import BaseModel

from serin.api.model import Checkpoint, Dataset, Model
from serin.api.progress import showing_progress
from serin.errors import SpecError
from serin.machine import environment
from serin.pipeline.stage import StageResult
from serin.spec.kind_settings import without_unused
from serin.spec.load import WrittenSpec, load_spec, spec_file
from serin.spec.pipeline import PipelineSpec
from serin.spec.yaml_file import read_yaml
from serin.store.artifacts import Release

if TYPE_CHECKING:
    import pandas as pd

    from serin.pipeline.check import CheckedSpec


class Pipeline:
    """From a table to a published model, described by one spec.

    Each stage finds what an earlier call, the `serin` command or a flow has made from the same inputs, else does the
    work. Results are kept in the store under SERIN_HOME (default: .serin in the working directory).

    Examples:
        >>> pipeline = Pipeline.draft(frame, target="hours > 30", name="late-parcels")
        >>> pipeline = pipeline.replace(model={"rounds": 200})
        >>> pipeline.spec.model.rounds
        200
    """

    def __init__(self, spec: PipelineSpec | Mapping[str, Any], *, folder: Path | None = None) -> None:
        """`folder`: where the spec's own code is, which `run` sends; None: the working directory."""
        self._spec = load_spec(spec)
        self._folder = folder or Path.cwd()
        self._commented: str | None = None

    @classmethod
    def from_yaml(cls, path: str | Path) -> Self:
        """The pipeline of a YAML file. Paths in it are relative to the file. SpecError lists every problem."""
        return cls(load_spec(path), folder=spec_file(Path(path)).absolute().parent)

    @classmethod
    def draft(
        cls,
        table: pd.DataFrame | Path | str,
        *,
        target: str | Sequence[str] | None = None,
        name: str | None = None,
    ) -> Self:
        """A first pipeline for a table: types, target and features are guessed. The comments of
        `print(pipeline.to_yaml())` explain each guess.

        `table`: a frame, or the path or URL of a Parquet, CSV, JSON lines or Arrow file. A frame is kept as Parquet
        under SERIN_HOME/tables, where the stages read it. `target`: a column or an expression over columns, such as
        "arr_delay > 15"; a list for several targets; None: guessed. `name`: of the pipeline and its model; None: the
        file's or the target's.
        """
        from serin.draft.guess import draft_table
        from serin.pipeline.frames import keep_frame

        if isinstance(table, str | Path):
            path = str(table) if "://" in str(table) else str(Path(table).expanduser().absolute())
        else:
            path, name = str(keep_frame(table)), name or _name_of(target)
        text = draft_table(path, target, name=name).text
        drafted = cls(read_yaml(text))
        drafted._commented = text
        return drafted

    @property
    def spec(self) -> PipelineSpec:
        """What the pipeline does, as one frozen value."""
        return self._spec

    @property
    def name(self) -> str:
        return self._spec.name

    def replace(self, **sections: Any) -> Self:
        """A copy with other settings: `pipeline.replace(model={"rounds": 200}, export={"variants": ["fp32"]})`.

        A mapping changes the keys that it names and keeps the others of its section; another kind of model keeps those
        that it uses. Any other value (the list of features, the name) replaces what was there. SpecError lists every
        problem.
        """
        document = self._spec.model_dump(mode="json", by_alias=True, exclude_unset=True)
        if "model" in sections:
            document["model"] = _changed(document.get("model"), sections["model"])
            document = without_unused(document)
        for section, value in sections.items():
            document[section] = _changed(document.get(section), value)
        return type(self)(document, folder=self._folder)

    def to_yaml(self, path: str | Path | None = None) -> str:
        """The spec as YAML, also written to `path` when it is given; the comments of a draft are kept until `replace`
        changes something. `serin run`, `Pipeline.from_yaml` and Prefect read it."""
        text = self._commented or self._spec.to_yaml()
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text

    def check(self) -> CheckedSpec:
        """Compares the spec with its tables; `print` shows what clients of the model will send. SpecError lists
        everything that does not fit."""
        from serin.pipeline.check import check_spec

        return check_spec(self._spec)

    def build_dataset(self, *, fresh: bool = False) -> Dataset:
        """Tables to a dataset. `fresh`: build it although it is known."""
        from serin.pipeline.run_stage import run_etl

        if not self._spec.has_data:
            problem = "is missing: this model defines its own inputs and has no dataset"
            raise SpecError(where=self.name, problems=[("data", problem)])
        with showing_progress(f"dataset of {self.name}"):
            return Dataset(run_etl(self._spec, fresh=fresh))

    def train(self, *, fresh: bool = False) -> Checkpoint:
        """A dataset to trained weights. An interrupted training resumes. `fresh`: train although weights are known."""
        from serin.pipeline.run_stage import run_train

        with showing_progress(f"training of {self.name}"):
            return Checkpoint(run_train(self._spec, fresh=fresh))

    def export(self, *, fresh: bool = False, approved_by: str | None = None) -> Model:
        """Trained weights to a published version. NotTrained before `train`; GateFailed or ChampionRefused for a
        version that must not be published.

        `fresh`: publish another version although one is known. `approved_by`: your name, recorded, to publish a version
        that is worse than the live one."""
        from serin.pipeline.run_stage import run_export

        with showing_progress(f"export of {self.name}"):
            return Model(run_export(self._spec, fresh=fresh, approved_by=approved_by))

    def roll_out(self) -> Model:
        """Brings the exported version to its clients, step by step, as `rollout` in the spec says, and returns when it
        is live. Needs a running stack (`serin up`); RolloutFailed gives the reason of a rollback."""
        from serin.host.state import running_stack
        from serin.pipeline import roll_out
        from serin.pipeline.run_stage import run_export

        running_stack(environment.home())
        with showing_progress(f"rollout of {self.name}"):
            bundle = run_export(self._spec).value
            release = Release(model=bundle.model, version=bundle.version)
            done = roll_out.roll_out(self._spec, release)
        return Model(StageResult(value=bundle, ran=done.ran, why=done.why))

    def run(
        self,
        *,
        placed: bool = False,
        fresh: Sequence[Literal["etl", "train", "export"]] = (),
        serve: bool = True,
        approved_by: str | None = None,
    ) -> Model:
        """Runs all stages on the stack's workers (`serin up`), shows their progress and returns the version. What the
        run needs is sent as `serin run` does: code in the folder of the spec (or the working directory) and all that it
        imports, and small files where the workers are elsewhere.

        `placed`: each stage on the worker that suits it. `fresh`: stages to do again. `serve`: roll the version out.
        `approved_by`: as for `export`. PipelineFailed names the run that did not complete."""
        from serin.pipeline.open_spec import opened_spec
        from serin.pipeline.run_stage import run_export
        from serin.prefect.flow_run import run_pipeline

        written = WrittenSpec(spec=self._spec, folder=self._folder, where=self.name)
        with showing_progress(f"run of {self.name}"):
            sent = run_pipeline(
                environment.home(),
                written,
                placed=placed,
                fresh=fresh,
                serve=serve,
                follow=True,
                approved_by=approved_by,
            )
            with opened_spec(sent) as spec:
                return Model(run_export(spec))

    def __repr__(self) -> str:
        spec = self._spec
        target = f", target {spec.data.target.expression}" if spec.has_data else ""
        return f"Pipeline {spec.name}: {spec.model.kind}{target}, feature groups: {len(spec.features)}"

    def _repr_html_(self) -> str:
        return f"<div><strong>{escape(repr(self))}</strong><pre>{escape(self.to_yaml())}</pre></div>"


def _changed(known: Any, value: Any) -> Any:
    """A section with the keys of a mapping put in; any other value takes its place."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", by_alias=True, exclude_unset=True)
    if isinstance(value, Mapping) and (known is None or isinstance(known, Mapping)):
        return {**(known or {}), **value}
    return value


def _name_of(target: str | Sequence[str] | None) -> str:
    first = target if isinstance(target, str) else next(iter(target or ()), "")
    words = re.findall(r"[A-Za-z_][A-Za-z0-9_]*", first)
    return words[0].lower().replace("_", "-").strip("-") if words else "model"
