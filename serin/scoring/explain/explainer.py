"""Which raw columns made a score, for a published version, in this process.

What is explained is the trained model that the bundle keeps beside its graph. It is used only if it answers the golden
rows as the published graph does. The features come from the published graph itself.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow.parquet as pq

from serin.errors import ExplanationRefused, ExportError, PackageRefused, PredictionFailed
from serin.formats.bundle import MODEL, check_has_graph, read_golden, verify_bundle
from serin.formats.explain import FOLDER, ExplainRecord, read_explain
from serin.formats.external_data import read_graph
from serin.formats.gate import read_scales, scores_apart
from serin.formats.lookups import read_lookups
from serin.formats.schema import Task, read_schema
from serin.formats.trained import RECORD, TREES, read_record, read_trained
from serin.formats.wire import Array, to_wire
from serin.models.trees import Booster, feature_table, margins, read_booster
from serin.scoring.answers import answers
from serin.scoring.explain.explanation import (
    Contributions,
    Parts,
    Scale,
    TrainedModel,
    Unexplained,
    sum_by_column,
)
from serin.scoring.session import RUNTIME_ERRORS, open_session, run_in_batches, with_tensors
from serin.spec.yaml_file import read_yaml
from serin.store.packages import enter_stored, inside_package
from serin.store.store import Store

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pandas as pd
    import pyarrow as pa

_BATCH_ROWS = 1024
_SCALES: dict[Task, Scale] = {
    "binary": "log-odds",
    "multiclass": "logit of each class",
    "regression": "target",
}


class _Run(NamedTuple):
    """What the published graph gives for rows: its answer, and the features inside."""

    score: Array
    num: Array
    cat: Array


class Explainer:
    """A verified bundle, ready to explain tables of raw columns. ExplanationRefused for one that cannot be
    explained. `digest`: of the manifest that was checked before."""

    def __init__(self, bundle_folder: Path | str, *, digest: str | None = None) -> None:
        self._folder = Path(bundle_folder)
        self.manifest = verify_bundle(self._folder, digest=digest)
        check_has_graph(self.manifest, "explain")
        self.schema = read_schema(self._folder)
        if f"{FOLDER}/{RECORD}" not in self.manifest.files:
            raise self._refusal(self._why_nothing_was_kept())
        self._record = read_explain(self._folder / FOLDER)
        self._trained = self._open_trained()
        model = read_graph(self._folder / MODEL)
        self._tensors = (self._record.num_tensor, self._record.cat_tensor)
        with with_tensors(model, self._tensors):
            self._session = open_session(model)
        self._note = self._compare_with_graph()

    def explain(self, table: pa.Table | pd.DataFrame) -> Contributions:
        """What each raw column adds to each row's score. RowsUnfit names a column that is missing or of the wrong
        kind."""
        columns, outputs = self._record.columns, self.schema.classes or self.schema.targets or ("score",)
        inputs = to_wire(table, self.schema)
        found = self._run(inputs)
        try:
            parts = [
                self._trained.explain(found.num[at : at + _BATCH_ROWS], found.cat[at : at + _BATCH_ROWS])
                for at in range(0, len(found.score), _BATCH_ROWS)
            ]
        except Unexplained as error:
            raise self._refusal(str(error)) from error
        values = [sum_by_column(part.features, columns.places, len(columns.names)) for part in parts]
        nothing = np.zeros((0, len(outputs)))
        return Contributions(
            columns=columns.names,
            sources=columns.sources,
            outputs=outputs,
            values=np.concatenate(values) if values else np.zeros((0, len(outputs), len(columns.names))),
            base=np.concatenate([nothing, *(part.base for part in parts)]),
            margin=np.concatenate([nothing, *(part.margin for part in parts)]),
            score=found.score.astype(np.float64),
            scale=_SCALES[self.schema.task],
            method=self._trained.method,
            look_up=partial(looked_up, self._folder, inputs),
            note=self._note,
        )

    def _open_trained(self) -> TrainedModel:
        """A network of the user's own is imported from where it was exported, so not for a version from elsewhere."""
        module = read_record(self._folder / FOLDER).model.module
        if module is not None and "imported" in self.manifest.lineage:
            raise self._refusal(f"its network is code ({module}) that came with an imported version")
        try:
            if module is not None:
                enter_stored(self._folder)
            with self._beside(module):
                return open_trained(self._folder / FOLDER, self._record)
        except (Unexplained, PackageRefused) as error:
            raise self._refusal(str(error)) from error

    def _beside(self, module: str | None) -> AbstractContextManager[object]:
        """A module that was sent with its run is in the run's package, with all that it imports."""
        package = self.manifest.lineage.get("package")
        if module is None or package is None or Path(module).is_absolute():
            return nullcontext()
        return inside_package(Store.open(), package)

    def _run(self, inputs: Mapping[str, Array]) -> _Run:
        name = self.schema.outputs[-1].name  # the score, or the probabilities
        rows = len(next(iter(inputs.values())))
        if not rows:
            return _Run(np.zeros((0, *self.schema.outputs[-1].dims)), np.zeros((0, 0)), np.zeros((0, 0)))
        try:
            found = run_in_batches(self._session, inputs, [name, *self._tensors], _BATCH_ROWS)
        except RUNTIME_ERRORS as error:
            raise PredictionFailed(model=self.manifest.name, status="an error", reason=str(error)) from error
        return _Run(found[name], *(found[tensor] for tensor in self._tensors))

    def _compare_with_graph(self) -> str:
        """ExplanationRefused when the trained model does not answer the golden rows as the published graph does. What
        an explanation must say about the difference between the two, if the graph is not plain fp32."""
        gate = json.loads((self._folder / "gate.json").read_text(encoding="utf-8"))
        found = self._run(read_golden(self._folder, self.schema).inputs)
        name, served = self.schema.outputs[-1].name, found.score.astype(np.float64)
        own = answers(self._trained.margins(found.num, found.cat), self.schema.task)[name]
        apart = scores_apart(own, served, read_scales(gate).get(name))
        largest, allowed = float(apart.max(initial=0.0)), float(gate["allowed_difference"])
        if not largest <= allowed:
            reason = (
                f"the trained model beside the graph answers the golden rows differently, by up to {largest:.3g} "
                f"(allowed {allowed:g}); export the model again"
            )
            raise self._refusal(reason)
        if gate["chosen"] in ("fp32", "pruned"):
            return ""
        return (
            f"The trained fp32 model is explained; the served variant is {gate['chosen']}, whose scores of the golden "
            f"rows differ by up to {largest:.2g}."
        )

    def _refusal(self, reason: str) -> ExportError:
        return ExplanationRefused(
            release=f"{self.manifest.name} version {self.manifest.release.label}", reason=reason
        )

    def _why_nothing_was_kept(self) -> str:
        if MODEL not in self.manifest.files:
            return "it is a Triton repository; Serin sees its answers, not the models inside"
        spec = read_yaml((self._folder / "spec.yaml").read_text(encoding="utf-8"))
        kind = spec.get("model", {}).get("kind") if isinstance(spec, dict) else None
        if kind in ("script", "onnx"):
            return (
                f"it is an ONNX graph from model.{kind}, which has no trees or gradients that can be followed"
            )
        if kind == "auto":
            return "it is a blend of several models, which have no baseline in common; set model.auto.ensemble: false"
        return "it was exported without what explanations need; export it again"


def looked_up(bundle: Path, inputs: Mapping[str, Array]) -> dict[str, list[Any]]:
    """The columns that the graph of a bundle looks up for inputs in wire form; None for what its tables do not have."""
    known, found = read_lookups(bundle), dict[str, list[Any]]()
    for table in () if known is None else known.tables:
        keys = inputs[table.key].reshape(-1).tolist()
        rows = pq.read_table(bundle / table.file, filters=[(table.key, "in", list(set(keys)))])
        places = {key: place for place, key in enumerate(rows.column(table.key).to_pylist())}
        for name in table.columns:
            values = [*rows.column(name).to_pylist(), None]
            found[name] = [values[places.get(key, -1)] for key in keys]
    return found


def open_trained(folder: Path, record: ExplainRecord) -> TrainedModel:
    """The model in a bundle's folder `explain`."""
    if read_record(folder).file == TREES:
        return _trees(folder)
    from serin.scoring.explain.network import (
        open_network,
    )  # torch is slow to import, and trees do not need it

    return open_network(folder, record)


def _trees(folder: Path) -> TrainedModel:
    record, data = read_trained(folder)
    assert record.shape is not None  # of trees it is always known
    booster, sizes = read_booster(data), record.shape.sizes
    return TrainedModel(
        method="TreeSHAP",
        margins=lambda num, cat: margins(booster, num, cat, sizes),
        explain=lambda num, cat: tree_shap(booster, num, cat, sizes),
    )


# This is what `shap.TreeExplainer` calls `tree_path_dependent`.
def tree_shap(booster: Booster, num: Array, cat: Array, sizes: Sequence[int]) -> Parts:
    """The parts of each row's margin; the base value is the mean margin of the training rows."""
    table = feature_table(num, cat, sizes)
    found = np.asarray(booster.predict(table, pred_contribs=True, strict_shape=True), np.float64)
    margin = np.asarray(booster.predict(table, output_margin=True), np.float64)
    return Parts(features=found[:, :, :-1], base=found[:, :, -1], margin=margin.reshape(len(num), -1))
