"""The small safe grammar for targets, derived columns and filters. Nothing is ever passed to eval.

    arr_delay > 15 and not is_null(tailnum)
    (price - cost) / price
    `column with spaces` in ('a', 'b')

Words: column names (or `quoted ones`), numbers, 'strings', true, false, null; + - * / %, comparisons, in (...),
and, or, not, is_null(x), abs(x), min(x, y), max(x, y); `=` means `==`. Nulls are SQL's: arithmetic and comparisons with
a null are null, `and` and `or` know three values, only is_null answers true or false on a null. Division by zero is
null.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from operator import or_
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from serin.errors import nearest

Array: TypeAlias = npt.NDArray[Any]

_TOKEN = re.compile(
    r"""\s*(?:(?P<number>\d+\.?\d*(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?)
    |(?P<name>[A-Za-z_][A-Za-z0-9_]*)
    |`(?P<quoted>[^`]+)`
    |'(?P<string>(?:[^'\\]|\\.)*)'|"(?P<string2>(?:[^"\\]|\\.)*)"
    |(?P<sign><=|>=|==?|!=|<|>|\+|-|\*|/|%|\(|\)|,))""",
    re.VERBOSE,
)
_WORDS = {"and", "or", "not", "in", "true", "false", "null"}
_FUNCTIONS = {"is_null": 1, "abs": 1, "min": 2, "max": 2}
_DEEPEST = 200  # levels of a tree, which is walked by recursion
_LONGEST_SHOWN = 200  # characters of an expression in a message
_COMPARISONS = {"<", "<=", ">", ">=", "==", "!="}
_as_text = np.frompyfunc(str, 1, 1)


class Masked(NamedTuple):
    """A column while it is computed with: where `null` is true, `values` means nothing."""

    values: Array
    null: npt.NDArray[np.bool_]


class ExpressionError(ValueError):
    """The text is not a valid expression, or the columns do not fit it. The message says what and where."""


@dataclass(frozen=True, slots=True)
class Node:
    kind: str  # literal, column, or the operator or function itself
    value: Any = None
    children: tuple[Node, ...] = ()

    @property
    def depth(self) -> int:
        """How many nodes are on the longest way down."""
        deepest, level = 0, [self]
        while level:
            deepest, level = deepest + 1, [child for node in level for child in node.children]
        return deepest


@dataclass(frozen=True, slots=True)
class Expression:
    text: str
    root: Node

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns it reads, in order of first use."""
        found, waiting = dict[str, None](), [self.root]
        while waiting:
            node = waiting.pop()
            found |= {node.value: None} if node.kind == "column" else {}
            waiting += reversed(node.children)
        return tuple(found)


@lru_cache(maxsize=1024)
def parse(text: str) -> Expression:
    """The expression behind `text`, or ExpressionError with the place where it stops making sense."""
    return Expression(text, _Parser(text).whole())


def evaluate(expression: Expression, columns: Mapping[str, Masked]) -> Masked:
    """One value per row. Integers stay integers under + - * % min max; all other numbers are float64."""
    like = next((column.null for column in columns.values()), np.zeros(0, bool))
    with np.errstate(all="ignore"):
        return _evaluate(expression.root, columns, like)


def _balanced(kind: str, terms: Sequence[Node]) -> Node:
    """`and` and `or` of any number of terms, as a tree of few levels: their order does not matter."""
    if len(terms) == 1:
        return terms[0]
    half = (len(terms) + 1) // 2
    return Node(kind, children=(_balanced(kind, terms[:half]), _balanced(kind, terms[half:])))


def _shown(text: str) -> str:
    return repr(text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}...")


class _Parser:
    """Recursive descent, loosest binding first: or, and, not, comparison, + -, * / %, unary -."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = self._tokenise(text)
        self._next = 0
        self._depth = 0

    def whole(self) -> Node:
        node = self._any_of()
        if self._next < len(self._tokens):
            raise self._error("something after the end of the expression")
        if node.depth > _DEEPEST:
            advice = "compute parts of it as columns (data.derived)"
            raise ExpressionError(f"{_shown(self._text)}: more than {_DEEPEST} operations in a row; {advice}")
        return node

    def _tokenise(self, text: str) -> list[tuple[str, str, int]]:
        tokens, at, end = [], 0, len(text.rstrip())
        while at < end:
            match = _TOKEN.match(text, at)
            if match is None:
                sign = text[at : at + 1_000].strip()[:1]
                raise ExpressionError(f"{_shown(text)}: unexpected {sign!r} at character {at + 1}")
            kind = match.lastgroup or ""
            value = match[kind]
            if kind.startswith("string"):
                kind, value = "string", re.sub(r"\\(.)", r"\1", value)
            elif kind == "name" and value in _WORDS:
                kind = "sign"
            elif kind == "quoted":
                kind = "column"
            elif value == "=":  # as in SQL
                value = "=="
            tokens.append((kind, value, match.start(match.lastgroup or 0)))
            at = match.end()
        if not tokens:
            raise ExpressionError("an empty expression")
        return tokens

    def _error(self, what: str) -> ExpressionError:
        at = self._tokens[self._next][2] + 1 if self._next < len(self._tokens) else len(self._text) + 1
        return ExpressionError(f"{_shown(self._text)}: {what} at character {at}")

    def _take(self, *signs: str) -> str | None:
        if self._next < len(self._tokens):
            kind, value, _ = self._tokens[self._next]
            if kind == "sign" and value in signs:
                self._next += 1
                return value
        return None

    def _expect(self, sign: str) -> None:
        if not self._take(sign):
            raise self._error(f"{sign!r} expected")

    def _any_of(self) -> Node:
        self._depth += 1
        if self._depth > 60:
            raise self._error("nested too deeply")
        terms = [self._all_of()]
        while self._take("or"):
            terms.append(self._all_of())
        self._depth -= 1
        return _balanced("or", terms)

    def _all_of(self) -> Node:
        terms = [self._negation()]
        while self._take("and"):
            terms.append(self._negation())
        return _balanced("and", terms)

    def _negation(self) -> Node:
        negations = 0
        while self._take("not"):
            negations += 1
        node = self._comparison()
        return Node("not", children=(node,)) if negations % 2 else node

    def _comparison(self) -> Node:
        node = self._sum()
        if self._take("in"):
            self._expect("(")
            options = self._listed(self._sum)
            if any(option.kind != "literal" for option in options):
                raise self._error("`in` takes numbers and strings only")
            return Node("in", children=(node, *options))
        sign = self._take(*_COMPARISONS)
        return Node(sign, children=(node, self._sum())) if sign else node

    def _sum(self) -> Node:
        return self._chain(self._product, "+", "-")

    def _product(self) -> Node:
        return self._chain(self._unary, "*", "/", "%")

    def _chain(self, term: Callable[[], Node], *signs: str) -> Node:
        node = term()
        while sign := self._take(*signs):
            node = Node(sign, children=(node, term()))
        return node

    def _listed(self, item: Callable[[], Node]) -> list[Node]:
        """Items up to the closing parenthesis."""
        items = [item()]
        while self._take(","):
            items.append(item())
        self._expect(")")
        return items

    def _unary(self) -> Node:
        negative = False
        while self._take("-"):
            negative = not negative
        node = self._atom()
        return Node("-", children=(Node("literal", 0), node)) if negative else node

    def _atom(self) -> Node:
        if self._take("("):
            node = self._any_of()
            self._expect(")")
            return node
        if word := self._take("true", "false", "null"):
            return Node("literal", {"true": True, "false": False, "null": None}[word])
        if self._next >= len(self._tokens) or self._tokens[self._next][0] == "sign":
            raise self._error("a column, number, 'string' or '(' expected")
        kind, value, _ = self._tokens[self._next]
        self._next += 1
        if kind == "number":
            number = int(value) if value.isdigit() else float(value)
            if isinstance(number, int) and number >= 2**63:
                raise self._error(f"{value} is too large for an integer; write {value}.0")
            return Node("literal", number)
        if kind == "string":
            return Node("literal", value)
        if kind == "name" and self._take("("):
            return self._call(value)
        return Node("column", value)

    def _call(self, name: str) -> Node:
        if name not in _FUNCTIONS:
            raise self._error(f"unknown function {name!r}{nearest(name, _FUNCTIONS)}")
        arguments = self._listed(self._any_of)
        if len(arguments) != _FUNCTIONS[name]:
            raise self._error(f"{name} takes {_FUNCTIONS[name]} argument(s)")
        return Node(name, children=tuple(arguments))


def _evaluate(node: Node, columns: Mapping[str, Masked], like: Array) -> Masked:
    """New arrays are made as long as `like`, and where it is: on the host or on a GPU."""
    if node.kind == "column":
        if node.value not in columns:
            raise ExpressionError(f"no column {node.value!r}{nearest(node.value, columns)}")
        return columns[node.value]
    if node.kind == "literal":
        value = 0.0 if node.value is None else node.value
        return Masked(_constant(like, value), _constant(like, node.value is None))
    if node.kind == "in":
        return _member(node, columns, like)
    parts = [_evaluate(child, columns, like) for child in node.children]
    if node.kind == "is_null":
        return Masked(parts[0].null.copy(), np.zeros_like(like))
    if node.kind in ("and", "or", "not"):
        return _logic(node.kind, parts)
    null = reduce(or_, [part.null for part in parts])
    values = [part.values for part in parts]
    if node.kind in _COMPARISONS:
        return Masked(_compare(node.kind, *values), null)
    return _arithmetic(node.kind, [_numeric(part) for part in values], null)


def _member(node: Node, columns: Mapping[str, Masked], like: Array) -> Masked:
    column = _evaluate(node.children[0], columns, like)
    found = np.zeros_like(like)
    for option in node.children[1:]:
        found |= _compare("==", column.values, _constant(like, option.value))
    return Masked(found, column.null)


def _constant(like: Any, value: Any) -> Array:
    """The value for every row; on the host it takes no memory, and nobody may write into it."""
    if isinstance(like, np.ndarray):
        return np.broadcast_to(np.asarray(value), like.shape)
    return np.full_like(like, value, dtype=np.asarray(value).dtype)


def _logic(kind: str, parts: list[Masked]) -> Masked:
    truths = [part.values.astype(bool) & ~part.null for part in parts]
    if kind == "not":
        return Masked(~truths[0], parts[0].null)
    left, right = parts
    if kind == "and":  # false wins over null
        false = (~left.null & ~truths[0]) | (~right.null & ~truths[1])
        return Masked(truths[0] & truths[1], (left.null | right.null) & ~false)
    true = truths[0] | truths[1]  # true wins over null
    return Masked(true, (left.null | right.null) & ~true)


def _compare(sign: str, left: Array, right: Array) -> Array:
    if _is_text(left) != _is_text(right):
        raise ExpressionError(
            f"text is compared ({sign}) with a number; put the number in quotes, or drop them"
        )
    operations = {
        "<": np.less, "<=": np.less_equal, ">": np.greater, ">=": np.greater_equal,
        "==": np.equal, "!=": np.not_equal,
    }  # fmt: skip
    if _is_text(left):
        result = operations[sign](_texts(left), _texts(right)).astype(bool, copy=False)
        return np.broadcast_to(result, left.shape)  # two constants give one value
    return operations[sign](left, right).astype(bool, copy=False)


def _texts(values: Array) -> Array:
    """Strings of any length: numpy's own texts would make each row as wide as the longest one. A constant becomes a
    single value."""
    if values.size and not any(values.strides):
        values = values.reshape(-1)[:1].reshape(())
    return np.asarray(_as_text(values), dtype=object)


def _arithmetic(kind: str, values: list[Array], null: npt.NDArray[np.bool_]) -> Masked:
    if kind == "abs":
        return Masked(np.abs(values[0]), null)
    left, right = values
    if kind in ("/", "%"):
        zero = right == 0
        divisor = np.where(zero, 1, right)
        quotient = left.astype(np.float64) / divisor if kind == "/" else _remainder(left, divisor)
        return Masked(quotient, null | zero)
    operations = {"+": np.add, "-": np.subtract, "*": np.multiply, "min": np.minimum, "max": np.maximum}
    return Masked(operations[kind](left, right), null)


def _remainder(left: Any, right: Any) -> Any:
    """What is left by a division. Of fractions always on the host: a GPU's may differ in the last bit."""
    if isinstance(left, np.ndarray) or "f" not in left.dtype.kind + right.dtype.kind:
        return np.mod(left, right)
    host = np.mod(left.get(), right.get())
    made = np.empty_like(left, dtype=host.dtype)
    made.set(host)
    return made


def _numeric(values: Array) -> Array:
    if _is_text(values):
        raise ExpressionError("text cannot be calculated with")
    if values.dtype.kind in "biu":
        return values.astype(np.int64)
    return values.astype(np.float64) if values.dtype.kind == "f" else values


def _is_text(values: Array) -> bool:
    return values.dtype.kind in "USOT"
