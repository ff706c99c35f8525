"""The result of a training without a dataset: a model with custom inputs, verified by golden rows.

`result/{model.onnx, schema.json, golden.parquet, model.json, metrics.json, state.json}`. Only the script can report
metrics, since only it has the rows.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from serin.errors import ModelUnfit
from serin.formats.schema import write_schema
from serin.formats.trained import GRAPH, write_trained
from serin.models.foreign.own_graph import load_graph
from serin.models.foreign.own_inputs import golden_table, own_schema, read_golden_arrays, with_answer
from serin.models.foreign.run_graph import RunningGraph
from serin.training.launch.job import TrainingJob
from serin.training.launch.script import output_folder, own_metrics
from serin.training.results.publish import publish_result

GOLDEN = "golden.npz"


def take_over_own_inputs(job: TrainingJob, folder: Path, what: str, place: Path) -> None:
    """Takes over a model with custom inputs. Raises ModelUnfit with what is wrong with the model or its golden rows."""
    if not place.suffix:
        reason = f"without a data section only {GRAPH} can be taken over, not weights"
        raise ModelUnfit(what=what, reason=reason)
    assert job.model.task is not None
    given = load_graph(place, what)
    schema = own_schema(given, job.model.task, job.model.classes, what)
    graph = with_answer(given, schema, job.model.answer, what)
    arrays = read_golden_arrays(_golden_file(job, folder, what), schema, what)
    inputs = {column.name: arrays[column.name] for column in schema.inputs}
    names = [output.name for output in schema.outputs]
    answers = dict(zip(names, RunningGraph(graph, what).ask(inputs, names), strict=True))
    for name, values in answers.items():
        if not np.isfinite(values).all():
            raise ModelUnfit(what=what, reason=f"output {name} is not finite on the golden rows")
    known = {name: arrays[name] for name in names if name in arrays}
    content = graph.SerializeToString(deterministic=True)
    record = {"model": job.model.model_dump(), "file": GRAPH}

    def fill(scratch: Path) -> None:
        write_trained(scratch, content, record)
        write_schema(scratch, schema)
        pq.write_table(golden_table({**inputs, **known}), scratch / "golden.parquet", compression="zstd")

    metrics = own_metrics(folder, what)
    publish_result(folder, fill=fill, job=job, step=0, steps=0, choices={}, metrics=metrics)


def _golden_file(job: TrainingJob, folder: Path, what: str) -> Path:
    file = Path(job.model.golden) if job.model.golden is not None else output_folder(folder) / GOLDEN
    if not file.is_file():
        raise ModelUnfit(
            what=what,
            reason=f"there are no golden rows: write {GOLDEN} beside {GRAPH}, with one array of rows per input and the "
            "answers of your own framework",
        )
    return file
