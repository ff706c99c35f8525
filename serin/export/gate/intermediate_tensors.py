"""Exposes the intermediate tensors of a graph as outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx

from serin.export.session import Device, open_session
from serin.formats.wire import Array


def with_tensors(model: onnx.ModelProto, tensors: Sequence[str]) -> onnx.ModelProto:
    """Returns a copy of `model` that also outputs intermediate tensors."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    present = {output.name for output in copy.graph.output}
    copy.graph.output.extend(onnx.ValueInfoProto(name=name) for name in tensors if name not in present)
    return copy


def float_tensors(model: onnx.ModelProto) -> list[str]:
    """Returns the float32 tensors that nodes output, in the order of the nodes."""
    inferred = onnx.shape_inference.infer_shapes(model)
    known = {
        info.name: info.type.tensor_type.elem_type
        for info in (*inferred.graph.value_info, *inferred.graph.output)
    }
    names = [name for node in model.graph.node for name in node.output if name]
    return [name for name in names if known.get(name) == onnx.TensorProto.FLOAT]


def run_with_inner(
    model: onnx.ModelProto, feed: Mapping[str, Array], tensors: Sequence[str], device: Device = "cpu"
) -> dict[str, Array]:
    """Returns the intermediate tensors by name, for one batch."""
    session = open_session(with_tensors(model, tensors), device=device)
    return dict(zip(tensors, session.run(list(tensors), dict(feed)), strict=True))
