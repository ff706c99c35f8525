"""Builds an ONNX graph node by node. It knows nothing about features or networks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper, numpy_helper

OPSETS: Mapping[str, int] = {"": 20, "ai.onnx.ml": 3, "com.microsoft": 1}
IR_VERSION = 10
ELEMENT_OF_DTYPE: Mapping[str, int] = {
    "BYTES": onnx.TensorProto.STRING,
    "FP32": onnx.TensorProto.FLOAT,
    "INT64": onnx.TensorProto.INT64,
    "INT8": onnx.TensorProto.INT8,
}


class GraphBuilder:
    """Nodes and initializers under construction; every name it gives is new within it."""

    def __init__(self, prefix: str = "") -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self._prefix = prefix
        self._given = 0
        self._scalars: dict[tuple[str, bytes], str] = {}

    def name(self, hint: str) -> str:
        self._given += 1
        return f"{self._prefix}{hint}_{self._given}"

    def constant(self, array: npt.ArrayLike, hint: str = "constant") -> str:
        """An initializer with these values (strings: an object array of str). Equal scalars share one."""
        values = np.asarray(array)
        key = (values.dtype.str, values.tobytes()) if values.ndim == 0 and values.dtype != object else None
        if key is not None and key in self._scalars:
            return self._scalars[key]
        name = self.name(hint)
        self.initializers.append(numpy_helper.from_array(values, name))
        if key is not None:
            self._scalars[key] = name
        return name

    def op(self, op_type: str, *inputs: str, domain: str = "", **attributes: Any) -> str:
        """Adds a node and names its output."""
        output = self.name(op_type.lower())
        node = helper.make_node(
            op_type, list(inputs), [output], name=f"node_{output}", domain=domain, **attributes
        )
        self.nodes.append(node)
        return output

    def to_model(
        self,
        inputs: Mapping[str, tuple[int, Sequence[int | str]]],
        outputs: Mapping[str, tuple[int, Sequence[int | str]]],
        name: str = "serin",
        *,
        opsets: Mapping[str, int] = OPSETS,
    ) -> onnx.ModelProto:
        """The finished, checked model; inputs and outputs are name -> (element type, shape). `opsets`: newer ones."""
        graph = helper.make_graph(
            [],
            name,
            [helper.make_tensor_value_info(key, element, shape) for key, (element, shape) in inputs.items()],
            [helper.make_tensor_value_info(key, element, shape) for key, (element, shape) in outputs.items()],
        )
        imports = [helper.make_opsetid(domain, version) for domain, version in {**OPSETS, **opsets}.items()]
        model = helper.make_model(graph, opset_imports=imports, ir_version=IR_VERSION, producer_name="serin")
        model.graph.node.extend(self.nodes)  # copied once: a lookup may have millions of keys
        model.graph.initializer.extend(self.initializers)
        onnx.checker.check_model(model)
        return model


class Whole:
    """An int64 tensor of a graph with the arithmetic of numpy arrays: // and % round towards minus infinity."""

    def __init__(self, graph: GraphBuilder, name: str) -> None:
        self._graph = graph
        self.name = name

    def _with(self, op_type: str, other: Whole | int, **attributes: Any) -> Whole:
        right = other.name if isinstance(other, Whole) else self._graph.constant(np.int64(other), "whole")
        return Whole(self._graph, self._graph.op(op_type, self.name, right, **attributes))

    def __add__(self, other: Whole | int) -> Whole:
        return self._with("Add", other)

    def __sub__(self, other: Whole | int) -> Whole:
        return self._with("Sub", other)

    def __mul__(self, other: Whole | int) -> Whole:
        return self._with("Mul", other)

    def __mod__(self, other: int) -> Whole:
        return self._with("Mod", other, fmod=0)  # the sign of the divisor, as in Python

    def __floordiv__(self, other: int) -> Whole:
        return (self - self % other)._with("Div", other)  # ONNX divides towards zero
