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


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """`node` gives `tensor`; `apart`: the largest difference, as a share of the tensor's largest value."""

    node: str
    operator: str
    tensor: str
    apart: float

    def __str__(self) -> str:
        return f"node {self.node!r} ({self.operator}) is off by {self.apart:.2g} of its largest value"


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
    if found.shape != wanted.shape:
        return float("inf")
    both = np.isfinite(wanted)
    if not np.array_equal(both, np.isfinite(found)):
        return float("inf")
    if not both.any():
        return 0.0
    largest = float(np.abs(wanted[both]).max())
    difference = float(np.abs(found[both].astype(np.float64) - wanted[both]).max())
    return difference / largest if largest else difference
