"""Converts an expression to ONNX nodes: the same bits as derived.derive, nulls included.

Every value is a pair: a tensor (int64, double, bool or string) and a bool tensor that is true where it is null.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from serin.columns.derived import COMPARISONS, Typed, kind_of_node
from serin.columns.onnx_graph import GraphBuilder
from serin.expressions import Node
from serin.formats.schema import INT64_NULL, Kind

_FLOAT, _INT8, _INT64, _BOOL, _DOUBLE = 1, 3, 7, 9, 11  # onnx.TensorProto


@dataclass(frozen=True, slots=True)
class _Pair:
    kind: str  # int, float, bool, text
    value: str
    null: str | None  # None: never null


def expression_to_onnx(graph: GraphBuilder, expression: Typed, inputs: Mapping[str, str]) -> str:
    """The column in wire form, [batch], from the rank-1 tensors of the columns it reads, also in wire form."""
    pair = _Translator(graph, inputs, expression.kinds).pair(expression.root)
    return _to_wire(graph, pair, expression.kind)


def _to_wire(graph: GraphBuilder, pair: _Pair, kind: Kind) -> str:
    value = pair.value
    if kind == "string":
        missing = graph.constant(np.asarray("", dtype=object), "no_text")
    elif kind == "float":
        zero = graph.constant(np.float64(0), "zero")
        value = graph.op("Where", graph.op("Equal", value, zero), zero, value)
        value = graph.op("Cast", value, to=_FLOAT)
        missing = graph.constant(np.float32("nan"), "nan")
    elif kind == "bool":
        value = graph.op("Cast", value, to=_INT8)
        if pair.null is None:
            return value
        # ONNX Runtime has no Where for int8, hence int64.
        wide = graph.op("Cast", value, to=_INT64)
        chosen = graph.op("Where", pair.null, graph.constant(np.int64(-1), "null"), wide)
        return graph.op("Cast", chosen, to=_INT8)
    else:
        missing = graph.constant(np.int64(INT64_NULL), "null")
    return value if pair.null is None else graph.op("Where", pair.null, missing, value)


class _Translator:
    def __init__(self, graph: GraphBuilder, inputs: Mapping[str, str], kinds: Mapping[str, Kind]) -> None:
        self._graph = graph
        self._inputs = inputs
        self._kinds = kinds
        self._read: dict[str, _Pair] = {}

    def pair(self, node: Node) -> _Pair:
        if node.kind == "column":
            return self._read.setdefault(node.value, self._column(node.value))
        if node.kind == "literal":
            return self._literal(node)
        parts = [self.pair(child) for child in node.children]
        if node.kind == "is_null":
            return self._is_null(parts[0])
        if node.kind == "in":
            return self._member(parts)
        if node.kind in ("and", "or", "not"):
            return self._logic(node.kind, parts)
        null = self._any_null(parts)
        if node.kind in COMPARISONS:
            return _Pair("bool", self._compare(node.kind, parts), null)
        return self._arithmetic(node, parts, null)

    def _column(self, name: str) -> _Pair:
        graph, tensor, kind = self._graph, self._inputs[name], self._kinds[name]
        if kind == "string":
            empty = graph.constant(np.asarray("", dtype=object), "no_text")
            return _Pair("text", tensor, graph.op("Equal", tensor, empty))
        if kind == "float":
            return _Pair("float", graph.op("Cast", tensor, to=_DOUBLE), graph.op("IsNaN", tensor))
        if kind == "bool":
            null = graph.op("Equal", tensor, graph.constant(np.int8(-1), "null"))
            return _Pair("int", graph.op("Cast", tensor, to=_INT64), null)
        return _Pair("int", tensor, graph.op("Equal", tensor, graph.constant(np.int64(INT64_NULL), "null")))

    def _literal(self, node: Node) -> _Pair:
        graph, value = self._graph, node.value
        if value is None:
            return _Pair(
                "float", graph.constant(np.float64(0), "none"), graph.constant(np.bool_(True), "true")
            )
        if isinstance(value, bool):
            return _Pair("bool", graph.constant(np.bool_(value), "truth"), None)
        if isinstance(value, int):
            return _Pair("int", graph.constant(np.int64(value), "whole"), None)
        if isinstance(value, float):
            return _Pair("float", graph.constant(np.float64(value), "number"), None)
        return _Pair("text", graph.constant(np.asarray(value, dtype=object), "text"), None)

    def _is_null(self, part: _Pair) -> _Pair:
        if part.null is not None:
            return _Pair("bool", part.null, None)
        same = self._graph.op("Equal", part.value, part.value)  # false throughout, in the tensor's own shape
        return _Pair(
            "bool", self._graph.op("And", same, self._graph.constant(np.bool_(False), "false")), None
        )

    def _member(self, parts: list[_Pair]) -> _Pair:
        found = [self._compare("==", [parts[0], option]) for option in parts[1:]]
        return _Pair("bool", self._joined("Or", found), parts[0].null)

    def _logic(self, kind: str, parts: list[_Pair]) -> _Pair:
        graph = self._graph
        truths = []
        for part in parts:
            truth = part.value if part.kind == "bool" else graph.op("Cast", part.value, to=_BOOL)
            truths.append(truth if part.null is None else graph.op("And", truth, graph.op("Not", part.null)))
        if kind == "not":
            return _Pair("bool", graph.op("Not", truths[0]), parts[0].null)
        value = graph.op("And" if kind == "and" else "Or", *truths)
        null = self._any_null(parts)
        if null is None:
            return _Pair("bool", value, None)
        if kind == "or":
            return _Pair("bool", value, graph.op("And", null, graph.op("Not", value)))
        known_false = [
            graph.op("Not", truth) if part.null is None else graph.op("Not", graph.op("Or", truth, part.null))
            for truth, part in zip(truths, parts, strict=True)
        ]
        settled = graph.op("Or", *known_false)
        return _Pair("bool", value, graph.op("And", null, graph.op("Not", settled)))

    def _compare(self, sign: str, parts: list[_Pair]) -> str:
        graph = self._graph
        left, right = self._alike(parts)
        if sign == "==":
            return graph.op("Equal", left, right)
        if sign == "!=":
            return graph.op("Not", graph.op("Equal", left, right))
        name = {"<": "Less", "<=": "LessOrEqual", ">": "Greater", ">=": "GreaterOrEqual"}[sign]
        return graph.op(name, left, right)

    def _arithmetic(self, node: Node, parts: list[_Pair], null: str | None) -> _Pair:
        graph = self._graph
        kind = kind_of_node(node, self._kinds)
        made = "float" if kind == "float" else "int"
        if node.kind == "abs":
            return _Pair(made, graph.op("Abs", self._as(parts[0], made)), null)
        left, right = self._as(parts[0], made), self._as(parts[1], made)
        if node.kind in ("/", "%"):
            zero = graph.op("Equal", right, self._number(0, made))
            divisor = graph.op("Where", zero, self._number(1, made), right)
            value = graph.op("Div", left, divisor) if node.kind == "/" else self._modulo(left, divisor, made)
            return _Pair(made, value, zero if null is None else graph.op("Or", null, zero))
        if node.kind in ("min", "max"):
            first = graph.op("Less" if node.kind == "min" else "Greater", left, right)
            if made == "float":
                first = graph.op("Or", first, graph.op("IsNaN", left))
            return _Pair(made, graph.op("Where", first, left, right), null)
        name = {"+": "Add", "-": "Sub", "*": "Mul"}[node.kind]
        return _Pair(made, graph.op(name, left, right), null)

    def _modulo(self, left: str, divisor: str, made: str) -> str:
        """The remainder with the sign of the divisor, as in Python."""
        graph = self._graph
        if (
            made == "int"
        ):  # the smallest int64 divided by -1 traps on some processors; by 1 the answer is the same
            minus = graph.op("Equal", divisor, self._number(-1, made))
            return graph.op("Mod", left, graph.op("Where", minus, self._number(1, made), divisor), fmod=0)
        rest = graph.op("Mod", left, divisor, fmod=1)
        zero = self._number(0, made)
        signs = graph.op("Xor", graph.op("Less", rest, zero), graph.op("Less", divisor, zero))
        wrong = graph.op("And", signs, graph.op("Not", graph.op("Equal", rest, zero)))
        return graph.op("Where", wrong, graph.op("Add", rest, divisor), rest)

    def _number(self, value: int, made: str) -> str:
        return self._graph.constant(np.float64(value) if made == "float" else np.int64(value), "number")

    def _alike(self, parts: list[_Pair]) -> tuple[str, str]:
        left, right = parts
        if "text" in (left.kind, right.kind):
            return left.value, right.value
        made = "float" if "float" in (left.kind, right.kind) else "int"
        return self._as(left, made), self._as(right, made)

    def _as(self, part: _Pair, made: str) -> str:
        if part.kind == made:
            return part.value
        return self._graph.op("Cast", part.value, to=_DOUBLE if made == "float" else _INT64)

    def _any_null(self, parts: list[_Pair]) -> str | None:
        nulls = [part.null for part in parts if part.null is not None]
        return self._joined("Or", nulls) if nulls else None

    def _joined(self, op: str, tensors: list[str]) -> str:
        made = tensors[0]
        for tensor in tensors[1:]:
            made = self._graph.op(op, made, tensor)
        return made
