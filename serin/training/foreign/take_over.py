"""Makes an ordinary result from the output of a script, or from an ONNX file that was trained elsewhere.

`python -m serin.training.foreign.take_over FOLDER PARENT_PID`, started by the launcher in a separate process, because
the file it opens is the user's. The model is checked against the dataset and measured on the valid and test rows.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import pyarrow.parquet as pq

from serin.errors import ExportFailed, ModelUnfit, SerinError
from serin.formats.dataset import DatasetDescription, read_dataset
from serin.formats.schema import write_schema
from serin.formats.shards import Array, read_split
from serin.formats.trained import GRAPH, WEIGHTS, write_trained
from serin.machine.parent_death import die_with_parent
from serin.models.foreign.own_graph import as_network, load_graph
from serin.models.foreign.own_inputs import golden_table, own_schema, read_golden_arrays, with_answer
from serin.models.shape import record_of, shape_of
from serin.models.trees import scores
from serin.scoring.session import RUNTIME_ERRORS, Runs, open_session
from serin.spec.model import ModelSpec
from serin.training.launch.job import Status, TrainingJob, read_job, write_status
from serin.training.launch.script import output_folder, own_metrics
from serin.training.results.judge import judge_scores
from serin.training.results.publish import publish_result

FACTORY = "factory.json"
_BATCH_ROWS = 8192
Ask = Callable[[Array, Array], Array]  # num float32[n, k], cat int64[n, m] -> logits float32[n, outputs]
GOLDEN = "golden.npz"
_RUN_ERRORS: tuple[type[BaseException], ...] = (ValueError, *RUNTIME_ERRORS)


def main() -> None:
    folder = Path(sys.argv[1])
    die_with_parent(int(sys.argv[2]))
    job = read_job(folder)
    try:
        take_over(job, folder)
    except SerinError as error:
        write_status(folder, Status(state="refused", reason=str(error)))
        sys.exit(1)
    write_status(folder, Status(state="done"))


def take_over(job: TrainingJob, folder: Path) -> None:
    """Takes over a model into the result folder. Raises ModelUnfit with what is wrong with it."""
    what, place = _source(job.model, folder)
    if not job.dataset:
        take_over_own_inputs(job, folder, what, place)
        return
    data = read_dataset(job.dataset)
    fill, ask = _graph(job, data, what, place) if place.suffix else _weights(job, data, what, place)
    metrics = {**own_metrics(folder, what), **_measure(job, data, ask, what)}
    publish_result(folder, fill=fill, job=job, step=0, steps=0, choices={}, metrics=metrics)


def _source(model: ModelSpec, folder: Path) -> tuple[str, Path]:
    """Returns the model's name in the spec and the ONNX file, or the folder with weights and their factory."""
    if model.onnx is not None:
        what, file = f"model.onnx {model.onnx}", Path(model.onnx)
        if not file.is_file():
            raise ModelUnfit(what=what, reason="no such file; the path is relative to the spec's file")
        return what, file
    what, output = f"model.script {model.script}", output_folder(folder)
    if (output / GRAPH).is_file():
        return what, output / GRAPH
    if (output / WEIGHTS).is_file() and (output / FACTORY).is_file():
        return what, output
    left = sorted(str(file.relative_to(output)) for file in output.rglob("*") if file.is_file())
    raise ModelUnfit(
        what=what,
        reason=f"it exited with 0 and wrote {', '.join(left[:8]) if left else 'nothing'} to SERIN_OUTPUT ({output}); "
        f"write {GRAPH}, or {WEIGHTS} with a {FACTORY} that names their network",
    )


def _graph(
    job: TrainingJob, data: DatasetDescription, what: str, file: Path
) -> tuple[Callable[[Path], None], Ask]:
    shape = shape_of(data)
    graph = as_network(load_graph(file, what), shape, data.task, answer=job.model.answer, what=what)
    session = open_graph(graph, what)
    record, content = record_of(job.model, data, GRAPH), graph.SerializeToString(deterministic=True)
    return (
        lambda scratch: write_trained(scratch, content, record),
        lambda num, cat: run_graph(session, {"num": num, "cat": cat}, ["logits"], what)[0],
    )


def _weights(
    job: TrainingJob, data: DatasetDescription, what: str, folder: Path
) -> tuple[Callable[[Path], None], Ask]:
    """Takes over weights with a factory, like those of `model: {module: ...}`."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    from serin.formats.weights import write_weights
    from serin.models.build import build_model, network_margins

    model = _factory(job, folder / FACTORY, what)
    network = build_model(model, shape_of(data))
    try:
        state = load((folder / WEIGHTS).read_bytes())
        network.get_submodule("network").load_state_dict(state)
    except (SafetensorError, RuntimeError) as error:
        reason = f"{WEIGHTS} does not fit {model.module}: {' '.join(str(error).split())[:300]}"
        raise ModelUnfit(what=what, reason=reason) from error
    record = record_of(model, data)
    margins = network_margins(network.eval())
    return lambda scratch: write_weights(scratch, network.state_dict(), record), margins


def _factory(job: TrainingJob, file: Path, what: str) -> ModelSpec:
    """Reads {"module": "net.py:Net", "options": {...}}; the file is beside the script."""
    try:
        said = json.loads(file.read_text(encoding="utf-8"))
        module = str(said["module"])
        place = module.rpartition(":")[0]
        if place.endswith(".py"):
            module = f"{Path(job.model.script or '').parent / place}:{module.rpartition(':')[2]}"
        return ModelSpec(module=module, options=said.get("options", {}))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"{FACTORY} is not {{'module': 'net.py:Net', 'options': {{...}}}}: {error}"
        raise ModelUnfit(what=what, reason=reason) from error


def _measure(job: TrainingJob, data: DatasetDescription, ask: Ask, what: str) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for split in ("valid", "test") if job.test else ("valid",):
        if not data.rows.get(split):
            continue
        pieces = [
            (target, ask(num, cat))
            for num, cat, target in read_split(job.dataset, split).batches(_BATCH_ROWS)
        ]
        logits = np.concatenate([answer for _, answer in pieces])
        if not np.isfinite(logits).all():
            row = int(np.argmin(np.isfinite(logits).all(axis=1)))
            raise ModelUnfit(
                what=what, reason=f"its answer to row {row} of the {split} rows is {logits[row]}"
            )
        target = np.concatenate([target for target, _ in pieces])
        found = judge_scores(target, scores(logits, data.task), data.task, data.targets, errors=True)
        metrics |= {f"{split}_{name}": value for name, value in found.items()}
    return metrics


# `result/{model.onnx, schema.json, golden.parquet, model.json, metrics.json, state.json}`. Only the script can report
# metrics, since only it has the rows.
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
    answers = dict(zip(names, run_graph(open_graph(graph, what), inputs, names, what), strict=True))
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


def run_graph(session: Runs, inputs: Mapping[str, Array], outputs: Sequence[str], what: str) -> list[Array]:
    try:
        return session.run(list(outputs), dict(inputs))
    except _RUN_ERRORS as error:
        raise ModelUnfit(what=what, reason=f"ONNX Runtime cannot run it: {_short(error)}") from error


def open_graph(graph: onnx.ModelProto, what: str) -> Runs:
    session: Runs
    try:
        session = open_session(graph)
    except ExportFailed as error:
        raise ModelUnfit(what=what, reason=_short(error.fields["reason"])) from error
    return session


def _short(error: object) -> str:
    return str(error).strip().splitlines()[0][:300]


if __name__ == "__main__":
    main()
