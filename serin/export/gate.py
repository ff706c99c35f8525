"""What an exported graph must prove before anybody can ask for it.

features    on the golden rows the graph's features equal the ETL's, bit for bit, at every batch size (results of
            logarithms and sines within 1 ulp)
scores      on the golden rows the graph's answers equal torch's within the tolerance, at every batch size
metric      on the whole test split the exported network measures as torch does
checkpoint  torch measures on the test split what training said it would

The first that fails raises GateFailed with its name, the column and the first row that differ. Several batch sizes,
because an optimised kernel may be right for one row and wrong for eight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import onnx
import torch

from serin import metrics
from serin.errors import GateFailed
from serin.export.fuse import with_tensors
from serin.export.golden import GoldenRows
from serin.export.network import Network
from serin.export.session import open_session, run_in_batches
from serin.formats.schema import Schema, Task
from serin.formats.ulps import alike
from serin.formats.wire import Array

BATCHES = (1, 7, 8, 64)
CHECKPOINT_TOLERANCE = 0.01  # training may have measured in bf16 or on another device
METRICS: Mapping[Task, tuple[str, ...]] = {
    "binary": ("auc", "logloss"),
    "multiclass": ("accuracy", "logloss"),
    "regression": ("rmse",),
}
NOTHING: Mapping[str, float] = {}
Batch = tuple[Array, Array, Array]  # num float32[n, k], cat int64[n, m], target[n]


@dataclass(frozen=True, slots=True, kw_only=True)
class GateReport:
    """What was compared and how far apart it was; gate.json."""

    golden_rows: int
    batch_rows: tuple[int, ...]
    feature_columns: int  # equal bit for bit
    rounded_columns: tuple[str, ...]  # logarithms and sines: equal within their last place
    tolerance: float
    largest_score_difference: float
    test_rows: int
    test_torch: dict[str, float]
    test_onnx: dict[str, float]

    def to_json(self) -> dict[str, Any]:
        versions = {"torch": torch.__version__, "onnx": onnx.__version__, "onnxruntime": _runtime_version()}
        return {"format": "serin.gate", "version": 1, "passed": True, **asdict(self), "versions": versions}


def batch_sizes(rows: int) -> tuple[int, ...]:
    return tuple(sorted({size for size in BATCHES if size < rows} | {rows}))


def check_features(
    model: onnx.ModelProto,
    tensors: tuple[str, str],
    golden: GoldenRows,
    approximate: Mapping[str, float] = NOTHING,
) -> None:
    """The fused graph's own feature tensors against the ETL's columns; some may be a little apart, by `approximate`."""
    num, cat = tensors
    session = open_session(with_tensors(model, tensors))
    for size in batch_sizes(len(golden)):
        found = run_in_batches(session, golden.inputs, [num, cat], size)
        _same_bits(found[num], golden.num, golden.numeric, golden.row, size, approximate)
        _same_bits(found[cat], golden.cat.astype(np.int64), golden.categorical, golden.row, size)


def _same_bits(
    found: Array,
    wanted: Array,
    columns: Sequence[str],
    rows: Array,
    size: int,
    approximate: Mapping[str, float] = NOTHING,
) -> None:
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        raise GateFailed(
            stage="features",
            what="the graph's features have another form",
            found=f"{found.dtype}{list(found.shape)}, the ETL's {wanted.dtype}{list(wanted.shape)}",
        )
    for position, column in enumerate(columns):
        ours, theirs = found[:, position], wanted[:, position]
        different = (
            ~alike(ours, theirs, approximate[column])
            if column in approximate
            else _bits(ours) != _bits(theirs)
        )
        if different.any():
            first = int(np.argmax(different))
            raise GateFailed(
                stage="features",
                what=f"column {column!r} differs in {int(different.sum())} of {len(rows)} golden rows "
                f"at batch size {size}, first in row {rows[first]}",
                found=f"ETL {theirs[first]!r}, graph {ours[first]!r}",
                column=column,
                row=int(rows[first]),
            )


def _bits(values: Array) -> Array:
    """Equal exactly when the values are the same bits; one NaN is as good as another."""
    if values.dtype != np.float32:
        return values
    return np.where(np.isnan(values), np.uint32(0x7FC00000), np.ascontiguousarray(values).view(np.uint32))


def check_scores(
    model: onnx.ModelProto, network: Network, schema: Schema, golden: GoldenRows, tolerance: float
) -> tuple[dict[str, Array], float]:
    """The graph's answers against torch's. Returns the answers for all rows at once, and the largest difference."""
    session = open_session(model)
    wanted = answers(network.reference(golden.num, golden.cat.astype(np.int64)), schema.task)
    names, largest = [output.name for output in schema.outputs], 0.0
    found: dict[str, Array] = {}
    for size in batch_sizes(len(golden)):
        found = run_in_batches(session, golden.inputs, names, size)
        for name in names:
            largest = max(largest, _close(found, wanted, name, golden.row, tolerance, size))
    return found, largest


def _close(
    found: Mapping[str, Array],
    wanted: Mapping[str, Array],
    name: str,
    rows: Array,
    tolerance: float,
    size: int,
) -> float:
    """The largest difference in one output; GateFailed when it is too large."""
    ours, theirs = found[name], wanted[name]
    if ours.shape != theirs.shape:
        form = f"{ours.shape}, torch's {theirs.shape}"
        raise GateFailed(stage="scores", what=f"{name!r} has another form", found=form, column=name)
    if name == "label":  # two classes may tie within the tolerance; `probabilities` tells
        best = np.take_along_axis(wanted["probabilities"], ours, axis=1)
        difference = wanted["probabilities"].max(axis=1, keepdims=True) - best
    else:
        difference = np.abs(ours.astype(np.float64) - theirs) / np.maximum(1.0, np.abs(theirs))
    wrong = ~(difference <= tolerance)  # a NaN is wrong too
    if wrong.any():
        first, position = np.argwhere(wrong)[0]
        raise GateFailed(
            stage="scores",
            what=f"{name!r} differs from torch in {int(wrong.any(axis=1).sum())} of {len(rows)} golden rows "
            f"at batch size {size}, first in row {rows[first]}",
            found=_told(theirs[first, position], ours[first, position], tolerance),
            column=name,
            row=int(rows[first]),
        )
    return float(difference.max(initial=0.0))


def _told(torch_value: float, graph_value: float, tolerance: float) -> str:
    if not np.isfinite(torch_value):
        return f"torch itself answers {torch_value}; the row holds values the network cannot take: clip them"
    return f"torch {torch_value!r}, graph {graph_value!r}, allowed {tolerance:g}"


def answers(logits: Array, task: Task) -> dict[str, Array]:
    """What the graph must answer for a network's output."""
    tensor = torch.from_numpy(np.ascontiguousarray(logits))
    match task:
        case "binary":
            return {"score": torch.sigmoid(tensor).numpy()}
        case "regression":
            return {"score": tensor.numpy()}
        case "multiclass":
            label = torch.argmax(tensor, dim=1, keepdim=True)
            return {"label": label.numpy(), "probabilities": torch.softmax(tensor, dim=1).numpy()}


def check_metric(
    network: Network,
    batches: Iterable[Batch],
    task: Task,
    tolerance: float,
    reported: Mapping[str, float],
) -> tuple[int, dict[str, float], dict[str, float]]:
    """Rows of the test split, torch's metrics and the exported network's. `reported`: what training measured."""
    session = open_session(network.graph)
    targets, ours, theirs = [], [], []
    for num, cat, target in batches:
        (logits,) = session.run(["logits"], {"num": num, "cat": cat})
        ours.append(logits)
        theirs.append(network.reference(num, cat))
        targets.append(target)
    if not targets:
        raise GateFailed(stage="metric", what="the test split", found="is empty, nothing can be measured")
    target = np.concatenate(targets)
    torch_metrics = _measure(target, answers(np.concatenate(theirs), task), task)
    onnx_metrics = _measure(target, answers(np.concatenate(ours), task), task)
    for name, wanted in torch_metrics.items():
        _near("metric", name, "exported network", onnx_metrics[name], wanted, tolerance)
        if f"test_{name}" in reported:
            _near("checkpoint", name, "training", reported[f"test_{name}"], wanted, CHECKPOINT_TOLERANCE)
    return len(target), torch_metrics, onnx_metrics


def _near(stage: str, name: str, who: str, found: float, wanted: float, tolerance: float) -> None:
    if not abs(found - wanted) <= tolerance * max(1.0, abs(wanted)):
        apart = f"{who} {found:.6g}, torch now {wanted:.6g}, allowed {tolerance:g} apart"
        raise GateFailed(stage=stage, what=f"{name} on the test split", found=apart)


def _measure(target: Array, given: Mapping[str, Array], task: Task) -> dict[str, float]:
    """The task's metrics; one that this split cannot give (AUC with one class only) is left out."""
    compute: Mapping[str, Callable[[], float]] = {
        "auc": lambda: metrics.auc(target, given["score"][:, 0]),
        "rmse": lambda: metrics.rmse(target, given["score"][:, 0]),
        "accuracy": lambda: metrics.accuracy(target, given["label"][:, 0]),
        "logloss": lambda: metrics.log_loss(
            target, given["score"][:, 0] if task == "binary" else given["probabilities"]
        ),
    }
    found = {}
    for name in METRICS[task]:
        try:
            found[name] = compute[name]()
        except ValueError as error:
            if name != "auc":
                raise GateFailed(
                    stage="metric", what=f"{name} on the test split", found=str(error)
                ) from error
    return found


def _runtime_version() -> str:
    import onnxruntime

    return str(onnxruntime.__version__)
