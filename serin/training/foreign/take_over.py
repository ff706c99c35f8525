"""Makes an ordinary result from the output of a script, or from an ONNX file that was trained elsewhere.

`python -m serin.training.foreign.take_over FOLDER PARENT_PID`, started by the launcher in a separate process, because
the file it opens is the user's. The model is checked against the dataset and measured on the valid and test rows.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from serin.errors import ModelUnfit, SerinError
from serin.formats.dataset import DatasetDescription, read_dataset
from serin.formats.shards import Array, read_split
from serin.formats.trained import GRAPH, WEIGHTS, write_trained
from serin.machine.parent_death import die_with_parent
from serin.models.shape import TableShape, shape_of
from serin.models.trees import scores
from serin.spec.model import ModelSpec
from serin.training.launch.job import TrainingJob, read_job
from serin.training.launch.script import output_folder, own_metrics
from serin.training.launch.status import Status, write_status
from serin.training.results.judge import judge_scores
from serin.training.results.publish import publish_result

FACTORY = "factory.json"
_BATCH_ROWS = 8192
Ask = Callable[[Array, Array], Array]  # num float32[n, k], cat int64[n, m] -> logits float32[n, outputs]


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
        from serin.training.foreign.own_inputs import take_over_own_inputs

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


def _record(model: ModelSpec, shape: TableShape, data: DatasetDescription, file: str) -> dict[str, Any]:
    columns = {"numeric": shape.numeric, "sizes": shape.sizes, "outputs": shape.outputs}
    return {"model": model.model_dump(), "shape": columns, "task": data.task, "file": file}


def _graph(
    job: TrainingJob, data: DatasetDescription, what: str, file: Path
) -> tuple[Callable[[Path], None], Ask]:
    from serin.models.foreign.own_graph import as_network, load_graph
    from serin.models.foreign.run_graph import RunningGraph

    shape = shape_of(data)
    graph = as_network(load_graph(file, what), shape, data.task, answer=job.model.answer, what=what)
    running = RunningGraph(graph, what)
    record, content = _record(job.model, shape, data, GRAPH), graph.SerializeToString(deterministic=True)
    return (
        lambda scratch: write_trained(scratch, content, record),
        lambda num, cat: running.ask({"num": num, "cat": cat}, ["logits"])[0],
    )


def _weights(
    job: TrainingJob, data: DatasetDescription, what: str, folder: Path
) -> tuple[Callable[[Path], None], Ask]:
    """Takes over weights with a factory, like those of `model: {module: ...}`."""
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load

    from serin.formats.weights import write_weights
    from serin.models.build import build_model

    shape = shape_of(data)
    model = _factory(job, folder / FACTORY, what)
    network = build_model(model, shape)
    try:
        state = load((folder / WEIGHTS).read_bytes())
        network.get_submodule("network").load_state_dict(state)
    except (SafetensorError, RuntimeError) as error:
        reason = f"{WEIGHTS} does not fit {model.module}: {' '.join(str(error).split())[:300]}"
        raise ModelUnfit(what=what, reason=reason) from error
    network.eval()

    def ask(num: Array, cat: Array) -> Array:
        with torch.inference_mode():
            answer: Array = network(torch.from_numpy(num), torch.from_numpy(cat)).numpy()
        return answer

    record = _record(model, shape, data, WEIGHTS)
    return lambda scratch: write_weights(scratch, network.state_dict(), record), ask


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
        pieces = [(target, ask(num, cat)) for num, cat, target in _batches(job.dataset, split)]
        logits = np.concatenate([answer for _, answer in pieces])
        if not np.isfinite(logits).all():
            row = int(np.argmin(np.isfinite(logits).all(axis=1)))
            raise ModelUnfit(
                what=what, reason=f"its answer to row {row} of the {split} rows is {logits[row]}"
            )
        target = np.concatenate([target for target, _ in pieces])
        found = judge_scores(target, scores(logits, data.task), data.task, data.targets)
        metrics |= {f"{split}_{name}": value for name, value in found.items()}
    return metrics


def _batches(dataset: str, split: str) -> Iterator[tuple[Array, Array, Array]]:
    arrays = read_split(dataset, split)
    for num, cat, target in zip(arrays.num, arrays.cat, arrays.target, strict=True):
        for at in range(0, len(target), _BATCH_ROWS):
            rows = slice(at, at + _BATCH_ROWS)
            yield np.array(num[rows]), np.asarray(cat[rows], np.int64), np.asarray(target[rows])


if __name__ == "__main__":
    main()
