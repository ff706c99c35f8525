"""The task's metrics of answers, and the loss between two models."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from serin import metrics
from serin.errors import GateFailed
from serin.formats.schema import Task
from serin.formats.wire import Array
from serin.spec.export import Metric

METRICS: Mapping[Task, tuple[Metric, ...]] = {
    "binary": ("auc", "logloss"),
    "multiclass": ("accuracy", "logloss"),
    "regression": ("rmse",),
}
HIGHER_IS_BETTER = ("auc", "average_precision", "accuracy")


def measure(target: Array, given: Mapping[str, Array], task: Task) -> dict[str, float]:
    """Returns the task's metrics; one that this split cannot give (AUC with one class only) is left out.

    With several targets: the mean of each metric that all of them have.
    """
    if target.ndim == 2:
        columns = range(target.shape[1])
        each = [measure(target[:, at], {"score": given["score"][:, [at]]}, task) for at in columns]
        both = [name for name in METRICS[task] if all(name in one for one in each)]
        return {name: sum(one[name] for one in each) / len(each) for name in both}
    compute: Mapping[str, Callable[[], float]] = {
        "auc": lambda: metrics.auc(target, given["score"][:, 0]),
        "rmse": lambda: metrics.rmse(target, given["score"][:, 0]),
        "accuracy": lambda: metrics.accuracy(target, given["label"][:, 0]),
        "logloss": lambda: metrics.log_loss(
            target, given["score"][:, 0] if task == "binary" else given["probabilities"]
        ),
    }
    found: dict[str, float] = {}
    for name in METRICS[task]:
        try:
            found[name] = compute[name]()
        except ValueError as error:
            if name != "auc":
                raise GateFailed(
                    stage="metric", what=f"{name} on the test split", found=str(error)
                ) from error
    return found


def loss(metric: str, reference: float, found: float) -> float:
    """Returns how much worse `found` is than `reference`; below 0 when it is better. For an rmse relative to it."""
    if metric in HIGHER_IS_BETTER:
        return reference - found
    return (found - reference) / (reference if metric == "rmse" and reference else 1.0)
