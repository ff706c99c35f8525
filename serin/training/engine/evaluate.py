"""Scores a split on all ranks together and computes its metrics."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from serin.formats.schema import Task
from serin.training.data.tables import MappedTable, ResidentTable
from serin.training.engine.precision import matrix_products
from serin.training.parallel.buffers import buffers_kept
from serin.training.parallel.ranks import Ranks
from serin.training.results.judge import judge_scores

_BATCH_ROWS = 65536
_NOT_FINITE = "not finite"


def evaluate(
    network: nn.Module,
    table: ResidentTable | MappedTable,
    task: Task,
    world: Ranks,
    targets: Sequence[str] = (),
    *,
    errors: bool = False,
) -> dict[str, float]:
    """Returns the split's metrics, the same on all ranks. Always in full fp32, without dropout. `targets`: names of
    several. `errors`: with standard errors (results/judge.py).

    Changes nothing in the network, also where its forward changes buffers in evaluation mode. Raises FloatingPointError
    when a score is not finite: such weights must not be kept.
    """
    per_rank = -(-table.rows // world.size)
    start, stop = (min(table.rows, per_rank * rank) for rank in (world.rank, world.rank + 1))
    pieces = []
    network.eval()
    with torch.no_grad(), matrix_products("fp32"), buffers_kept(network):
        for offset in range(0, per_rank, _BATCH_ROWS):
            # Where weights are sharded, a rank that has no rows left must still take part: with one row that is not
            # counted.
            begin = min(start + offset, stop)
            end = min(stop, begin + _BATCH_ROWS)
            batch = table.slice(begin, end) if begin < end else table.slice(0, 1)
            scores = _scores_of(network(batch.num, batch.cat), task)
            pieces.append(torch.cat([batch.target.view(len(batch.target), -1), scores], dim=1)[: end - begin])
    network.train()
    mine = torch.cat(pieces)
    padded = torch.nn.functional.pad(mine, (0, 0, 0, per_rank - len(mine)))
    gathered = world.gather(padded)
    found = {}
    if gathered:
        rows = torch.cat(gathered)[: table.rows].numpy()
        width = len(targets) or 1
        truth, scored = rows[:, :width] if targets else rows[:, 0], rows[:, width:]
        finite = bool(np.isfinite(scored).all())
        found = judge_scores(truth, scored, task, targets, errors=errors) if finite else {_NOT_FINITE: 1.0}
    found = world.share(found)
    if _NOT_FINITE in found:
        raise FloatingPointError("a score is not finite")
    return found


def goodness(found: dict[str, float]) -> float:
    """Returns one number that is higher for the better epoch of the same run: AUC where there is one, else minus the
    loss."""
    if "auc" in found:
        return found["auc"]
    return -next((found[name] for name in ("logloss", "rmse") if name in found), 0.0)


def _scores_of(logits: Tensor, task: Task) -> Tensor:
    """Returns the answers of the served model: a probability, one per class, or the value."""
    match task:
        case "binary":
            return torch.sigmoid(logits)
        case "multiclass":
            return torch.softmax(logits, dim=1)
        case "regression":
            return logits
