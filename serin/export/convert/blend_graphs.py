"""Joins graphs of several models into one: the weighted sum of their logits, over the same `num` and `cat`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
from onnx import compose, helper, numpy_helper

from serin.errors import ExportFailed

_INPUTS = ("num", "cat")


def blend_graphs(members: Sequence[tuple[onnx.ModelProto, float]]) -> onnx.ModelProto:
    """Returns num, cat -> logits. Every member must have that form."""
    parts = [compose.add_prefix(model, f"member{number}/") for number, (model, _) in enumerate(members)]
    first = members[0][0]
    weights = [np.asarray(weight, np.float32) for _, weight in members]
    nodes: list[onnx.NodeProto] = []
    initializers: list[onnx.TensorProto] = []
    weighted: list[str] = []
    for number, (part, weight) in enumerate(zip(parts, weights, strict=True)):
        prefix = f"member{number}/"
        names = {f"{prefix}{name}": name for name in _INPUTS}
        for node in part.graph.node:
            for position, name in enumerate(node.input):
                node.input[position] = names.get(name, name)
        nodes += part.graph.node
        initializers += [*part.graph.initializer, numpy_helper.from_array(weight, f"blend/weight{number}")]
        weighted.append(f"blend/logits{number}")
        nodes.append(
            helper.make_node(
                "Mul",
                [f"{prefix}logits", f"blend/weight{number}"],
                [weighted[-1]],
                name=f"blend/weigh{number}",
            )
        )
    nodes.append(helper.make_node("Sum", weighted, ["logits"], name="blend/sum"))
    graph = helper.make_graph(nodes, "blend", [*first.graph.input], [*first.graph.output], initializers)
    model = helper.make_model(
        graph,
        opset_imports=_opsets(parts),
        functions=[function for part in parts for function in part.functions],
        ir_version=max(part.ir_version for part in parts),
    )
    try:
        onnx.checker.check_model(model, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise ExportFailed(what="the blend", reason=f"its models do not fit together: {error}") from error
    return model


def _opsets(parts: Sequence[onnx.ModelProto]) -> list[onnx.OperatorSetIdProto]:
    """Returns the newest version of each domain. Trees and networks are written for the same main opset."""
    newest: dict[str, int] = {}
    for part in parts:
        for opset in part.opset_import:
            newest[opset.domain] = max(opset.version, newest.get(opset.domain, 0))
    return [helper.make_opsetid(domain, version) for domain, version in newest.items()]
