"""Expressions over columns: the kind and values of the result, and (expression2onnx) the same in the graph.

Numbers in a column are float32 as in a request; an expression computes in float64 and int64 and ends in float32. A
quoted string that is compared with a time is parsed as one. The result has no negative zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from serin.columns.column import Column, beside, column_from_arrow, on_host
from serin.expressions import Expression, ExpressionError, Masked, Node, evaluate, parse
from serin.formats.schema import INT64_NULL, Kind

COMPARISONS = frozenset(("<", "<=", ">", ">=", "==", "!="))
_TRUTHS = frozenset(("and", "or", "not", "is_null", "in")) | COMPARISONS


@dataclass(frozen=True, slots=True, kw_only=True)
class Typed:
    """An expression over columns of these kinds; strings that are times have become numbers."""

    root: Node
    kinds: Mapping[str, Kind]
    kind: Kind

    @property
    def servable(self) -> bool:
        """Returns whether the graph can compute it: everything except the order of strings."""
        return _servable(self.root, self.kinds)


def typed(text: str, kinds: Mapping[str, Kind]) -> Typed:
    """Parses an expression over columns of these kinds. Raises ExpressionError when it does not fit them."""
    expression = parse(text)
    own = {name: kinds[name] for name in expression.columns}
    root = _with_times(expression.root, own)
    return Typed(root=root, kinds=own, kind=kind_of_node(root, own))


def derive(expression: Typed, columns: Mapping[str, Column], rows: int, *, exact: bool = False) -> Column:
    """Returns the column that an expression makes. `exact` keeps float64, for values that only the target uses."""
    if expression.kind == "string":
        own = {name: columns[name].on_host() for name in expression.kinds}
        result = evaluate_columns(expression, own, rows)
        texts = np.where(result.null, "", result.values.astype(object))
        made_of_text = column_from_arrow(pa.array(texts, pa.string()), "string")
        return replace(made_of_text, values=beside_columns(made_of_text.values, columns))
    result = evaluate_columns(expression, columns, rows)
    if expression.kind == "float":
        values = result.values.astype(np.float64)
        values = np.where(values == 0, 0.0, values)
        with np.errstate(over="ignore"):
            made = np.where(result.null, np.nan, values).astype(np.float64 if exact else np.float32)
        return Column(kind="float", values=made)
    if expression.kind == "bool":
        truth = (result.values != 0).astype(np.int8)
        return Column(kind="bool", values=np.where(result.null, np.int8(-1), truth))
    whole = result.values.astype(np.int64)
    return Column(kind=expression.kind, values=np.where(result.null, np.int64(INT64_NULL), whole))


def evaluate_columns(expression: Typed, columns: Mapping[str, Column], rows: int) -> Masked:
    """The expression over columns; a part that reads a single string column is evaluated once per distinct string."""
    given: dict[str, Masked] = {}
    root = _by_text(expression.root, columns, given)
    own = {name: columns[name] for name in Expression("", root).columns if name not in given}
    apart = {type(column.values) for column in own.values()} | {type(each.values) for each in given.values()}
    if any(column.kind == "string" for column in own.values()) or len(apart) > 1:
        # several strings, or columns in two places: on the host
        own = {name: column.on_host() for name, column in own.items()}
        given = {name: Masked(on_host(each.values), on_host(each.null)) for name, each in given.items()}
    given |= {name: Masked(column.to_wire(), column.null) for name, column in own.items()}
    result = evaluate(Expression("", root), given)
    assert len(result.values) == rows
    if result.values.dtype.kind in "USOT":
        return result
    return Masked(beside_columns(result.values, columns), beside_columns(result.null, columns))


def beside_columns(array: Any, columns: Mapping[str, Column]) -> Any:
    """The array on the GPU when one of the columns is there."""
    xp = next((column.xp for column in columns.values() if column.xp is not np), np)
    return array if xp is np else xp.asarray(array)


def kind_of_node(node: Node, kinds: Mapping[str, Kind]) -> Kind:
    if node.kind == "column":
        return kinds[node.value]
    if node.kind == "literal":
        return _kind_of_literal(node.value)
    inner = [kind_of_node(child, kinds) for child in node.children]
    if node.kind in COMPARISONS or node.kind == "in":
        for other in inner[1:]:
            if (inner[0] == "string") != (other == "string"):
                raise ExpressionError(
                    f"a string is compared ({node.kind}) with a number; quote the number, or unquote the string"
                )
    elif "string" in inner and node.kind != "is_null":
        raise ExpressionError(f"strings have no arithmetic ({node.kind})")
    if node.kind in _TRUTHS:
        return "bool"
    return "float" if node.kind == "/" or "float" in inner else "int"


def _kind_of_literal(value: Any) -> Kind:
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int):
        return "int"
    return "string" if isinstance(value, str) else "float"


def _servable(node: Node, kinds: Mapping[str, Kind]) -> bool:
    if node.kind in COMPARISONS - {"==", "!="} and kind_of_node(node.children[0], kinds) == "string":
        return False
    if node.kind == "column" and kinds[node.value] == "string":
        return True
    return all(_servable(child, kinds) for child in node.children)


def _with_times(node: Node, kinds: Mapping[str, Kind]) -> Node:
    """The tree with strings that are compared with a time as microseconds."""
    children = tuple(_with_times(child, kinds) for child in node.children)
    if node.kind in COMPARISONS or node.kind == "in":
        is_time = [child.kind == "column" and kinds.get(child.value) == "timestamp" for child in children]
        if any(is_time):
            children = tuple(_time(child) for child in children)
    return replace(node, children=children)


def _time(node: Node) -> Node:
    if node.kind != "literal" or not isinstance(node.value, str):
        return node
    try:
        moment = column_from_arrow(pa.array([node.value]), "timestamp").values[0]
    except ValueError as error:  # pa.ArrowInvalid is one
        raise ExpressionError(
            f"{node.value!r} is not a time; write 2013-01-31 or 2013-01-31T05:00:00"
        ) from error
    return Node("literal", int(moment))


def _by_text(node: Node, columns: Mapping[str, Column], given: dict[str, Masked]) -> Node:
    """The tree with each part that reads a single string column replaced by its values, which go into `given`."""
    names = Expression("", node).columns
    if len(names) == 1 and node.kind in _TRUTHS and columns[names[0]].dictionary is not None:
        column = columns[names[0]]
        assert column.dictionary is not None
        texts: npt.NDArray[Any] = np.asarray([*column.dictionary.to_pylist(), ""], dtype=object)
        null = np.arange(len(texts)) == len(texts) - 1
        answers = evaluate(Expression("", node), {names[0]: Masked(texts, null)})
        place = f"\0{len(given)}"
        values, null = (beside(each, column.values) for each in answers)
        given[place] = Masked(values[column.values], null[column.values])
        return Node("column", place)
    return replace(node, children=tuple(_by_text(child, columns, given) for child in node.children))
