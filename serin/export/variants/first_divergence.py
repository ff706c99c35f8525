"""Finds the first node, in the order of computation, at which a variant differs from its reference.

Both graphs output the tensors that have the same name in each, for the rows that showed the difference. A node is then
judged by itself: the reference's operator gets the inputs of the variant's, so that neither an earlier error nor the
noise that all layers add hides the wrong one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import helper

from serin.errors import ExportFailed
from serin.formats.wire import Array
from serin.scoring.session import RUNTIME_ERRORS, Device, open_session, run_with_inner

_SEEN = "_DequantizeLinear_Output"  # as ONNX Runtime's quantiser names it
_SMALL = 0.01  # of a common row's value: a row near zero is not a scale


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """A node that differs. `node` outputs `tensor`; `apart`: the largest difference in a row over its largest value."""

    node: str
    operator: str
    tensor: str
    apart: float

    def __str__(self) -> str:
        return f"node {self.node!r} ({self.operator}) differs by {self.apart:.2g} of its value"


def first_divergence(
    reference: onnx.ModelProto,
    variant: onnx.ModelProto,
    feed: Mapping[str, Array],
    *,
    allowed: float,
    device: Device = "cpu",
) -> Divergence | None:
    """Returns the first node that differs by more than `allowed`; else the one that differs most."""
    given = {name for node in variant.graph.node for name in node.output}
    tensors = [name for node in reference.graph.node for name in node.output if name in given]
    wanted = {**feed, **run_with_inner(reference, feed, tensors)}
    # The value that consumers of a quantised tensor see: a Relu may be implemented by its clamp alone.
    seen = {name: f"{name}{_SEEN}" if f"{name}{_SEEN}" in given else name for name in tensors}
    inner = run_with_inner(variant, feed, list(seen.values()), device)
    found = {**feed, **{name: inner[other] for name, other in seen.items()}}
    worst: Divergence | None = None
    for node in reference.graph.node:
        result = node.output[0]
        if result not in found:
            continue
        made = _by_reference(reference, node, wanted, found)
        apart = _apart(found[result], wanted[result] if made is None else made)
        here = Divergence(node=node.name, operator=node.op_type, tensor=result, apart=apart)
        if not apart <= allowed:
            return here
        if worst is None or apart > worst.apart:
            worst = here
    return None if worst is None or worst.apart <= 0 else worst


def _by_reference(
    model: onnx.ModelProto, node: onnx.NodeProto, wanted: Mapping[str, Array], found: Mapping[str, Array]
) -> Array | None:
    """Returns the output of the reference's operator for the variant's inputs; None where they do not fit it."""
    names = [name for name in dict.fromkeys(node.input) if name in wanted]
    inputs = {name: found.get(name, wanted[name]).astype(wanted[name].dtype) for name in names}
    graph = helper.make_graph(
        [node],
        "one",
        [
            helper.make_tensor_value_info(
                name, helper.np_dtype_to_tensor_dtype(array.dtype), list(array.shape)
            )
            for name, array in inputs.items()
        ],
        [onnx.ValueInfoProto(name=node.output[0])],
        initializer=[tensor for tensor in model.graph.initializer if tensor.name in node.input],
    )
    alone = helper.make_model(graph, opset_imports=list(model.opset_import), ir_version=model.ir_version)
    try:
        return np.asarray(open_session(alone).run([node.output[0]], inputs)[0])
    except ExportFailed:
        return None
    except RUNTIME_ERRORS:
        return None


def _apart(found: Array, wanted: Array) -> float:
    """Returns the largest difference in a row over the row's largest value, so that no extreme row hides the others."""
    if found.shape != wanted.shape:
        return float("inf")
    if not wanted.size:
        return 0.0
    found, wanted = found.astype(np.float64), wanted.astype(np.float64)
    both = np.isfinite(wanted)
    if not np.array_equal(both, np.isfinite(found)):
        return float("inf")
    rows = len(wanted) if wanted.ndim > 1 else 1
    value = np.where(both, np.abs(wanted), 0.0).reshape(rows, -1).max(axis=1)
    with np.errstate(invalid="ignore"):
        difference = np.where(both, np.abs(found - wanted), 0.0).reshape(rows, -1).max(axis=1)
    common = np.sort(value[value > 0])
    scale = np.maximum(value, _SMALL * common[len(common) // 4]) if len(common) else value
    return float(np.max(np.where(scale > 0, difference / np.where(scale > 0, scale, 1.0), difference)))
