"""Where a variant leaves its reference: the first node, in the order of calculation, whose result is another.

Both graphs are asked for the tensors that bear the same name in each, for the rows that showed the difference.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx

from serin.export.inner import float_tensors, run_with_inner
from serin.export.session import Device
from serin.formats.wire import Array

_SMALL = 0.01  # of a common row's value: a row that is nearly nothing is not measured by itself


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """`node` gives `tensor`; `apart`: the largest difference in a row, as a share of the row's largest value."""

    node: str
    operator: str
    tensor: str
    apart: float

    def __str__(self) -> str:
        return f"node {self.node!r} ({self.operator}) is off by {self.apart:.2g} of its value"


def first_divergence(
    reference: onnx.ModelProto,
    variant: onnx.ModelProto,
    feed: Mapping[str, Array],
    *,
    allowed: float,
    device: Device = "cpu",
) -> Divergence | None:
    """The first node that is off by more than `allowed`; else the one that adds most to what its inputs are off by."""
    given = {name for node in variant.graph.node for name in node.output}
    tensors = [name for name in float_tensors(reference) if name in given]
    wanted = run_with_inner(reference, feed, tensors)
    found = run_with_inner(variant, feed, tensors, device)
    apart = {name: _apart(found[name], wanted[name]) for name in tensors}
    best: tuple[float, Divergence] | None = None
    for node in reference.graph.node:
        for tensor in (name for name in node.output if name in apart):
            here = Divergence(node=node.name, operator=node.op_type, tensor=tensor, apart=apart[tensor])
            if not apart[tensor] <= allowed:
                return here
            added = apart[tensor] - max((apart.get(name, 0.0) for name in node.input), default=0.0)
            if best is None or added > best[0]:
                best = added, here
    return None if best is None or best[0] <= 0 else best[1]


def _apart(found: Array, wanted: Array) -> float:
    """The largest difference in a row, as a share of the row's largest value: no extreme row may hide the others."""
    if found.shape != wanted.shape:
        return float("inf")
    both = np.isfinite(wanted)
    if not np.array_equal(both, np.isfinite(found)):
        return float("inf")
    if not wanted.size:
        return 0.0
    rows = len(wanted) if wanted.ndim > 1 else 1
    value = np.where(both, np.abs(wanted, dtype=np.float64), 0.0).reshape(rows, -1).max(axis=1)
    with np.errstate(invalid="ignore"):
        difference = (
            np.where(both, np.abs(found.astype(np.float64) - wanted), 0.0).reshape(rows, -1).max(axis=1)
        )
    common = np.sort(value[value > 0])
    scale = np.maximum(value, _SMALL * common[len(common) // 4]) if len(common) else value
    return float(np.max(np.where(scale > 0, difference / np.where(scale > 0, scale, 1.0), difference)))
